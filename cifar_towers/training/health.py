"""A run's health: steps that were skipped because a number was not finite, and when they end the run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from cifar_towers.data.batches import Batch
from cifar_towers.errors import DivergedError
from cifar_towers.towers import split_batch
from cifar_towers.training.devices import shard_sizes
from cifar_towers.training.hard_examples import gather_rows
from cifar_towers.training.nonfinite import describe_nonfinite, locate_nonfinite
from cifar_towers.training.results import PROXY, StepMetrics
from cifar_towers.training.run_setup import RunSetup
from cifar_towers.training.state import TrainState

MAX_ROLLBACKS = 8  # then the learning rates are 1/256 of the recipe's, and smaller ones will not help


class DivergenceState:
    """Counts skipped steps, and ends a run after too many in a row.

    Attributes:
      skipped_steps: all of them, without those in which the loss scale of float16 was still being sought.
      in_a_row: the last of them, without a good step since. rollbacks: how often the run went back to a checkpoint.
    """

    def __init__(self, max_in_a_row: int):
        self.max_in_a_row = max_in_a_row
        self.skipped_steps = self.in_a_row = self.rollbacks = 0

    @property
    def rate_factor(self) -> float:
        """The factor of the recipe's learning rates: halved at every rollback."""
        return 0.5**self.rollbacks

    def metadata(self) -> dict[str, int]:
        """What checkpoints store."""
        return {"skipped_steps": self.skipped_steps, "bad_in_a_row": self.in_a_row, "rollbacks": self.rollbacks}

    def summary(self) -> dict[str, int]:
        """What a run's result says."""
        return {"skipped_steps": self.skipped_steps, "rollbacks": self.rollbacks}

    def restore(self, metadata: dict) -> None:
        """Continues from a checkpoint's metadata."""
        self.skipped_steps, self.in_a_row = metadata.get("skipped_steps", 0), metadata.get("bad_in_a_row", 0)
        self.rollbacks = metadata.get("rollbacks", 0)

    def record_good_step(self) -> None:
        """Call it after a step that updated the weights."""
        self.in_a_row = 0

    def record_bad_step(self, step: int, reason: str) -> str:
        """Call it after a skipped step; a line for the log.

        Raises:
          DivergedError: there were `max_in_a_row`.
        """
        self.skipped_steps += 1
        self.in_a_row += 1
        line = f"step {step} made no update ({self.in_a_row} in a row, {self.max_in_a_row} end the run): {reason}"
        if self.in_a_row >= self.max_in_a_row:
            raise DivergedError(line)
        return line

    def without_rollback(self, error: DivergedError, latest: str) -> DivergedError:
        """The error of a run that does not go back by itself; `latest` is its newest checkpoint, in words."""
        return DivergedError(
            f"{error}; {latest}: give --rollback_on_divergence to go back to the last good checkpoint at half the "
            "rates, or --overwrite with a smaller --learning_rate or --precision=float32"
        )

    def roll_back(self, error: DivergedError) -> None:
        """Halves the learning rates after `error`.

        Raises:
          DivergedError: there were `MAX_ROLLBACKS`.
        """
        if self.rollbacks == MAX_ROLLBACKS:
            raise DivergedError(
                f"{error}; {self.rollbacks} rollbacks have not helped: start again with --overwrite and a smaller "
                "--learning_rate or --precision=float32"
            ) from error
        self.in_a_row, self.rollbacks = 0, self.rollbacks + 1


@dataclasses.dataclass
class HealthMonitor:
    """Records each step in a `DivergenceState`, and logs where the numbers of a skipped step were first not finite.

    Args:
      gather: returns the argument of every process, by process; all processes call it together.
    """

    health: DivergenceState
    setup: RunSetup
    gather: Callable[[Any], list]
    log: Callable[[str], None]

    def __call__(self, step: int, metrics: StepMetrics, batch: Batch, image_size: int) -> None:
        """Call it when `step` steps are done, with the metrics, the batch and the image size of the last.

        Raises:
          DivergedError: too many steps in a row were skipped.
        """
        state, prefix = self.setup.state, ""
        if metrics.finite and metrics.hard_examples and not metrics.hard_examples.proxy.finite:
            state, prefix, metrics = state.proxy, f"{PROXY}: ", metrics.hard_examples.proxy
        elif metrics.finite:
            return self.health.record_good_step()
        elif metrics.hard_examples:
            batch = gather_rows(batch, metrics.hard_examples.rows)
        overflowed = np.isfinite(metrics.tower_losses).all() and (metrics.nonfinite_towers >= 0).any()
        if overflowed and state.loss_scale.can_shrink(float(metrics.loss_scale)):
            return self.health.record_good_step() if prefix else None  # the net itself made its update
        reason = prefix + describe_nonfinite(metrics, self.setup.towers, state.weight_names, state.update_names)
        self.log(self.health.record_bad_step(step, reason + self._locate(state, metrics, batch, image_size)))

    def _locate(self, state: TrainState, metrics: StepMetrics, batch: Batch, image_size: int) -> str:
        """The first non-finite tensor of the first non-finite tower, by repeating its forward pass: a skipped step
        leaves the variables as they were."""
        setup = self.setup
        nonfinite = [tower for tower, i in zip(setup.towers, metrics.nonfinite_towers, strict=True) if i >= 0]
        if not nonfinite:
            return ""
        tower, message = nonfinite[0], ""
        local_towers = [tower for tower in setup.towers if tower in setup.local_towers]
        if tower in local_towers:
            sizes = shard_sizes(setup.config, len(local_towers), len(batch.labels))
            shard = split_batch(batch, local_towers, sizes=sizes)[local_towers.index(tower)]
            shard, parts = setup.batches.load_images(shard, tower.device), setup.config.micro_batches
            message = locate_nonfinite(state.model, setup.augmentation, tower, shard, image_size, parts)
        return next(filter(None, self.gather(message)), "")
