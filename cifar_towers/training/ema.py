"""Moving averages of the weights and of the losses, and lookahead."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from cifar_towers.towers.placement import HOST, pin_to_device
from cifar_towers.training.optimizers import make_slot

LOSS_DECAY = 0.9


class ExponentialMovingAverage:
    """a <- d a + (1 - d) w after every update, with d = min(decay, (1 + step) / (10 + step)).

    The ramp keeps the average from remembering the initial weights. Moving statistics of batch norm are averaged too.
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float):
        self.decay, self.variables = decay, list(variables)
        self.averages = [make_slot(v, "ema", tf.convert_to_tensor(v)) for v in self.variables] if decay else []

    def update(self, step: tf.Tensor, finite: tf.Tensor) -> None:
        """Averages in the variables if this step was `finite`; `step` counts the steps done, this one included."""
        if not self.averages:
            return
        with tf.device(step.device):
            done = tf.cast(step, tf.float32)
            weight = tf.where(finite, 1 - tf.minimum(self.decay, (1 + done) / (10 + done)), 0.0)
        for average, variable in zip(self.averages, self.variables, strict=True):
            with tf.device(variable.device):
                if average.dtype.is_floating:
                    average.assign_sub(tf.cast(weight, average.dtype) * (average - variable))
                else:  # a counter or a seed
                    average.assign(variable)


class Lookahead:
    """Every five steps slow <- d slow + (1 - d) w, w <- slow, with d = 0.95^5 (step / total)^3; at the end w <- slow.

    A step that is skipped changes neither; only the last step of a run takes the slow weights in any case.
    Source: M. Zhang et al., arXiv 1907.08610, in the form of the CIFAR-10 speed records.
    """

    PERIOD = 5

    def __init__(self, variables: Sequence[tf.Variable], total_steps: int, enabled: bool):
        self.variables, self.total_steps = list(variables), total_steps
        self.slow = [make_slot(v, "lookahead", tf.convert_to_tensor(v)) for v in self.variables] if enabled else []

    def update(self, step: tf.Tensor, finite: tf.Tensor) -> None:
        """Updates slow weights and variables where they are due; `step` counts the steps done, this one included."""
        if not self.slow:
            return
        with tf.device(step.device):
            regular = tf.logical_and(tf.equal(step % self.PERIOD, 0), finite)
            due = tf.logical_or(regular, tf.equal(step, self.total_steps))
            decay = 0.95**5 * tf.cast(step / self.total_steps, tf.float32) ** 3
            decay = tf.where(regular, decay, 1.0)  # elsewhere the last step only takes the slow weights

        def synchronize():
            for slow, variable in zip(self.slow, self.variables, strict=True):
                with tf.device(variable.device):
                    if slow.dtype.is_floating:
                        slow.assign_sub(tf.cast(1 - decay, slow.dtype) * (slow - variable))
                        variable.assign(slow)
            return tf.constant(True)

        tf.cond(due, synchronize, lambda: tf.constant(False))


class SmoothedLosses:
    """Moving averages of the final tower's loss terms: a <- 0.9 a + 0.1 loss, from 0, debiased."""

    def __init__(self, terms: Sequence[str]):
        with pin_to_device(HOST):
            self.sums = {term: tf.Variable(0.0, trainable=False, name=f"{term}/average") for term in terms}
            self.weight = tf.Variable(0.0, trainable=False, name="loss_average_weight")

    def update(self, losses: Mapping[str, tf.Tensor], finite: tf.Tensor) -> dict[str, tf.Tensor]:
        """Averages in the losses of one step if it was `finite`; the averages by term."""
        with tf.name_scope("loss_averages"), tf.device(self.weight.device):
            weight = tf.where(finite, LOSS_DECAY * self.weight + (1 - LOSS_DECAY), self.weight)
            self.weight.assign(weight)
            averages = {}
            for term, loss in losses.items():
                total = LOSS_DECAY * self.sums[term] + (1 - LOSS_DECAY) * tf.cast(loss, tf.float32)
                total = tf.where(finite, total, self.sums[term])
                self.sums[term].assign(total)
                averages[term] = tf.math.divide_no_nan(total, weight)
        return averages
