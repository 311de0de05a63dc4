"""Schedules over a run, given as points: `0=0.2,23%=1,100%=0.07`.

The place of a point is an epoch, or with a percent sign a fraction of the run. This module does not
import TensorFlow.
"""

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

from cifar_towers.errors import UsageError


class RunLength(NamedTuple):
    """The length of a run."""

    steps_per_epoch: int
    total: int  # steps over which schedules extend
    last: int  # the last step of the run; below `total` if `max_steps` ends the run early


class SchedulePoints(NamedTuple):
    """The points of a schedule: values at places of a run."""

    setting: str  # its name
    places: tuple[float, ...]
    relative: tuple[bool, ...]  # True: the place is a fraction of the run; False: an epoch
    values: tuple[float, ...]

    def steps(self, length: RunLength) -> list[float]:
        units = [length.total if relative else length.steps_per_epoch for relative in self.relative]
        steps = [to_steps(place, unit) for place, unit in zip(self.places, units, strict=True)]
        if steps != sorted(steps):
            raise UsageError(
                f"{self.setting} must be in ascending order; in this run of {length.total} steps "
                f"its steps are {steps}"
            )
        return steps


def to_steps(place: float, unit: int) -> float:
    """Convert a place to steps, rounded so that floating-point errors do not move it past the step
    it falls on.

    >>> 0.55 * 100 > 55, to_steps(0.55, 100)
    (True, 55.0)
    """
    return round(place * unit, 6)


def piecewise_linear(step: float, steps: list[float], values: tuple[float, ...]) -> float:
    """Interpolate linearly between the points; outside of them the value is constant.

    >>> piecewise_linear(5, [0, 10], (1.0, 0.0))
    0.5
    """
    after = bisect.bisect_right(steps, step)
    if after == 0:
        return values[0]
    if after == len(steps):
        return values[-1]
    start = steps[after - 1]
    end = steps[after]
    return values[after - 1] + (values[after] - values[after - 1]) * (step - start) / (end - start)


def piecewise_constant(
    step: float, steps: list[float], values: tuple[float, ...], before: float = 1.0
) -> float:
    """Return the value of the last point passed, or `before` in front of the first one.

    >>> piecewise_constant(91, [91, 136], (0.1, 0.01))
    0.1
    """
    passed = bisect.bisect_right(steps, step)
    return values[passed - 1] if passed else before


# Functions (step, steps of the points, their values) -> factor. A step may be fractional, or before
# the first point.
RATE_SHAPES = {"linear": piecewise_linear, "step": piecewise_constant}


def parse_rate_schedule(text: str) -> tuple[str, SchedulePoints]:
    """Return the shape and the points of a learning rate schedule: `"linear:0=1,100%=0"` ->
    ("linear", points).
    """
    shape, _, points = text.partition(":")
    if shape not in RATE_SHAPES:
        shapes = " or ".join(f"{name}:" for name in RATE_SHAPES)
        raise UsageError(
            f"learning_rate_schedule={text} must begin with {shapes}, e.g. linear:0=1,100%=0"
        )
    return shape, parse_points("learning_rate_schedule", points, "0=1,100%=0")


class ImageSizeSchedule:
    """The height and width of training images in pixels over a run."""

    def __init__(self, text: str, full: int):
        """Parse a text as `"0=24,45%=32"`. Before its first place, or if it is empty, images have
        the `full` size.
        """
        self.points = parse_points("image_size_schedule", text or f"0={full}", "0=24,45%=32")
        self._full = full

    def at(self, length: RunLength) -> Callable[[int], int]:
        """Return the function step -> size for a run of this length."""
        places = self.points.steps(length)
        return lambda step: int(
            piecewise_constant(step, places, self.points.values, before=self._full)
        )


def parse_points(setting: str, text: str, example: str) -> SchedulePoints:
    """Return the points in a text: `"0=24,45%=32"` -> points at epoch 0 and at 0.45 of the run."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        relative = tuple(place.endswith("%") for place, _ in pairs)
        places = tuple(
            float(place.rstrip("%")) / (100 if "%" in place else 1) for place, _ in pairs
        )
        values = tuple(float(value) for _, value in pairs)
        if not all(0 <= number < math.inf for number in places + values):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{setting}: {text!r} must be pairs of when=value, none negative, e.g. {example}"
        ) from None
    return SchedulePoints(setting, places, relative, values)
