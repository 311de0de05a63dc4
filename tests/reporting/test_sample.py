import doctest

import numpy as np

from cifar_towers.reporting import sample
from cifar_towers.reporting.sample import STUDENT_T, Sample, describe_difference


def test_examples_of_docstrings():
    assert doctest.testmod(sample).failed == 0


def test_difference_has_students_interval():
    one, other = Sample.of([0.94, 0.95, 0.96]), Sample.of([0.91, 0.93, 0.95])
    assert np.allclose(one, (0.95, 0.01, 3)) and np.allclose(other, (0.93, 0.02, 3))
    half = 100 * STUDENT_T[3] * np.sqrt((0.01**2 + 0.02**2) / 3)  # groups of one size: pooled as by each
    assert describe_difference(one, other) == f"+2.00 points (95 % {2 - half:+.2f} to {2 + half:+.2f}), n=3 and 3"
    assert describe_difference(other, one).startswith("-2.00 points")
