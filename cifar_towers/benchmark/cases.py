"""Benchmark cases: one recipe's step with different placements, strategies, precisions, tower counts and inputs."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from cifar_towers.benchmark.rounds import Rates
from cifar_towers.towers.placement import PLACEMENTS

NO_EXCHANGE, KERAS = "no exchange", "keras fit"
UNPLACED = "-"  # the placement where every device has a copy of the variables


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
        """For a table or a plot: `towers, cpu, stream`."""
        parts = [self.strategy, self.placement if self.placement != UNPLACED else "", self.input]
        return ", ".join(part for part in parts if part not in ("", "constant"))

    def __str__(self) -> str:
        return f"{self.towers} x {self.label()}, {self.precision}"


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
        """Fraction of the time in which the step waited for its input."""
        return statistics.median(self.waits)


def make_cases(
    counts: Sequence[int], precisions: Sequence[str], with_peers: bool, on_gpus: bool = False
) -> list[BenchmarkCase]:
    """All cases worth measuring, without duplicates such as several placements for one tower on the CPU.

    The first precision is measured in every way, the others on the fewest and the most towers with variables on the
    CPU and mirrored. The recipe's own input and Keras `fit` are measured on the most towers.
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
    if with_peers:
        cases += [BenchmarkCase(KERAS, UNPLACED, most, precision) for precision in precisions]
    return cases
