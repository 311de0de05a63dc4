"""All that a run carries from step to step, as one named thing."""

import hashlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.batches import RandomDraws
from cifar_towers.towers.keras_parallel import is_seed
from cifar_towers.towers.placement import HOST, pin_to_device
from cifar_towers.training.diagnostics import update_diagnostics
from cifar_towers.training.ema import ExponentialMovingAverage, Lookahead, SmoothedLosses
from cifar_towers.training.nonfinite import first_nonfinite_index
from cifar_towers.training.optimizers import Optimizer
from cifar_towers.training.precision import LossScale

MOST_DRAWS = 1024  # of one layer in a step


class TrainState:
    """The model's variables and what follows them. Build it inside the placement its variables should obey.

    Attributes:
      step: updates done.
      weights: N trained variables. statistics: the model's other variables, frozen filters among them.
      seeds: for each of the statistics, whether it is what a layer draws random numbers from.
      proxy: the state of a smaller net that moves beside this one, and is saved and restored with it; as a rule None.
      moved_names: what `apply` assigns, in its order, by the groups that have a rate, once it has been traced.
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
        self.update_names: dict[frozenset[str], list[str]] = {}
        with pin_to_device(HOST):
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.weights = [v.value for v in model.trainable_variables]
        self.statistics = [v.value for v in model.non_trainable_variables]
        self.seeds = [is_seed(v) for v in model.non_trainable_variables]
        constrained = (v for v in model.trainable_variables if v.constraint)
        self._constraints = {id(v.value): v.constraint for v in constrained}
        self.ema = ExponentialMovingAverage(self.weights + self.statistics, ema_decay)
        self.lookahead = Lookahead(self.weights + self.statistics, total_steps, lookahead)
        self.loss_averages = SmoothedLosses(loss_terms)
        self.loss_scale = LossScale(precision)

    def read(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """(weights, statistics) as tensors, read where they live; they travel to where they are used."""
        return [tf.convert_to_tensor(v) for v in self.weights], [tf.convert_to_tensor(v) for v in self.statistics]

    def with_layer_seeds(self, statistics: list[tf.Tensor], draws: RandomDraws) -> list[tf.Tensor]:
        """The statistics for a part of the batch, with seeds that follow from the run's own and the part's first
        example: no two parts draw the same numbers, and the same step always does."""
        count = draws.example_index[0] * MOST_DRAWS
        return [
            tf.stack([value[0], tf.cast(count, value.dtype)]) if seed else value
            for value, seed in zip(statistics, self.seeds, strict=True)
        ]

    def apply(
        self,
        gradients: list[tuple],
        statistics: list,
        rates: dict[str, tf.Tensor],
        finite: tf.Tensor,
        look: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """One step: the weights move, their averages follow, the step counts on.

        Nothing moves unless the towers' numbers were `finite` and all that variables are to become is so too; then only
        the step counts, and the averages follow what has not moved.

        Args:
          gradients: N x (mean gradient, variable).
          statistics: a new value for each of the model's, or None to leave it.
          finite: whether all that the towers hand over is.
          look: whether to look at the update closely; None where nobody ever does.

        Returns:
          (whether the variables moved, index in its `update_names` of the first that would not have been finite, or -1,
          what `update_diagnostics` says of each trained variable or None)
        """
        with tf.name_scope("apply"):
            moves = [self._constrained(*move) for move in self.optimizer.moves(gradients, rates, self.step)]
            moves += [pair for pair in zip(self.statistics, statistics, strict=True) if pair[1] is not None]
            self.update_names[frozenset(rates)] = [variable.name.removesuffix(":0") for variable, _ in moves]
            bad = first_nonfinite_index([value for _, value in moves], [variable.device for variable, _ in moves])
            with tf.device(self.step.device):
                moves_finite = tf.logical_and(finite, bad < 0)
            seen = None if look is None else update_diagnostics(look, gradients, moves)
            for variable, value in moves:
                with tf.device(variable.device):
                    variable.assign(tf.where(moves_finite, value, variable))
        with tf.name_scope("weight_averages"):
            with tf.device(self.step.device):
                done = self.step + 1
            self.lookahead.update(done, moves_finite)
            self.ema.update(done)
        self.loss_scale.adapt(finite)
        self.step.assign_add(1)
        return moves_finite, bad, seen

    def _constrained(self, variable: tf.Variable, value: tf.Tensor) -> tuple[tf.Variable, tf.Tensor]:
        """A move of the optimizer, within the constraint that a layer of a user's own has put on the variable."""
        constraint = self._constraints.get(id(variable))
        if not constraint:
            return variable, value
        with tf.device(variable.device):
            return variable, tf.convert_to_tensor(constraint(value))

    def evaluation_weights(self) -> dict[str, tuple[list, list]]:
        """`raw`, and `ema` where one is kept -> (weights, statistics) to evaluate with."""
        sets = {"raw": (self.weights, self.statistics)}
        if self.ema.averages:
            sets["ema"] = self.ema.averages[: len(self.weights)], self.ema.averages[len(self.weights) :]
        return sets

    def named_variables(self) -> dict[str, tf.Variable]:
        """Every variable of the run by a name that does not depend on towers or devices."""
        model = [*self.model.trainable_variables, *self.model.non_trainable_variables]
        paths = [v.path.replace("/", ".") for v in model]
        named = dict(zip((f"model.{path}" for path in paths), self.weights + self.statistics, strict=True))
        for prefix, averages in (("ema", self.ema.averages), ("lookahead", self.lookahead.slow)):
            named |= {f"{prefix}.{path}": v for path, v in zip(paths, averages, strict=False)}
        named |= {f"optimizer.{name}": v for name, v in self.optimizer.slots().items()}
        named |= {f"loss_average.{term.replace('/', '.')}": v for term, v in self.loss_averages.sums.items()}
        named |= {f"loss_scale.{name}": v for name, v in self.loss_scale.variables.items()}
        if self.proxy:
            named |= {f"proxy.{name}": v for name, v in self.proxy.named_variables().items()}
        return named | {"loss_average.weight": self.loss_averages.weight, "step": self.step}

    def first_nonfinite_variable(self) -> str:
        """The name of a variable with a value that is no finite number; empty if there is none."""
        floats = ((name, v) for name, v in self.named_variables().items() if v.dtype.is_floating)
        return next((name for name, v in floats if not np.isfinite(v.numpy()).all()), "")

    def digest(self) -> str:
        """SHA-256 of the names and bytes of the model's variables: two runs that agree on it have the same net."""
        digest = hashlib.sha256()
        for name, variable in sorted(self.named_variables().items()):
            if name.startswith("model."):
                digest.update(name.encode() + variable.numpy().tobytes())
        return digest.hexdigest()
