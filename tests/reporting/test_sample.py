import numpy as np
import pytest

from cifar_towers.reporting.sample import Sample, describe_difference, difference, student_t


def test_student_t_of_a_table():
    """The value of 2.941 degrees of freedom is computed with the incomplete beta function."""
    assert [student_t(degrees) for degrees in (1, 4)] == [12.7062, 2.7764]
    assert student_t(11) == pytest.approx(2.2010, abs=1e-3) and student_t(1000) == pytest.approx(1.9623, abs=1e-3)
    assert student_t(2.941) == pytest.approx(3.2188, abs=5e-3)


def test_interval_of_the_mean():
    """For accuracies whose spread is small the interval is that of Student's t, to a hundredth of a point."""
    values = [0.9400, 0.9416, 0.9414, 0.9432, 0.9394]
    half = 2.7764 * np.std(values, ddof=1) / 5**0.5
    assert Sample.of(values).interval() == pytest.approx((0.94112 - half, 0.94112 + half), abs=1e-4)
    assert Sample.of([0.5]).describe_percent() == "mean 50.00 % (n=1)"


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.80, 0.887], [0.99, 1.0], [0.999, 1.0, 1.0], [1e-6, 0.01]])
def test_interval_stays_inside_0_to_100_percent(values):
    low, high = Sample.of(values).interval()
    assert 0 <= low < np.mean(values) < high <= 1


def test_interval_of_equal_values_is_their_value():
    assert Sample.of([1.0, 1.0]).interval() == (1, 1) and Sample.of([0.5, 0.5, 0.5]).interval() == (0.5, 0.5)


def test_equal_values_are_described_without_an_interval():
    """Two seeds with one accuracy do not tell how much others would differ."""
    equal, other = Sample.of([0.92, 0.92]), Sample.of([0.93, 0.93])
    assert equal.describe_percent() == "mean 92.00 % (n=2, all equal)"
    assert describe_difference(other, equal) == "+1.00 points (no interval: all values of each are equal)"


def test_difference_of_samples_of_one_spread_and_size_is_students():
    """There Welch's degrees of freedom are 2 (n - 1) = 8, with t = 2.306."""
    mean, low, high = difference(Sample(0.95, 0.01, 5), Sample(0.93, 0.01, 5))
    half = 2.3060 * 0.01 * (2 / 5) ** 0.5
    assert (mean, low, high) == pytest.approx((0.02, 0.02 - half, 0.02 + half))


def test_difference_of_samples_of_another_spread_has_welchs_degrees_of_freedom():
    _, low, high = difference(Sample(0.95, 0.01, 3), Sample(0.93, 0.02, 3))
    assert (low, high) == pytest.approx((-0.02155, 0.06155), abs=1e-4)  # 2.94 degrees of freedom


def test_difference_of_samples_without_a_spread_is_exact():
    assert difference(Sample.of([0.75, 0.75]), Sample.of([0.5, 0.5])) == (0.25, 0.25, 0.25)
