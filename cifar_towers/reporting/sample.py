"""Statistics of values that were measured several times: mean, deviation, number, and the difference of two samples."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# 97.5 % quantiles of Student's t distribution with 1, 2, ... 30 degrees of freedom
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Sample(NamedTuple):
    """Mean, standard deviation and number of values."""

    mean: float
    std: float  # of the sample (n - 1); 0 for a single value
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Compute the statistics of a non-empty list."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))

    def describe_percent(self) -> str:
        """Return mean, standard deviation and n of fractions as percent.

        >>> Sample(0.9411, 0.0015, 5).describe_percent(), Sample(0.9411, 0.0, 1).describe_percent()
        ('94.11 ± 0.15 % (n=5)', '94.11 % (n=1)')
        """
        spread = f" ± {100 * self.std:.2f}" if self.n > 1 else ""
        return f"{100 * self.mean:.2f}{spread} % (n={self.n})"


def describe_difference(one: Sample, other: Sample) -> str:
    """Return the mean of `one` less that of `other`, of fractions, in percentage points with its 95 % interval.

    The interval is Student's, with the pooled variance of two samples of two or more values each.

    >>> describe_difference(Sample(0.944, 0.0005, 2), Sample(0.9, 0.0095, 2))
    '+4.40 points (95 % +1.51 to +7.29), n=2 and 2'
    """
    degrees = one.n + other.n - 2
    variance = ((one.n - 1) * one.std**2 + (other.n - 1) * other.std**2) / degrees
    half = STUDENT_T[min(degrees, len(STUDENT_T)) - 1] * math.sqrt(variance * (1 / one.n + 1 / other.n))
    mean = one.mean - other.mean
    interval = f"95 % {100 * (mean - half):+.2f} to {100 * (mean + half):+.2f}"
    return f"{100 * mean:+.2f} points ({interval}), n={one.n} and {other.n}"
