"""Timing in rounds. Each visits all that is compared, in another random order, so that machine noise is shared."""

import dataclasses
import random
import statistics
from collections.abc import Callable
from typing import TypeVar

from cifar_towers.errors import RunError

MIN_ROUNDS_FOR_QUARTILES = 5


@dataclasses.dataclass(kw_only=True)
class Rates:
    """Images per second of one way to compute the step, a number per round."""

    steps: int = 0  # timed in each round
    images_per_sec: list[float] = dataclasses.field(default_factory=list)

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

    def cells(self) -> list[str]:
        """Of a table, below `headings`."""
        low, high = self.spread
        return [f"{self.median:,.0f}", f"{low:,.0f}-{high:,.0f}", f"{len(self.images_per_sec)} x {self.steps}"]

    def headings(self) -> list[str]:
        """The last: rounds and timed steps of each."""
        return ["images/s", self.spread_of, "n"]

    def as_json(self, *omitted: str) -> dict:
        """All fields but `omitted`, median and spread."""
        fields = {name: value for name, value in vars(self).items() if name not in omitted}
        return fields | {"median": self.median, self.spread_of: self.spread}


Measured = TypeVar("Measured", bound=Rates)


def run_rounds(
    results: list[Measured],
    rounds: int,
    measure: Callable[[Measured], float],
    leave_out: Callable[[Measured, RunError], None],
) -> None:
    """Appends `measure(result)`, images/s, to each result in each round; removes one that raises a RunError."""
    for number in range(rounds):
        print(f"round {number + 1}/{rounds}", flush=True)
        for result in random.Random(number).sample(results, len(results)):
            try:
                result.images_per_sec.append(measure(result))
            except RunError as error:  # for example out of memory; the others are still measured
                leave_out(result, error)
                results.remove(result)
