"""Accuracy, loss, calibration and intervals of a split, by hand."""

import itertools

import numpy as np
import pytest

from cifar_towers.evaluation.score import Score, reported_score, wilson_interval


def test_mistakes_are_sorted_by_confidence():
    logits = np.array([[0, 5.0], [0, 1.0], [3.0, 0], [0, 2.0]]) @ np.eye(2, 10)
    assert Score(np.array([1, 0, 1, 0]), logits).mistakes.tolist() == [2, 3, 1]


def test_score_by_hand():
    logits = np.log(
        [[0.7, 0.2, 0.1] + [1e-9] * 7, [0.2, 0.7, 0.1] + [1e-9] * 7, [0.1, 0.2, 0.7] + [1e-9] * 7]
    )
    found = Score(np.array([0, 1, 1]), logits)

    assert (found.count, found.correct) == (3, 2)
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.loss == pytest.approx(-np.log([0.7, 0.7, 0.2]).mean(), abs=1e-6)
    assert found.confusion[1].tolist() == [0, 1, 1] + [0] * 7
    np.testing.assert_allclose(found.per_class()[:2], [1, 0.5])
    assert np.isnan(found.per_class()[5])


def test_label_of_probability_zero_has_finite_loss():
    found = Score(np.array([1, 0]), np.array([[2000, 0], [3000, 0]], "f4"))
    assert found.loss == 1000
    assert found.probabilities.tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("labels", "logits", "filled", "ece"),
    [
        # one bin: half of two images right at a confidence of 0.9
        ([0, 1], np.log([[0.9, 0.1]] * 2), {13: 2}, 0.4),
        # three bins of 1, 2 and 1 images: |1 - 0.7| / 4 + |1 - 1.5| / 4 + |0 - 0.95| / 4
        (
            [0, 1, 0, 1],
            np.log([[0.7, 0.3], [0.25, 0.75], [0.25, 0.75], [0.95, 0.05]]),
            {10: 1, 11: 2, 14: 1},
            0.4375,
        ),
        # a confidence of exactly 3 / 15 or 1 / 15 belongs to the bin below the edge
        ([0, 1, 2, 3, 4], np.zeros((5, 5)), {2: 5}, 0.0),
        ([1], np.zeros((1, 15)), {0: 1}, 1 / 15),
        # exactly 1
        ([0, 0, 0, 1], np.array([[2000.0, 0.0]] * 4), {14: 4}, 0.25),
        # all of one class, and predicted as another
        ([1, 1, 1], np.log([[0.8, 0.1, 0.1]] * 3), {11: 3}, 0.8),
    ],
)
def test_expected_calibration_error_by_hand(labels, logits, filled, ece):
    found = Score(np.array(labels), logits)
    assert {bin: int(count) for bin, count in enumerate(found.reliability[0]) if count} == filled
    assert found.ece == pytest.approx(ece, abs=1e-12)
    assert found.reliability.shape == (3, 15)
    assert found.reliability[1].sum() == found.correct


def test_wilson_interval():
    low, high = wilson_interval(0.9, 100)

    assert (low, high) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert wilson_interval(1.0, 10)[1] == pytest.approx(1.0)

    for number, share in itertools.product(range(1, 2000), (0.0, 1.0)):
        low, high = wilson_interval(share, number)
        assert 0 <= low <= 1
        assert 0 <= high <= 1


@pytest.mark.parametrize(
    "kinds",  # the one to report first
    [
        [("test", True, 0.91), ("test", False, 0.93)],
        [("test", False, 0.93), ("validation", False, 0.99), ("validation", True, 0.99)],
    ],
)
def test_reported_score_is_chosen_without_looking_at_the_accuracy(kinds):
    scores = [dict(zip(("split", "tta", "accuracy"), kind, strict=True)) for kind in kinds]
    assert reported_score(scores) == reported_score(scores[::-1]) == scores[0]
    assert reported_score([]) is None
