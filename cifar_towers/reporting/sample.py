"""Mean, standard deviation and confidence interval of values that were measured several times."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """Statistics of n values."""

    mean: float
    std: float | None  # of the sample (n - 1); None of a single value
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Those of a list that is not empty."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean by Student's t; None of a single value."""
        if self.std is None:
            return None
        half = student_t(self.n - 1) * self.std / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def describe_percent(self) -> str:
        """`mean 94.11 ± 0.15 % (n=5, 95 % interval 93.92 to 94.30 %)`: plus-minus the standard deviation, and the
        interval of the mean."""
        if self.std is None:
            return f"mean {100 * self.mean:.2f} % (n=1)"
        low, high = self.interval()
        spread = f"mean {100 * self.mean:.2f} ± {100 * self.std:.2f} %"
        return f"{spread} (n={self.n}, 95 % interval {100 * low:.2f} to {100 * high:.2f} %)"


def student_t(degrees: int, confidence: float = 0.95) -> float:
    """The t that so many degrees of freedom stay within, to both sides, with this probability.

    >>> round(student_t(4), 3)
    2.776
    """
    import tensorflow as tf  # late: the report does without it

    low, high = 0.0, 1e6
    for _ in range(100):
        t = (low + high) / 2
        half, x = tf.constant([degrees / 2, 0.5], tf.float64), degrees / (degrees + t * t)
        inside = 1 - float(tf.math.betainc(half[0], half[1], tf.constant(x, tf.float64)))
        low, high = (t, high) if inside < confidence else (low, t)
    return t
