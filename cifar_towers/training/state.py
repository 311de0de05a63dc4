"""Everything a run carries from step to step."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.batches import RandomDraws
from cifar_towers.towers.keras_parallel import is_seed_generator_state
from cifar_towers.towers.placement import HOST, pin_to_device
from cifar_towers.training.diagnostics import update_diagnostics
from cifar_towers.training.ema import ExponentialMovingAverage, Lookahead, SmoothedLosses
from cifar_towers.training.nonfinite import first_nonfinite_index
from cifar_towers.training.optimizers import Optimizer, Updates, variable_name
from cifar_towers.training.precision import LossScale
from cifar_towers.training.results import UpdateDiagnostics

MAX_DRAWS = 1024  # of one layer in a step


class ModelValues(NamedTuple):
    """The values of a model's variables."""

    weights: list[tf.Tensor]  # N, trained
    non_trainable: list[tf.Tensor]


class UpdateResult(NamedTuple):
    """What `TrainState.apply` did."""

    finite: tf.Tensor  # bool: the variables were updated
    nonfinite_index: tf.Tensor  # in `TrainState.update_names`, of the first new value that is not finite, or -1
    gradient_norm: tf.Tensor  # of the mean gradient, all variables together
    smoothed_losses: dict[str, tf.Tensor]
    loss_scale: tf.Tensor  # of this step
    diagnostics: UpdateDiagnostics | None


class TrainState:
    """The model's variables, the optimizer's slots and the averages. Build it inside the placement of its variables.

    Attributes:
      step: steps done.
      weights: N trained variables. non_trainable: the model's other variables, frozen filters among them.
      weight_names: of `weights`. update_names: of all variables that a step may update.
      is_seed: for each of `non_trainable`, whether a layer draws random numbers from it.
      proxy: the state of a smaller net that is trained, saved and restored beside this one, or None.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Optimizer,
        loss_terms: Sequence[str],
        total_steps: int,
        ema_decay: float = 0.0,
        lookahead: bool = False,
        precision: str = "float32",
    ):
        self.model, self.optimizer = model, optimizer
        self.proxy: TrainState | None = None
        with pin_to_device(HOST):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.weights = [v.value for v in model.trainable_variables]
        self.non_trainable = [v.value for v in model.non_trainable_variables]
        self._updated = optimizer.updated_variables() + self.non_trainable
        self.weight_names = [variable_name(variable) for variable in self.weights]
        self.update_names = [variable_name(variable) for variable in self._updated]
        self.is_seed = [is_seed_generator_state(v) for v in model.non_trainable_variables]
        self._constraints = {id(v.value): v.constraint for v in model.trainable_variables if v.constraint}
        self.ema = ExponentialMovingAverage(self.weights + self.non_trainable, ema_decay)
        self.lookahead = Lookahead(self.weights + self.non_trainable, total_steps, lookahead)
        self.loss_averages = SmoothedLosses(loss_terms)
        self.loss_scale = LossScale(precision)

    def read_variables(self) -> ModelValues:
        """The model's values as tensors, read where the variables are placed."""
        return ModelValues(*([tf.convert_to_tensor(v) for v in kind] for kind in (self.weights, self.non_trainable)))

    def with_layer_seeds(self, non_trainable: list[tf.Tensor], draws: RandomDraws) -> list[tf.Tensor]:
        """The non-trainable values for a part of the batch, with seeds that follow from the run's own and the part's
        first example: no two parts draw the same numbers, and the same step always does."""
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
        collect_diagnostics: tf.Tensor | None = None,
    ) -> UpdateResult:
        """One step: updates the variables, then the averages, then the loss scale and the step counter.

        A step is skipped unless the towers' results and all new values are finite. It then changes no weight, slot,
        non-trainable variable or average. Only the step counter advances, the loss scale of float16 adapts, and with
        lookahead the last step of a run still takes the slow weights.

        Args:
          gradients: N x (mean gradient of the scaled loss, variable).
          non_trainable: a new value for each of the model's, or None to leave it.
          losses: the final tower's, by term. learning_rates: by active parameter group.
          finite: whether all results of the towers are.
          collect_diagnostics: whether this is a summary step; without it the graph has no diagnostics.
        """
        loss_scale = self.loss_scale.value()
        gradients = self.loss_scale.unscale(gradients)
        with tf.name_scope("apply"):
            updates = self._compute_updates(gradients, non_trainable, learning_rates)
            nonfinite_index = self._first_nonfinite(updates)
            with tf.device(self.step.device):
                updated = tf.logical_and(finite, nonfinite_index < 0)
            diagnostics = None
            if collect_diagnostics is not None:
                diagnostics = update_diagnostics(collect_diagnostics, gradients, updates)
            for variable, value in updates:
                with tf.device(variable.device):
                    variable.assign(tf.where(updated, value, variable))
        with tf.name_scope("weight_averages"):
            with tf.device(self.step.device):
                steps_done = self.step + 1
            self.lookahead.update(steps_done, updated)
            self.ema.update(steps_done, updated)
        self.loss_scale.adapt(finite)
        self.step.assign_add(1)
        return UpdateResult(
            finite=updated,
            nonfinite_index=nonfinite_index,
            gradient_norm=tf.linalg.global_norm([gradient for gradient, _ in gradients]),
            smoothed_losses=self.loss_averages.update(losses, updated),
            loss_scale=loss_scale,
            diagnostics=diagnostics,
        )

    def _compute_updates(
        self, gradients: list[tuple], non_trainable: Sequence[tf.Tensor | None], learning_rates: Mapping
    ) -> Updates:
        """New values of weights, within the constraints of a user's model, slots and non-trainable variables."""
        updates = []
        for variable, value in self.optimizer.compute_updates(gradients, learning_rates, self.step):
            if constraint := self._constraints.get(id(variable)):
                with tf.device(variable.device):
                    value = tf.convert_to_tensor(constraint(value))
            updates.append((variable, value))
        pairs = zip(self.non_trainable, non_trainable, strict=True)
        return updates + [(variable, value) for variable, value in pairs if value is not None]

    def _first_nonfinite(self, updates: Updates) -> tf.Tensor:
        """Index in `update_names` of the first new value that is not finite, or -1."""
        new_values = {id(variable): value for variable, value in updates}
        return first_nonfinite_index([new_values.get(id(v)) for v in self._updated], [v.device for v in self._updated])

    def evaluation_weights(self) -> dict[str, tuple[list, list]]:
        """`raw`, and `ema` where one is kept -> values of (weights, non-trainable) to evaluate with."""
        sets = {"raw": (self.weights, self.non_trainable)}
        if self.ema.averages:
            sets["ema"] = self.ema.averages[: len(self.weights)], self.ema.averages[len(self.weights) :]
        return sets

    def named_variables(self) -> dict[str, tf.Variable]:
        """Every variable by its name in checkpoints, which does not depend on towers or devices."""
        model = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        paths = [v.path.replace("/", ".") for v in model]
        named = dict(zip((f"model.{path}" for path in paths), self.weights + self.non_trainable, strict=True))
        for prefix, averages in (("ema", self.ema.averages), ("lookahead", self.lookahead.slow)):
            named |= {f"{prefix}.{path}": v for path, v in zip(paths, averages, strict=False)}
        named |= {f"optimizer.{name}": v for name, v in self.optimizer.slots().items()}
        named |= {f"loss_average.{term.replace('/', '.')}": v for term, v in self.loss_averages.sums.items()}
        named |= {f"loss_scale.{name}": v for name, v in self.loss_scale.variables.items()}
        if self.proxy:
            named |= {f"proxy.{name}": v for name, v in self.proxy.named_variables().items()}
        return named | {"loss_average.weight": self.loss_averages.weight, "step": self.step}

    def first_nonfinite_variable(self) -> str:
        """The name of a variable with a non-finite value; empty if there is none."""
        floats = ((name, v) for name, v in self.named_variables().items() if v.dtype.is_floating)
        return next((name for name, v in floats if not np.isfinite(v.numpy()).all()), "")

    def weights_sha256(self) -> str:
        """SHA-256 of the names and bytes of the model's variables."""
        digest = hashlib.sha256()
        for name, variable in sorted(self.named_variables().items()):
            if name.startswith("model."):
                digest.update(name.encode() + variable.numpy().tobytes())
        return digest.hexdigest()
