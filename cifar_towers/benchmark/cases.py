"""Benchmark cases: one recipe's step in different ways, and their rates, timed in rounds."""

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from cifar_towers.errors import RunError
from cifar_towers.reporting.run_records import format_rate
from cifar_towers.towers.placement import PLACEMENTS

NO_EXCHANGE, KERAS = "no exchange", "keras fit"
UNPLACED = "-"  # the placement if every device has a copy of the variables
MIN_ROUNDS_FOR_QUARTILES = 5


class BenchmarkCase(NamedTuple):
    """One way to compute the step."""

    strategy: str  # towers, mirrored, `no exchange` (independent towers, an upper bound) or `keras fit`
    placement: str  # of the towers' variables, or `-`
    towers: int
    precision: str
    input: str = "constant"  # one batch again and again, or the recipe's input pipeline (`stream`)

    @property
    def trains(self) -> bool:
        """Whether a run can train this way, on a constant batch: one of these cases is recommended."""
        return self.strategy in ("towers", "mirrored") and self.input == "constant"

    def label(self) -> str:
        """Return the case without towers and precision, for a table or a plot: `towers, cpu, stream`."""
        parts = [self.strategy, self.placement if self.placement != UNPLACED else "", self.input]
        return ", ".join(part for part in parts if part not in ("", "constant"))

    def __str__(self) -> str:
        return f"{self.towers} x {self.label()}, {self.precision}"


def make_cases(
    counts: Sequence[int], precisions: Sequence[str], with_keras: bool, on_gpus: bool = False
) -> list[BenchmarkCase]:
    """Return all cases worth measuring, without duplicates such as several placements for one tower on the CPU.

    The first precision is measured in every way. The others are measured on the fewest and the most towers with
    variables on the CPU, and mirrored. The recipe's own input and Keras `fit` are measured on the most towers.
    """
    fewest, most = counts[0], counts[-1]
    first, *others = precisions
    cases = []
    for count in counts:
        placements = tuple(PLACEMENTS) if count > 1 else ("cpu", "round_robin") if on_gpus else ("cpu",)
        cases += [BenchmarkCase("towers", placement, count, first) for placement in placements]
        if count > 1:
            cases += [BenchmarkCase(strategy, UNPLACED, count, first) for strategy in ("mirrored", NO_EXCHANGE)]
    cases.append(BenchmarkCase("towers", "cpu", most, first, "stream"))
    for precision in others:
        cases += [BenchmarkCase("towers", "cpu", count, precision) for count in sorted({fewest, most})]
        cases += [BenchmarkCase("mirrored", UNPLACED, most, precision)] if most > 1 else []
    if with_keras:
        cases += [BenchmarkCase(KERAS, UNPLACED, most, precision) for precision in precisions]
    return cases


@dataclasses.dataclass(kw_only=True)
class Rates:
    """Images per second of one way to compute the step, a number per round."""

    steps: int = 0  # timed in each round
    images_per_sec: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.images_per_sec)

    @property
    def spread_name(self) -> str:
        """The kind of `spread`: `quartiles`, or `min-max` of few rounds."""
        return "quartiles" if len(self.images_per_sec) >= MIN_ROUNDS_FOR_QUARTILES else "min-max"

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and upper quartile, or minimum and maximum."""
        rates = self.images_per_sec
        cuts = rates if self.spread_name == "min-max" else statistics.quantiles(rates, n=4, method="inclusive")
        return min(cuts), max(cuts)

    def cells(self) -> dict[str, str]:
        """Return the table cells of these rates by heading; n is rounds x timed steps per round."""
        spread = "-".join(map(format_rate, self.spread))
        n = f"{len(self.images_per_sec)} x {self.steps}"
        return {"images/s": format_rate(self.median), self.spread_name: spread, "n": n}

    def as_json(self, *omitted: str) -> dict:
        """Return all fields except `omitted`, with the median and the spread."""
        fields = {name: value for name, value in vars(self).items() if name not in omitted}
        return fields | {"median": self.median, self.spread_name: self.spread}


@dataclasses.dataclass(kw_only=True)
class CaseResult(Rates):
    """Measurements of one case."""

    case: BenchmarkCase
    compile_seconds: float = 0.0
    step_seconds: float = 0.0  # of the second step; plans the number of timed steps
    waits: list[float] = dataclasses.field(default_factory=list)  # fraction of each round spent waiting for input
    shares: dict[str, float] = dataclasses.field(default_factory=dict)  # of the step's work, by part
    efficiency: float = 0.0  # images/s over those of one tower times the physical devices

    @property
    def waiting(self) -> float:
        """The fraction of the time in which the step waited for its input."""
        return statistics.median(self.waits)


Timed = TypeVar("Timed", bound=Rates)


def run_rounds(
    results: list[Timed], rounds: int, measure: Callable[[Timed], float], leave_out: Callable[[Timed, RunError], None]
) -> None:
    """Append `measure(result)`, in images/s, to every result in each round, and remove a result that raises a RunError.

    Each round takes another random order, so that all results share the noise of the machine.
    """
    for number in range(rounds):
        print(f"round {number + 1}/{rounds}", flush=True)
        for result in random.Random(number).sample(results, len(results)):
            try:
                result.images_per_sec.append(measure(result))
            except RunError as error:  # for example out of memory; the others are still measured
                leave_out(result, error)
                results.remove(result)
