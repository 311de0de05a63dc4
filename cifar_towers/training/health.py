"""Health of a run: steps that are skipped because a number is not finite, the reason, and when they end the run."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.errors import DivergedError
from cifar_towers.towers import Tower, run_micro_batches
from cifar_towers.towers.keras_parallel import first_call, variable_values
from cifar_towers.training.results import PROXY, StepMetrics
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import gather_rows
from cifar_towers.training.step_runner import FinishedStep, was_skipped

MAX_ROLLBACKS = 8  # then the learning rates are 1/256 of the recipe's, and smaller ones will not help


@dataclasses.dataclass
class Health:
    """Counts skipped steps and names what was not finite; ends a run after too many skipped steps in a row."""

    max_in_a_row: int  # number of consecutive skipped steps that ends the run
    state: TrainState
    towers: Sequence[Tower]
    locate: Callable[[TrainState, Tower, Batch, int], str]  # -> first non-finite tensor of a tower's forward pass
    log: Callable[[str], None]  # called with a line for each skipped step
    skipped_steps: int = 0  # without those that float16 skipped because its loss scale was too large
    in_a_row: int = 0  # number of skipped steps since the last good one
    rollbacks: int = 0  # number of times that the run went back to a checkpoint
    last_good_step: int = 0  # the last step before the current row of skipped steps

    @property
    def rate_factor(self) -> float:
        """The factor of the recipe's learning rates: halved at every rollback."""
        return 0.5**self.rollbacks

    def metadata(self) -> dict[str, int]:
        """Return the counts that checkpoints store."""
        return self.summary() | {"skipped_in_a_row": self.in_a_row}

    def summary(self) -> dict[str, int]:
        """Return the counts that a run's result has."""
        return {"skipped_steps": self.skipped_steps, "rollbacks": self.rollbacks}

    def restore(self, metadata: dict[str, Any]) -> None:
        """Continue from a checkpoint's metadata."""
        self.skipped_steps, self.in_a_row = metadata["skipped_steps"], metadata["skipped_in_a_row"]
        self.rollbacks, self.last_good_step = metadata["rollbacks"], metadata["step"] - self.in_a_row

    def check(self, finished: FinishedStep, later: Sequence[FinishedStep] = ()) -> None:
        """Record a finished step; log the reason if the step was skipped.

        Args:
          later: steps that have been applied after this one. If one of them changed the variables, the forward pass of
            a skipped step is not repeated to find its non-finite tensor.

        Raises:
          DivergedError: too many steps in a row were skipped. RunError: a verified step is not applied.
        """
        if finished.error:
            raise finished.error
        metrics, batch, selected = finished.metrics, finished.batch, finished.metrics.hard_examples
        if not was_skipped(metrics):
            self._record(finished.step, skipped=False)
            return
        of_proxy = bool(metrics.updated)
        state = self.state.proxy if of_proxy else self.state
        assert state
        if selected and of_proxy:
            metrics = selected.proxy
        elif selected:
            batch = gather_rows(batch, selected.rows)
        overflowed = np.isfinite(metrics.tower_losses).all() and (metrics.nonfinite_towers >= 0).any()
        if overflowed and state.loss_scale.can_shrink(float(metrics.loss_scale)):
            if of_proxy:
                self._record(finished.step, skipped=False)
            self.last_good_step = finished.step - self.in_a_row
            return
        reason = describe_nonfinite(metrics, self.towers, state.weight_names, state.update_names)
        if not any(_updated(step.metrics, of_proxy) for step in later):
            nonfinite = [tower for tower, i in zip(self.towers, metrics.nonfinite_towers, strict=True) if i >= 0]
            reason += self.locate(state, nonfinite[0], batch, finished.image_size) if nonfinite else ""
        self._record(finished.step, skipped=True)
        line = f"step {finished.step} was skipped ({self.in_a_row} in a row, {self.max_in_a_row} end the run): "
        line += f"{PROXY}: {reason}" if of_proxy else reason
        if self.in_a_row >= self.max_in_a_row:
            raise DivergedError(line)
        self.log(line)

    def _record(self, step: int, skipped: bool) -> None:
        self.skipped_steps += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.last_good_step = step - self.in_a_row

    def roll_back(self, error: DivergedError, advice: str) -> None:
        """Halve the learning rates after `error`.

        Args:
          advice: what to start again with, for the error.

        Raises:
          DivergedError: there were `MAX_ROLLBACKS`.
        """
        if self.rollbacks == MAX_ROLLBACKS:
            raise DivergedError(
                f"{error}; {self.rollbacks} rollbacks have not helped: start again with --overwrite and {advice}"
            ) from error
        self.in_a_row, self.rollbacks = 0, self.rollbacks + 1


def _updated(metrics: StepMetrics, of_proxy: bool) -> bool:
    """Return whether a step changed the variables, of the proxy or of the net itself."""
    return bool(metrics.hard_examples.proxy.updated if of_proxy and metrics.hard_examples else metrics.updated)


def describe_nonfinite(
    metrics: StepMetrics, towers: Sequence[Tower], weight_names: Sequence[str], update_names: Sequence[str]
) -> str:
    """Name the first non-finite number that a step recorded, as `total_loss of tower_1 is not finite`."""
    names = [*metrics.losses, *(f"the gradient of {name}" for name in reversed(weight_names))]
    for tower, index in zip(towers, np.atleast_1d(metrics.nonfinite_towers), strict=True):
        if index >= 0:
            return f"{names[index]} of {tower.name} is not finite"
    return f"the new value of {update_names[metrics.nonfinite_update]} is not finite"


def locate_nonfinite(
    model: keras.Model, augmentation: Augmentation, tower: Tower, shard: Batch, image_size: int, micro_batches: int
) -> str:
    """Return a text for the end of a line, with the first non-finite tensor of a tower's forward pass over its shard.

    The text is empty if there is no such tensor, or if the forward pass fails, as where memory is short.
    """

    def locate(part):
        return first_nonfinite_layer(model, augmentation.augment(part.images, part.draws, image_size))

    tensors: list[str] = []
    with contextlib.suppress(tf.errors.OpError, ValueError), tf.device(tower.device):
        tensors = list(filter(None, run_micro_batches(locate, shard, micro_batches, sequential=False)))
    return f"; first of its tensors: {tensors[0]}" if tensors else ""


def first_nonfinite_layer(model: keras.Model, images: tf.Tensor) -> str:
    """Name the first non-finite variable, input or layer output of a forward pass; empty if all is finite.

    Args:
      images: [B, height, width, 3], over which batch norm normalizes.
    """
    for variable in model.variables:
        if variable.dtype.startswith(("float", "bfloat")) and not _is_finite(variable.value):
            return f"variable {variable.path}"
    if not _is_finite(images):
        return "the images"
    layers = [layer for layer in model.layers if not isinstance(layer, (keras.layers.InputLayer, keras.Model))]
    by_layer = keras.Model(model.input, [first_call(model, layer).output_tensors for layer in layers])
    outputs, _ = by_layer.stateless_call(*variable_values(by_layer), images, training=True)
    for layer, tensors in zip(layers, outputs, strict=False):
        if not all(map(_is_finite, tensors)):
            return f"the output of {layer.name}"
    return ""


def _is_finite(tensor: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(tensor))))
