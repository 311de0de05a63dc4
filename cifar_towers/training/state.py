"""Everything a run carries from step to step: variables, slots, and moving averages."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar_towers.data.batches import RandomDraws
from cifar_towers.towers.keras_parallel import is_seed_generator_state
from cifar_towers.towers.placement import HOST, pin_to_device
from cifar_towers.training.losses import SmoothedLosses
from cifar_towers.training.optimizers import Optimizer, make_slot

# of one layer in a step; Keras takes seeds modulo 2^31 - 2, so they differ for two million examples
MAX_DRAWS = 1024


class UpdateResult(NamedTuple):
    """The result of `TrainState.apply`."""

    updated: tf.Tensor  # bool: the variables were updated; otherwise the step was skipped
    gradient_norm: tf.Tensor  # of the mean gradient, before weight decay
    smoothed_losses: dict[str, tf.Tensor]


class TrainState:
    """The model's variables, the optimizer's slots and the averages. Build it inside the placement
    of its variables.

    Args:
      jit_compile: let XLA compile each tower's pass, and on each device the new values of its
        variables, and their assignment with the averages.
      home: the device of the step counter and of the losses' averages.

    Attributes:
      step: number of finished steps.
      weights: N trained variables. non_trainable: the model's other variables, frozen filters among
        them.
      is_seed: for each of `non_trainable`, whether a layer draws random numbers from it.
      proxy: the state of a smaller net that is trained, saved and restored beside this one, or
        None.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Optimizer,
        loss_terms: Sequence[str],
        total_steps: int,
        ema_decay: float = 0.0,
        lookahead: bool = False,
        jit_compile: bool = False,
        home: str = HOST,
    ):
        self.model, self.optimizer, self.jit_compile = model, optimizer, jit_compile
        self.proxy: TrainState | None = None
        with pin_to_device(home):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.weights = [v.value for v in model.trainable_variables]
        self.non_trainable = [v.value for v in model.non_trainable_variables]
        self._updated = optimizer.updated_variables() + self.non_trainable
        self.is_seed = [is_seed_generator_state(v) for v in model.non_trainable_variables]
        self.ema = ExponentialMovingAverage(self.weights + self.non_trainable, ema_decay)
        self.lookahead = Lookahead(self.weights + self.non_trainable, total_steps, lookahead)
        self.loss_averages = SmoothedLosses(loss_terms, home)

    def read_variables(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return (weights, non-trainable values) as tensors, read where the variables are
        placed.
        """
        return [tf.convert_to_tensor(v) for v in self.weights], [
            tf.convert_to_tensor(v) for v in self.non_trainable
        ]

    def with_layer_seeds(
        self, non_trainable: list[tf.Tensor], draws: RandomDraws
    ) -> list[tf.Tensor]:
        """Return the non-trainable values for a part of the batch, seeded by the run and the part's
        first example.
        """
        count = draws.example_index[0] * MAX_DRAWS
        return [
            tf.stack([value[0], tf.cast(count, value.dtype)]) if seed else value
            for value, seed in zip(non_trainable, self.is_seed, strict=True)
        ]

    def apply(
        self,
        gradients: list[tuple],
        non_trainable: Sequence[tf.Tensor | None],
        losses: Mapping[str, tf.Tensor],
        learning_rates: Mapping[str, tf.Tensor],
        finite: tf.Tensor,
    ) -> UpdateResult:
        """Update the variables, then the averages, then the step counter.

        If a tower's loss or the norm of the mean gradient is not finite, the step is skipped: only
        the step counter changes. With lookahead, the last step of the schedule sets the weights to
        the slow weights even if it is skipped.

        Args:
          gradients: N x (mean gradient, variable).
          non_trainable: a new value for each of the model's, or None to leave it.
          losses: the final tower's, by term. learning_rates: by active parameter group.
          finite: [] bool, whether the losses of all towers are finite.
        """
        devices = list(dict.fromkeys(variable.device for variable in self._updated))
        with tf.name_scope("apply"):
            step = tf.convert_to_tensor(self.step)
            arguments = gradients, non_trainable, learning_rates, step
            computed = [self._on(device, self._compute_updates, *arguments) for device in devices]
            values, half_squares = zip(*computed, strict=True)
            with tf.device(self.step.device):
                gradient_norm = tf.sqrt(2.0 * tf.add_n(half_squares))
                updated = tf.logical_and(finite, tf.math.is_finite(gradient_norm))
                steps_done = step + 1
            for device, values_there in zip(devices, values, strict=True):
                self._on(device, self._assign, values_there, updated, steps_done)
        self.step.assign_add(1)
        smoothed_losses = self._on(
            self.step.device, lambda _: self.loss_averages.update(losses, updated)
        )
        return UpdateResult(updated, gradient_norm, smoothed_losses)

    def _on(self, device: str, function: Callable, *args: Any) -> Any:
        """Return `function(device, *args)`, computed on the device, and compiled by XLA if the
        update is.
        """
        with tf.device(device):
            return xla_compiled(functools.partial(function, device, *args), self.jit_compile)()

    def _compute_updates(
        self,
        device: str,
        gradients: list[tuple],
        non_trainable: Sequence[tf.Tensor | None],
        learning_rates: Mapping[str, tf.Tensor],
        step: tf.Tensor,
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """Compute the update of the variables on one device, and change none.

        Returns:
          A new value of each variable that a step may update, or None; half the squared norm of
          the gradients.
        """
        own = [
            (g if g is None else tf.convert_to_tensor(g), v)
            for g, v in gradients
            if v.device == device
        ]
        new_values = {
            id(v): value for v, value in self.optimizer.compute_updates(own, learning_rates, step)
        }
        pairs = zip(self.non_trainable, non_trainable, strict=True)
        new_values |= {id(v): value for v, value in pairs if v.device == device}
        values = [new_values.get(id(variable)) for variable in self._updated]
        # of sparse gradients, TensorFlow would take the norm of rows that are to be added
        half_squares = [tf.nn.l2_loss(gradient) for gradient, _ in own if gradient is not None]
        return values, tf.reduce_sum(half_squares) if half_squares else 0.0

    def _assign(
        self,
        device: str,
        values: Sequence[tf.Tensor | None],
        updated: tf.Tensor,
        steps_done: tf.Tensor,
    ) -> None:
        """Assign the values that were computed for the variables on one device if `updated`, then
        their averages.
        """
        for variable, value in zip(self._updated, values, strict=True):
            if value is not None:
                variable.assign(tf.where(updated, value, variable))
        with tf.name_scope("weight_averages"):
            self.lookahead.update(steps_done, updated, device)
            self.ema.update(steps_done, updated, device)

    def evaluation_weights(self) -> dict[str, tuple[list, list]]:
        """Return (weights, non-trainable values) to evaluate, by name: `raw`, and then `ema` if an
        average is kept.
        """
        sets = {"raw": (self.weights, self.non_trainable)}
        if self.ema.averages:
            sets["ema"] = (
                self.ema.averages[: len(self.weights)],
                self.ema.averages[len(self.weights) :],
            )
        return sets

    def named_variables(self) -> dict[str, tf.Variable]:
        """Return every variable by its name in checkpoints, which does not depend on towers or
        devices.
        """
        model = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        paths = [v.path.replace("/", ".") for v in model]
        named = dict(
            zip((f"model.{path}" for path in paths), self.weights + self.non_trainable, strict=True)
        )
        for prefix, averages in (("ema", self.ema.averages), ("lookahead", self.lookahead.slow)):
            named |= {f"{prefix}.{path}": v for path, v in zip(paths, averages, strict=False)}
        named |= {f"optimizer.{name}": v for name, v in self.optimizer.slots().items()}
        named |= {
            f"loss_average.{term.replace('/', '.')}": v
            for term, v in self.loss_averages.sums.items()
        }
        if self.proxy:
            named |= {f"proxy.{name}": v for name, v in self.proxy.named_variables().items()}
        return named | {"loss_average.weight": self.loss_averages.weight, "step": self.step}

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the names and bytes of the model's variables."""
        digest = hashlib.sha256()
        for name, variable in sorted(self.named_variables().items()):
            if name.startswith("model."):
                digest.update(name.encode() + variable.numpy().tobytes())
        return digest.hexdigest()


def xla_compiled(function: Callable, jit_compile: bool) -> Callable:
    """Return a function of tensors that XLA compiles whole if `jit_compile`; otherwise the function
    itself.
    """
    return tf.function(function, autograph=False, jit_compile=True) if jit_compile else function


class ExponentialMovingAverage:
    """Moving average of the weights: a <- d a + (1 - d) w after every update, d = min(decay, (1 +
    step) / (10 + step)).

    The ramp keeps the average from remembering the initial weights. Moving statistics of batch norm
    are averaged too.
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float):
        self.decay, self.variables = decay, list(variables)
        self.averages = (
            [make_slot(v, "ema", tf.convert_to_tensor(v)) for v in self.variables] if decay else []
        )

    def update(self, step: tf.Tensor, updated: tf.Tensor, device: str) -> None:
        """Add the variables on a device to the averages if they were `updated`; `step` counts steps
        with this one.
        """
        if not self.averages:
            return
        with tf.device(step.device):
            done = tf.cast(step, tf.float32)
            weight = tf.where(updated, 1 - tf.minimum(self.decay, (1 + done) / (10 + done)), 0.0)
        for average, variable in zip(self.averages, self.variables, strict=True):
            if variable.device == device:
                if average.dtype.is_floating:
                    average.assign_sub(tf.cast(weight, average.dtype) * (average - variable))
                else:  # a counter or a seed
                    average.assign(variable)


class Lookahead:
    """Slow weights: every five steps slow <- d slow + (1 - d) w, w <- slow, with d = 0.95^5 (step /
    total)^3.

    A skipped step changes neither. After step `total` w <- slow, even if that step was skipped; a
    run that ends earlier does not do this. Source: M. Zhang et al., arXiv 1907.08610, in the form
    of the CIFAR-10 speed records.
    """

    PERIOD = 5

    def __init__(self, variables: Sequence[tf.Variable], total_steps: int, enabled: bool):
        self.variables, self.total_steps = list(variables), total_steps
        self.slow = (
            [make_slot(v, "lookahead", tf.convert_to_tensor(v)) for v in self.variables]
            if enabled
            else []
        )

    def update(self, step: tf.Tensor, updated: tf.Tensor, device: str) -> None:
        """Update slow weights and variables on a device if they are due; `step` counts steps with
        this one.
        """
        if not self.slow:
            return
        with tf.device(step.device):
            regular = tf.logical_and(tf.equal(step % self.PERIOD, 0), updated)
            due = tf.logical_or(regular, tf.equal(step, self.total_steps))
            decay = 0.95**5 * tf.cast(step / self.total_steps, tf.float32) ** 3
            decay = tf.where(
                regular, decay, 1.0
            )  # otherwise this is step `total`: only take the slow weights

        def synchronize():
            for slow, variable in zip(self.slow, self.variables, strict=True):
                if variable.device == device and slow.dtype.is_floating:
                    slow.assign_sub(tf.cast(1 - decay, slow.dtype) * (slow - variable))
                    variable.assign(slow)
            return tf.constant(True)

        tf.cond(due, synchronize, lambda: tf.constant(False))
