"""What is measured of growth: points in series, what was found of each, and lines through what was found."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """What a process measures."""

    model: str
    batch_size: int  # of all towers together
    towers: int

    def told(self) -> str:
        """`speednet94, batch of 1,536, 2 towers`."""
        return f"{self.model}, batch of {self.batch_size:,}, {self.towers} tower{'s' * (self.towers > 1)}"


class Series(NamedTuple):
    """Points that differ in one thing, the small ones first, and how large each is: a model by its place."""

    varied: str  # batch size, towers or model
    sizes: tuple[int, ...]
    points: tuple[Point, ...]


@dataclasses.dataclass
class Row:
    """What was measured of a point."""

    point: Point
    start_seconds: float  # from the start of the process until its towers are open and its data is loaded
    compile_seconds: float  # by which the first step, with all that is made for it, takes longer than the second
    step_seconds: list[float]
    memory_mb: float  # 0: not known

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(self.step_seconds)

    @property
    def images_per_sec(self) -> float:
        """Of the median step."""
        return self.point.batch_size / self.median


class Line(NamedTuple):
    """start + slope x size, through n points by least squares."""

    start: float
    slope: float
    off: float  # the most that a point is off the line, as a share of the point
    n: int

    def at(self, size):
        """The value there, or the values."""
        return self.start + self.slope * size

    def told(self, unit: str, scale: float = 1.0) -> str:
        """`100 ms + 2 ms x batch` for values in 1/scale of the unit, and how true that is where it may not be."""
        sign = "-" if self.slope < 0 else "+"
        line = f"{scale * self.start:,.0f} {unit} {sign} {scale * abs(self.slope):.3g} {unit} x batch"
        return f"{line} (at most {100 * self.off:.0f} % off)" if self.n > 2 else line


def fit(sizes: Sequence[float], values: Sequence[float]) -> Line | None:
    """The line with the least squares; None where fewer than two points are known (a value of 0 is not)."""
    known = np.array([(size, value) for size, value in zip(sizes, values, strict=True) if value], float)
    if len(known) < 2:
        return None
    at, seen = known.T
    slope, start = np.polyfit(at, seen, 1)
    return Line(float(start), float(slope), float(np.max(np.abs(start + slope * at - seen) / seen)), len(known))
