"""Health of a run: steps that are skipped because a number is not finite, and when they end the run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cifar_towers.errors import DivergedError
from cifar_towers.towers import Tower
from cifar_towers.training.results import PROXY, StepMetrics
from cifar_towers.training.state import TrainState
from cifar_towers.training.step_runner import FinishedStep, was_skipped

MAX_SKIPPED_STEPS = 3  # in a row; then the run ends


@dataclasses.dataclass
class Health:
    """Counts skipped steps and names what was not finite; ends a run after too many skipped steps in a row."""

    state: TrainState
    towers: Sequence[Tower]
    log: Callable[[str], None]  # called with a line for each skipped step
    skipped_steps: int = 0
    skipped_in_a_row: int = 0  # since the last step that was not skipped

    def metadata(self) -> dict[str, int]:
        """Return the counts that checkpoints store."""
        return {"skipped_steps": self.skipped_steps, "skipped_in_a_row": self.skipped_in_a_row}

    def restore(self, metadata: dict[str, Any]) -> None:
        """Continue from a checkpoint's metadata."""
        self.skipped_steps, self.skipped_in_a_row = metadata["skipped_steps"], metadata["skipped_in_a_row"]

    def check(self, finished: FinishedStep) -> None:
        """Record a finished step; log the reason if the step was skipped.

        Raises:
          DivergedError: too many steps in a row were skipped.
        """
        metrics = finished.metrics
        if not was_skipped(metrics):
            self.skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        reason = self._describe(metrics)
        line = f"step {finished.step} was skipped ({self.skipped_in_a_row} in a row, {MAX_SKIPPED_STEPS} end the run)"
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise DivergedError(f"{line}: {reason}")
        self.log(f"{line}: {reason}")

    def _describe(self, metrics: StepMetrics) -> str:
        """Name the first non-finite number of a skipped step, which the proxy may have had alone."""
        state = self.state
        if metrics.updated and metrics.hard_examples and state.proxy:
            proxy = metrics.hard_examples.proxy
            names = state.proxy.weight_names, state.proxy.update_names
            return f"{PROXY}: {describe_nonfinite(proxy, self.towers, *names)}"
        return describe_nonfinite(metrics, self.towers, state.weight_names, state.update_names)


def describe_nonfinite(
    metrics: StepMetrics, towers: Sequence[Tower], weight_names: Sequence[str], update_names: Sequence[str]
) -> str:
    """Name the first non-finite number that a step recorded, e.g. `total_loss of tower_1 is not finite`."""
    names = [*metrics.losses, *(f"the gradient of {name}" for name in reversed(weight_names))]
    for tower, index in zip(towers, np.atleast_1d(metrics.nonfinite_towers), strict=True):
        if index >= 0:
            return f"{names[index]} of {tower.name} is not finite"
    return f"the new value of {update_names[metrics.nonfinite_update]} is not finite"
