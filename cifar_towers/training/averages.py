"""Moving averages of the weights, which are kept beside them: EMA and Lookahead."""

from collections.abc import Sequence

import tensorflow as tf

from cifar_towers.training.optimizers import make_slot


class ExponentialMovingAverage:
    """Moving average of the weights: a <- d a + (1 - d) w after every update, with
    d = min(decay, (1 + step) / (10 + step)).

    The ramp keeps the average from remembering the initial weights. Moving statistics of batch norm
    are averaged too. Without a decay there are no averages.
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float):
        self.decay = decay
        self.variables = list(variables)
        self.averages: list[tf.Variable] = []
        if decay:
            self.averages = [make_slot(v, "ema", tf.convert_to_tensor(v)) for v in self.variables]

    def update(self, step: tf.Tensor, updated: tf.Tensor) -> None:
        """Add the variables to the averages if they were `updated`; `step` is the number of
        finished steps, this one included.
        """
        if not self.averages:
            return

        done = tf.cast(step, tf.float32)
        decay = tf.minimum(self.decay, (1 + done) / (10 + done))
        weight = tf.where(updated, 1 - decay, 0.0)

        for average, variable in zip(self.averages, self.variables, strict=True):
            with tf.device(variable.device):
                if average.dtype.is_floating:
                    average.assign_sub(tf.cast(weight, average.dtype) * (average - variable))
                else:  # a counter or a seed
                    average.assign(variable)


class Lookahead:
    """Slow weights: every five steps slow <- d slow + (1 - d) w and w <- slow, with
    d = 0.95^5 (step / total)^3.

    A skipped step changes neither. After step `total` w <- slow, even if that step was skipped; a
    run that ends earlier does not do this. Source: M. Zhang et al., arXiv 1907.08610, in the form
    of the CIFAR-10 speed records.
    """

    PERIOD = 5

    def __init__(self, variables: Sequence[tf.Variable], total_steps: int, enabled: bool):
        self.variables = list(variables)
        self.total_steps = total_steps
        self.slow: list[tf.Variable] = []
        if enabled:
            self.slow = [make_slot(v, "lookahead", tf.convert_to_tensor(v)) for v in self.variables]

    def update(self, step: tf.Tensor, updated: tf.Tensor) -> None:
        """Update slow weights and variables if they are due; `step` is the number of finished
        steps, this one included.
        """
        if not self.slow:
            return

        slow_moves = tf.logical_and(tf.equal(step % self.PERIOD, 0), updated)
        is_last = tf.equal(step, self.total_steps)
        due = tf.logical_or(slow_moves, is_last)

        regular_decay = 0.95**5 * tf.cast(step / self.total_steps, tf.float32) ** 3
        # the last step ends on the slow weights, also where they do not move in it
        decay = tf.where(slow_moves, regular_decay, 1.0)

        def synchronize() -> tf.Tensor:
            for slow, variable in zip(self.slow, self.variables, strict=True):
                if slow.dtype.is_floating:
                    with tf.device(variable.device):
                        slow.assign_sub(tf.cast(1 - decay, slow.dtype) * (slow - variable))
                        variable.assign(slow)
            return tf.constant(True)

        tf.cond(due, synchronize, lambda: tf.constant(False))
