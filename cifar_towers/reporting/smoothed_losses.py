"""Moving averages of the losses that a run shows."""

from collections.abc import Mapping
from typing import Any

DECAY = 0.9


class SmoothedLosses:
    """Moving averages of loss terms: a <- 0.9 a + 0.1 loss after every step, from 0, with the bias
    of the start corrected.
    """

    def __init__(self) -> None:
        self.weight = 0.0  # sum of the weights of all steps so far
        self.sums: dict[str, float] = {}

    def update(self, losses: Mapping[str, float]) -> None:
        """Add the losses of a step, by term."""
        self.weight = DECAY * self.weight + (1 - DECAY)
        for term, loss in losses.items():
            self.sums[term] = DECAY * self.sums.get(term, 0.0) + (1 - DECAY) * float(loss)

    def averages(self) -> dict[str, float]:
        """Return the averages by term; empty before the first step."""
        return {term: total / self.weight for term, total in self.sums.items()}

    def metadata(self) -> dict[str, Any]:
        """Return what checkpoints store."""
        return {"smoothed_losses": {"weight": self.weight, "sums": self.sums}}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's metadata."""
        stored = metadata["smoothed_losses"]
        self.weight = stored["weight"]
        self.sums = dict(stored["sums"])
