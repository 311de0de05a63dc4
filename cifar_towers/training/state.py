"""What training carries from step to step: the model's variables, the optimizer's slots and the
averages. A step changes them in `TrainState.apply` only.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from cifar_towers.data.batches import Batch
from cifar_towers.models.keras_models import checkpoint_key
from cifar_towers.towers.keras_parallel import is_seed_generator_state, to_scalar
from cifar_towers.towers.placement import HOST, pin_to_device
from cifar_towers.training.averages import ExponentialMovingAverage, Lookahead
from cifar_towers.training.optimizers import Optimizer

# Each example has 1,024 seeds of its own for a layer that draws random numbers. Keras takes seeds
# modulo 2^31 - 2, so that they overlap only after two million examples.
MAX_DRAWS = 1024


class TrainState:
    """The model's variables, the optimizer's slots and the averages. Build it inside the placement
    of its variables.

    Args:
      jit_compile: let XLA compile each tower's pass, and the update. All variables must then be on
        one device.
      step_device: the device of the step counter.

    Attributes:
      step: number of finished steps.
      weights: N trained variables.
      non_trainable: S other variables of the model, frozen filters among them.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Optimizer,
        total_steps: int,
        ema_decay: float = 0.0,
        lookahead: bool = False,
        jit_compile: bool = False,
        step_device: str = HOST,
    ):
        self.model = model
        self.optimizer = optimizer
        self.jit_compile = jit_compile
        with pin_to_device(step_device):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.weights = [v.value for v in model.trainable_variables]
        self.non_trainable = [v.value for v in model.non_trainable_variables]
        self.ema = ExponentialMovingAverage(self.weights + self.non_trainable, ema_decay)
        self.lookahead = Lookahead(self.weights + self.non_trainable, total_steps, lookahead)

    # What a tower needs

    def read_variables(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return (weights, non-trainable values) as tensors, read where the variables are."""
        weights = [tf.convert_to_tensor(variable) for variable in self.weights]
        non_trainable = [tf.convert_to_tensor(variable) for variable in self.non_trainable]
        return weights, non_trainable

    def weights_of_groups(
        self, weights: Sequence[tf.Tensor], groups: Collection[str]
    ) -> list[tf.Tensor]:
        """Return the weights that belong to some parameter groups."""
        active = {id(variable) for variable in self.optimizer.active_variables(groups)}
        pairs = zip(weights, self.weights, strict=True)
        return [weight for weight, variable in pairs if id(variable) in active]

    def call(
        self, weights: Sequence[tf.Tensor], non_trainable: Sequence[tf.Tensor], part: Batch
    ) -> tuple[tf.Tensor, list[tf.Tensor | None], list[tf.Tensor]]:
        """Call the model in training, as a pure function of its variables' values.

        Layers that draw random numbers are seeded by the run and the part's first example.

        Returns:
          Logits [b, C]; S new non-trainable values, None if the value is unchanged or a seed; and
          the losses that layers add, scalars.
        """
        variables = self.model.non_trainable_variables
        first_draw = part.draws.example_index[0] * MAX_DRAWS
        values = []
        for variable, value in zip(variables, non_trainable, strict=True):
            if is_seed_generator_state(variable):
                run_seed = value[0]
                value = tf.stack([run_seed, tf.cast(first_draw, value.dtype)])
            values.append(value)

        logits, new_values, losses = call_in_training(self.model, weights, values, part.images)

        changed: list[tf.Tensor | None] = []
        for variable, old, new in zip(variables, values, new_values, strict=True):
            is_unchanged = new is old or is_seed_generator_state(variable)
            changed.append(None if is_unchanged else new)
        return logits, changed, losses

    # The update

    def apply(
        self,
        gradients: Sequence[tuple],
        non_trainable: Sequence[tf.Tensor | None],
        rates: Mapping[str, tf.Tensor],
        finite: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Update the variables, then the averages, then the step counter.

        If a tower's loss or the norm of the mean gradient is not finite, the step is skipped: only
        the step counter changes. With lookahead, the last step of the schedule sets the weights to
        the slow weights even if it is skipped.

        Args:
          gradients: N x (mean gradient, variable).
          non_trainable: S new values of these variables; None leaves a variable unchanged.
          rates: learning rates by active parameter group.
          finite: [] bool, whether the losses of all towers are finite.

        Returns:
          [] bool, whether the variables were updated by the gradients; and the norm of the mean
          gradient.
        """

        def update() -> tuple[tf.Tensor, tf.Tensor]:
            step = tf.convert_to_tensor(self.step)
            norm = gradient_norm(gradients)
            updated = tf.logical_and(finite, tf.math.is_finite(norm))

            new_values = self.optimizer.compute_updates(gradients, rates, step)
            for variable, value in zip(self.non_trainable, non_trainable, strict=True):
                if value is not None:
                    new_values.append((variable, value))

            for variable, value in new_values:
                with tf.device(variable.device):
                    variable.assign(tf.where(updated, value, variable))

            steps_done = step + 1
            with tf.name_scope("weight_averages"):
                self.lookahead.update(steps_done, updated)
                self.ema.update(steps_done, updated)
            self.step.assign(steps_done)
            return updated, norm

        with tf.name_scope("apply"), tf.device(self.step.device):
            return xla_compiled(update, self.jit_compile)()

    # What evaluations and checkpoints need

    def evaluation_weights(self) -> dict[str, tuple[list, list]]:
        """Return (weights, non-trainable values) to evaluate, by name: `raw`, and then `ema` if an
        average is kept.
        """
        sets = {"raw": (self.weights, self.non_trainable)}
        averages = self.ema.averages
        if averages:
            num_weights = len(self.weights)
            sets["ema"] = averages[:num_weights], averages[num_weights:]
        return sets

    def named_variables(self) -> dict[str, tf.Variable]:
        """Return every variable by its name in checkpoints, which does not depend on towers or
        devices.
        """
        model = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        paths = [checkpoint_key(variable) for variable in model]
        named: dict[str, tf.Variable] = {"step": self.step}
        for owner, variables in (
            ("model", self.weights + self.non_trainable),
            ("ema", self.ema.averages),
            ("lookahead", self.lookahead.slow),
        ):
            # `ema` and `lookahead` may have no variables
            for path, variable in zip(paths, variables, strict=False):
                named[f"{owner}.{path}"] = variable
        for name, variable in self.optimizer.slots().items():
            named[f"optimizer.{name}"] = variable
        return named

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the names and bytes of the model's variables."""
        digest = hashlib.sha256()
        for name, variable in sorted(self.named_variables().items()):
            if name.startswith("model."):
                digest.update(name.encode() + variable.numpy().tobytes())
        return digest.hexdigest()


def call_in_training(
    model: keras.Model,
    weights: Sequence[tf.Tensor],
    non_trainable: Sequence[tf.Tensor],
    images: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """Call a model in training with values for its variables; write no variable.

    Returns:
      Logits; the non-trainable values after the call, an unchanged one as the same tensor; and
      every loss that a layer adds, in each of its calls, as a scalar.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    values = zip(variables, [*weights, *non_trainable], strict=True)
    losses: list[tf.Tensor] = []
    with keras.StatelessScope(values, collect_losses=True) as scope:
        # a layer that is called again removes the losses of its last call from `scope.losses`, so
        # they are kept here
        scope.add_loss = losses.append
        logits = model.call(images, training=True)
        losses += model.losses  # now those of regularizers of weights alone
    new_values = [scope.get_current_value(v) for v in model.non_trainable_variables]
    return logits, new_values, [to_scalar(loss) for loss in losses]


def gradient_norm(gradients: Sequence[tuple]) -> tf.Tensor:
    """Return the L2 norm of N gradients, from N x (gradient, variable)."""
    half_squares = []
    for gradient, variable in gradients:
        if gradient is not None:
            with tf.device(variable.device):
                # dense, as a sparse gradient may have several rows of the same index
                half_squares.append(tf.nn.l2_loss(tf.convert_to_tensor(gradient)))
    return tf.sqrt(2.0 * tf.reduce_sum(half_squares)) if half_squares else tf.constant(0.0)


def xla_compiled(function: Callable, jit_compile: bool) -> Callable[..., Any]:
    """Return a function of tensors that XLA compiles whole if `jit_compile`; otherwise the function
    itself.
    """
    return tf.function(function, autograph=False, jit_compile=True) if jit_compile else function
