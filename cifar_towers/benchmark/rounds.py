"""What is known of something that was visited round after round."""

import dataclasses
import statistics

from cifar_towers.benchmark.variations import Variation


class OverRounds:
    """Adds median and quartiles to what has `images_per_sec`, one number a round."""

    images_per_sec: list[float]

    @property
    def median(self) -> float:
        """Images a second."""
        return statistics.median(self.images_per_sec)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the rounds were slower than the first, a quarter faster than the second."""
        if len(self.images_per_sec) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.images_per_sec, n=4, method="inclusive")
        return low, high


@dataclasses.dataclass
class Row(OverRounds):
    """What was measured of one variation. `images_per_sec` holds one number a round."""

    variation: Variation
    compile_seconds: float = 0.0
    step_seconds: float = 0.0  # of one step after the first, to plan by
    images_per_sec: list[float] = dataclasses.field(default_factory=list)
    waits: list[float] = dataclasses.field(default_factory=list)  # a round: share of the time waiting for input
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    efficiency: float = 0.0  # images/s over those of one tower and the devices there are

    @property
    def waiting(self) -> float:
        """Share of the time in which the step waited for its input."""
        return statistics.median(self.waits)
