"""A run's health: the steps that made no update as a number was not finite, and when enough is enough."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.errors import DivergedError
from cifar_towers.multi_worker.coordination import Coordinator
from cifar_towers.towers import Tower, split_batch
from cifar_towers.training import hard_examples, nonfinite
from cifar_towers.training.results import PROXY, StepMetrics
from cifar_towers.training.state import TrainState

MOST_ROLLBACKS = 8  # then the rates are 1/256 of the recipe's, and it is not the rates


class DivergenceState:
    """Counts the steps whose numbers were not finite, and ends a run when they are too many in a row.

    Attributes:
      bad_steps: how many made no update, those that look for float16's loss scale not counted.
      in_a_row: how many of them the run ends in so far. rollbacks: how often it went back to a checkpoint.
    """

    def __init__(self, most_in_a_row: int):
        self.most_in_a_row = most_in_a_row
        self.bad_steps = self.in_a_row = self.rollbacks = 0

    @property
    def rate_factor(self) -> float:
        """What the recipe's rates are multiplied by: halved at every rollback."""
        return 0.5**self.rollbacks

    def facts(self) -> dict[str, int]:
        """What a checkpoint keeps of it."""
        return {"bad_steps": self.bad_steps, "bad_in_a_row": self.in_a_row, "rollbacks": self.rollbacks}

    def resume(self, facts: dict, rolled_back: dict) -> None:
        """Goes on from what a checkpoint kept, and from rollbacks that it may be older than."""
        self.bad_steps, self.in_a_row = facts.get("bad_steps", 0), facts.get("bad_in_a_row", 0)
        self.rollbacks = max(facts.get("rollbacks", 0), rolled_back.get("rollbacks", 0))

    def good(self) -> None:
        """A step moved the weights."""
        self.in_a_row = 0

    def bad(self, step: int, told: str) -> str:
        """A step made no update, because of what `told` says; a line for the user.

        Raises:
          DivergedError: it was the last that is put up with.
        """
        self.bad_steps += 1
        self.in_a_row += 1
        line = f"step {step} made no update ({self.in_a_row} in a row, {self.most_in_a_row} end the run): {told}"
        if self.in_a_row >= self.most_in_a_row:
            raise DivergedError(line)
        return line

    def roll_back(self, error: DivergedError) -> None:
        """Goes back, with half the rates.

        Raises:
          DivergedError: that has been tried often enough.
        """
        if self.rollbacks == MOST_ROLLBACKS:
            raise DivergedError(
                f"{error}; {self.rollbacks} rollbacks have not helped: start again with --overwrite and a smaller "
                "--learning_rate or --precision=float32"
            ) from error
        self.in_a_row, self.rollbacks = 0, self.rollbacks + 1


class HealthMonitor:
    """Judges each step of a run: one that made no update is counted in `health`, and told with where it came from,
    unless it is float16's loss scale that is being found.

    Args:
      state, towers: what the step moves, and its towers. here: those of this process, among all of a `team`.
    """

    def __init__(
        self,
        health: DivergenceState,
        state: TrainState,
        towers: Sequence[Tower],
        here: Sequence[Tower],
        augmentation: Augmentation,
        micro_batches: int,
        team: Coordinator,
        say: Callable[[str], None],
    ):
        self._health, self._state, self._towers, self._here = health, state, towers, here
        self._augmentation, self._micro_batches, self._team, self._say = augmentation, micro_batches, team, say

    def __call__(self, step: int, metrics: StepMetrics, batch: Batch, rates: Mapping[str, float], side: int) -> None:
        """After `step` steps, of which these are the last's metrics, batch, rates by parameter group, and side.

        Raises:
          DivergedError: there were too many of these in a row.
        """
        state, who = self._state, ""
        if metrics.finite and metrics.hard_examples and not metrics.hard_examples.proxy.finite:
            state, who, metrics = self._state.proxy, f"{PROXY}: ", metrics.hard_examples.proxy
        elif metrics.finite:
            return self._health.good()
        elif metrics.hard_examples:
            batch = hard_examples.take(batch, metrics.hard_examples.rows)
        overflowed = np.isfinite(metrics.tower_losses).all() and (metrics.nonfinite_towers >= 0).any()
        if overflowed and state.loss_scale.can_shrink():
            return self._health.good() if who else None  # of a proxy that overflowed the net itself has moved
        weights = [v.name.removesuffix(":0") for v in state.weights]
        what = who + nonfinite.describe(
            metrics, self._towers, list(metrics.losses), weights, state.update_names[frozenset(rates)]
        )
        self._say(self._health.bad(step, what + self._where_from(state, metrics, batch, side)))

    def _where_from(self, state: TrainState, metrics: StepMetrics, batch: Batch, side: int) -> str:
        """The first tensor of the bad tower's forward pass that is not finite; the step has changed nothing, so it
        can be taken again."""
        bad = [tower for tower, index in zip(self._towers, metrics.nonfinite_towers, strict=True) if index >= 0]
        if not bad:
            return ""
        here, found = [tower for tower in self._towers if tower in self._here], ""
        if bad[0] in here:
            shard = split_batch(batch, here)[here.index(bad[0])]
            found = nonfinite.locate_nonfinite(
                state.model, self._augmentation, bad[0], shard, side, self._micro_batches
            )
        return next(filter(None, self._team.gather(found)), "")
