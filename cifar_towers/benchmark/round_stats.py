"""What is known of something that was visited round after round."""

import dataclasses
import statistics

from cifar_towers.benchmark.cases import BenchmarkCase

QUARTERED = 5  # rounds from which on there are quartiles worth the name


class RoundStats:
    """Adds median and spread to what has `images_per_sec`, one number a round, and makes `steps` a round."""

    images_per_sec: list[float]
    steps: int

    @property
    def median(self) -> float:
        """Images a second."""
        return statistics.median(self.images_per_sec)

    @property
    def spread_of(self) -> str:
        """What the spread is: `quartiles`, or of few rounds `min-max`. All that were visited together have as many."""
        return "quartiles" if len(self.images_per_sec) >= QUARTERED else "min-max"

    @property
    def spread(self) -> tuple[float, float]:
        """A quarter of the rounds were slower than the first, a quarter faster than the second; with min-max none."""
        if self.spread_of == "min-max":
            return min(self.images_per_sec), max(self.images_per_sec)
        low, _, high = statistics.quantiles(self.images_per_sec, n=4, method="inclusive")
        return low, high

    @property
    def n(self) -> str:
        """Rounds and timed steps of each: `3 x 8`."""
        return f"{len(self.images_per_sec)} x {self.steps}"


@dataclasses.dataclass
class Row(RoundStats):
    """What was measured of one variation. `images_per_sec` holds one number a round."""

    variation: BenchmarkCase
    compile_seconds: float = 0.0
    step_seconds: float = 0.0  # of one step after the first, to plan by
    steps: int = 0  # that a visit times
    images_per_sec: list[float] = dataclasses.field(default_factory=list)
    waits: list[float] = dataclasses.field(default_factory=list)  # a round: share of the time waiting for input
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    efficiency: float = 0.0  # images/s over those of one tower and the devices there are

    @property
    def waiting(self) -> float:
        """Share of the time in which the step waited for its input."""
        return statistics.median(self.waits)
