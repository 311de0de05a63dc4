"""Statistics of values that were measured several times: mean, spread, interval, difference of two samples."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Degrees of freedom -> 97.5 % quantile of Student's t distribution, for two-sided 95 % intervals.
STUDENT_T = {
    1: 12.7062, 1.5: 6.0167, 2: 4.3027, 2.5: 3.5747, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060,
    9: 2.2622, 10: 2.2281, 12: 2.1788, 15: 2.1314, 20: 2.0860, 30: 2.0423, 60: 2.0003, math.inf: 1.9600,
}  # fmt: skip


class Sample(NamedTuple):
    """Mean, standard deviation and number of values."""

    mean: float
    std: float  # of the sample (n - 1); 0 for a single value
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Compute the statistics of a non-empty list."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))

    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of a mean of two or more fractions, which stays inside [0, 1].

        Student's t interval is computed on the logit scale and transformed back. Sources: the logit interval in
        L. D. Brown, T. T. Cai and A. DasGupta, Statistical Science 16(2), 2001; with Student's t and the standard error
        of the mean in N. Dean and M. Pagano, Journal of Survey Statistics and Methodology 3(4), 2015.
        """
        if not (self.std and 0 < self.mean < 1):
            return self.mean, self.mean
        logit = math.log(self.mean / (1 - self.mean))
        standard_error = self.std / math.sqrt(self.n) / (self.mean * (1 - self.mean))
        half = student_t(self.n - 1) * standard_error
        low, high = (0.5 * (1 + math.tanh(x / 2)) for x in (logit - half, logit + half))  # 1 / (1 + exp(-x))
        return low, high

    def describe_percent(self) -> str:
        """Return mean, standard deviation, n and interval of fractions as percent.

        >>> Sample(0.9411, 0.0015, 5).describe_percent()
        'mean 94.11 ± 0.15 % (n=5, 95 % interval 93.92 to 94.29 %)'
        """
        if not self.std:  # equal values do not tell how much others would differ
            return f"mean {100 * self.mean:.2f} % (n={self.n}{', all equal' * (self.n > 1)})"
        low, high = (100 * end for end in self.interval())
        spread = f"mean {100 * self.mean:.2f} ± {100 * self.std:.2f} %"
        return f"{spread} (n={self.n}, 95 % interval {low:.2f} to {high:.2f} %)"


def difference(one: Sample, other: Sample) -> tuple[float, float, float]:
    """Return the mean of `one` less that of `other`, and the ends of the 95 % confidence interval of this difference.

    Each has two values or more. The two may differ in number and in spread (B. L. Welch, Biometrika 34, 1947).
    """
    variances = one.std**2 / one.n, other.std**2 / other.n
    total, mean = sum(variances), one.mean - other.mean
    if not total:
        return mean, mean, mean
    degrees = total**2 / (variances[0] ** 2 / (one.n - 1) + variances[1] ** 2 / (other.n - 1))
    half = student_t(degrees) * math.sqrt(total)
    return mean, mean - half, mean + half


def describe_difference(one: Sample, other: Sample) -> str:
    """Return the difference of two means of fractions in percentage points, with its interval.

    >>> describe_difference(Sample(0.9411, 0.0015, 5), Sample(0.9398, 0.0012, 5))
    '+0.13 points (95 % interval -0.07 to +0.33)'
    """
    mean, low, high = (100 * value for value in difference(one, other))
    if low == high:  # equal values do not tell how much others would differ
        return f"{mean:+.2f} points (no interval: all values of each are equal)"
    return f"{mean:+.2f} points (95 % interval {low:+.2f} to {high:+.2f})"


def student_t(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution, for two-sided 95 % intervals.

    Between the entries of the table, the quantile is interpolated in 1 / degrees. It is then too large by at most 9 %.

    >>> student_t(4), round(student_t(11), 3)
    (2.7764, 2.201)
    """
    inverse = [1 / each for each in STUDENT_T]
    return float(np.interp(1 / degrees, inverse[::-1], list(STUDENT_T.values())[::-1]))
