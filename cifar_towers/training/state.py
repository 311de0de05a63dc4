"""What training carries from step to step: the model's variables, the optimizer's slots and the
averages. A step changes them in `TrainState.apply` only.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.batches import Batch
from cifar_towers.models.keras_models import checkpoint_key
from cifar_towers.towers.keras_parallel import is_seed_generator_state, to_scalar
from cifar_towers.towers.placement import HOST, pin_to_device
from cifar_towers.training.averages import ExponentialMovingAverage, Lookahead
from cifar_towers.training.optimizers import Optimizer
from cifar_towers.xla import xla_compiled

# A layer that draws random numbers for a micro-batch counts from 1,024 times the index of its first
# example. Keras takes these counters modulo 2^31 - 2.
MAX_DRAWS = 1024


class TrainState:
    """The model's variables, the optimizer's slots and the averages. Build it inside the scope
    that the model was built in, which places its variables.

    Args:
      jit_compile: let XLA compile each tower's pass, and the update. All variables must then be on
        one device, in each replica.
      step_device: the device of the step counter.

    Attributes:
      model, optimizer: the Keras model, and what updates its weights.
      step: number of finished steps.
      weights: N trained variables of the model, as `tf.Variable`s.
      non_trainable: its S other variables, frozen filters among them.
      ema, lookahead: averages of all these variables.
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
        seeded = []
        for variable, value in zip(variables, non_trainable, strict=True):
            is_seed = is_seed_generator_state(variable)
            seeded.append(_seed_of_part(value, part) if is_seed else value)

        logits, after, losses = call_in_training(self.model, weights, seeded, part.images)

        new_values: list[tf.Tensor | None] = []
        for variable, old, new in zip(variables, seeded, after, strict=True):
            if new is old or is_seed_generator_state(variable):
                new_values.append(None)
            else:
                new_values.append(new)
        return logits, new_values, losses

    # The update

    def apply(
        self,
        gradients: Sequence[tuple],
        non_trainable: Sequence[tf.Tensor | None],
        rates: Mapping[str, tf.Tensor],
        tower_losses: Sequence[tf.Tensor] | tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Update the variables, then the averages, then the step counter.

        If a tower's loss or the norm of the mean gradient is not finite, the step is skipped: only
        the step counter changes. With lookahead, the last step of the schedule sets the weights to
        the slow weights even if it is skipped.

        Args:
          gradients: N x (mean gradient, variable).
          non_trainable: S new values of these variables; None leaves a variable unchanged.
          rates: learning rates by parameter group.
          tower_losses: [K] total losses of all towers.

        Returns:
          [] bool, whether the variables were updated by the gradients; and the norm of the mean
          gradient.
        """

        def assign_all() -> tuple[tf.Tensor, tf.Tensor]:
            step = tf.convert_to_tensor(self.step)
            norm = gradient_norm(gradients)
            losses_are_finite = tf.reduce_all(tf.math.is_finite(tower_losses))
            updated = tf.logical_and(losses_are_finite, tf.math.is_finite(norm))

            new_values = self.optimizer.compute_updates(gradients, rates, step)
            for variable, value in zip(self.non_trainable, non_trainable, strict=True):
                if value is not None:
                    new_values.append((variable, value))

            for variable, value in new_values:
                with tf.device(variable.device):
                    # a skipped step writes the old value back
                    variable.assign(tf.where(updated, value, variable))

            steps_done = step + 1
            # lookahead first: the moving average is of the weights that it leaves
            with tf.name_scope("weight_averages"):
                self.lookahead.update(steps_done, updated)
                self.ema.update(steps_done, updated)
            self.step.assign(steps_done)
            return updated, norm

        assign_all = xla_compiled(assign_all, self.jit_compile)
        with tf.name_scope("apply"), tf.device(self.step.device):
            return assign_all()

    # What evaluations and checkpoints need

    def evaluated_weights(self) -> tuple[str, list, list]:
        """Return (name, weights, non-trainable values) for evaluations: `ema` and the averages if
        the run keeps some, otherwise `raw` and the variables.
        """
        averages = self.ema.averages
        if not averages:
            return "raw", self.weights, self.non_trainable
        num_weights = len(self.weights)
        return "ema", averages[:num_weights], averages[num_weights:]

    def named_variables(self) -> dict[str, tf.Variable]:
        """Return every variable by its name in checkpoints, which does not depend on towers or
        devices.
        """
        named: dict[str, tf.Variable] = {"step": self.step}

        variables = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        keys = [checkpoint_key(variable) for variable in variables]
        owners = {
            "model": self.weights + self.non_trainable,
            "ema": self.ema.averages,
            "lookahead": self.lookahead.slow,
        }
        for owner, values in owners.items():
            if values:  # empty where none are kept
                for key, value in zip(keys, values, strict=True):
                    named[f"{owner}.{key}"] = value

        for name, variable in self.optimizer.slots().items():
            named[f"optimizer.{name}"] = variable
        return named

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the names and bytes of the model's variables."""
        variables = self.named_variables().items()
        return weights_sha256(
            {name: variable.numpy() for name, variable in variables if name.startswith("model.")}
        )


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of the names and bytes of weights."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


def _seed_of_part(state: tf.Tensor, part: Batch) -> tf.Tensor:
    """Return the state of a seed generator for a part of a batch, [run's seed, counter]."""
    run_seed = state[0]
    counter = part.draws.example_index[0] * MAX_DRAWS
    return tf.stack([run_seed, tf.cast(counter, state.dtype)])


class _AllLosses(keras.StatelessScope):
    """A scope that keeps every loss that layers add.

    Keras keeps losses with the layers. A layer that is called again clears them there, and the
    towers' threads share the layers.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(values, collect_losses=True)
        self.all_losses: list[tf.Tensor] = []

    def add_loss(self, loss: tf.Tensor) -> None:
        self.all_losses.append(loss)


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
    values = [*weights, *non_trainable]
    with _AllLosses(zip(variables, values, strict=True)) as scope:
        logits = model.call(images, training=True)
        # Keras's own list is empty, so `model.losses` are those of regularizers of weights alone
        losses = scope.all_losses + model.losses
    after = [scope.get_current_value(v) for v in model.non_trainable_variables]
    return logits, after, [to_scalar(loss) for loss in losses]


def gradient_norm(gradients: Sequence[tuple]) -> tf.Tensor:
    """Return the L2 norm of N gradients, from N x (gradient, variable)."""
    half_squares = []
    for gradient, variable in gradients:
        if gradient is not None:
            with tf.device(variable.device):
                # dense, as a sparse gradient may have several rows of the same index
                half_squares.append(tf.nn.l2_loss(tf.convert_to_tensor(gradient)))
    if not half_squares:
        return tf.constant(0.0)
    return tf.sqrt(2.0 * tf.reduce_sum(half_squares))
