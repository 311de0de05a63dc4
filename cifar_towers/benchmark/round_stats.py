"""Statistics over rounds of measurements."""

import dataclasses
import statistics

from cifar_towers.benchmark.cases import BenchmarkCase

MIN_ROUNDS_FOR_QUARTILES = 5


class RoundStats:
    """Adds median and spread to a class with `images_per_sec`, one number per round, of `steps` steps each."""

    images_per_sec: list[float]
    steps: int

    @property
    def median(self) -> float:
        """Images per second."""
        return statistics.median(self.images_per_sec)

    @property
    def spread_of(self) -> str:
        """What `spread` is: `quartiles`, or `min-max` of few rounds."""
        return "quartiles" if len(self.images_per_sec) >= MIN_ROUNDS_FOR_QUARTILES else "min-max"

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile, or minimum and maximum."""
        if self.spread_of == "min-max":
            return min(self.images_per_sec), max(self.images_per_sec)
        low, _, high = statistics.quantiles(self.images_per_sec, n=4, method="inclusive")
        return low, high

    @property
    def n(self) -> str:
        """Rounds and timed steps of each: `3 x 8`."""
        return f"{len(self.images_per_sec)} x {self.steps}"


@dataclasses.dataclass
class CaseResult(RoundStats):
    """Measurements of one benchmark case."""

    case: BenchmarkCase
    compile_seconds: float = 0.0
    step_seconds: float = 0.0  # of the second step; plans the number of timed steps
    steps: int = 0  # timed in each round
    images_per_sec: list[float] = dataclasses.field(default_factory=list)
    waits: list[float] = dataclasses.field(default_factory=list)  # fraction of each round spent waiting for input
    shares: dict[str, float] = dataclasses.field(default_factory=dict)  # of the step's work, by part
    efficiency: float = 0.0  # images/s over those of one tower times the physical devices

    @property
    def waiting(self) -> float:
        """Fraction of the time in which the step waited for its input."""
        return statistics.median(self.waits)
