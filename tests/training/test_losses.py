"""Loss terms and their moving averages, by hand."""

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.training.losses import SmoothedLosses, cross_entropy, make_loss


def test_smoothed_cross_entropy_by_hand():
    logits = tf.constant([[2.0, 0.0, 0.0, 0.0]])
    log_p = np.log(np.exp([2.0, 0, 0, 0]) / np.exp([2.0, 0, 0, 0]).sum())
    expected = -(0.85 * log_p[0] + 0.05 * log_p[1:].sum())
    assert float(cross_entropy(tf.constant([0]), logits, 0.2)[0]) == pytest.approx(expected, rel=1e-6)


def test_weight_losses_add_to_the_total():
    loss = make_loss(cross_entropy, {"local3": (1, 0.004)})
    terms = loss(tf.constant([0]), tf.zeros([1, 10]), [tf.constant([9.0]), tf.constant([3.0, 4.0])])
    assert float(terms["local3/weight_loss"]) == pytest.approx(0.004 * 12.5)
    assert float(terms["total_loss"]) == pytest.approx(np.log(10) + 0.05)


def test_loss_averages_are_debiased_and_ignore_nonfinite_steps():
    averages = SmoothedLosses(["total_loss"])

    def average(loss, finite=True):
        return float(averages.update({"total_loss": tf.constant(loss)}, tf.constant(finite))["total_loss"])

    assert average(np.nan, False) == 0.0
    assert average(4.0) == pytest.approx(4.0)
    assert average(np.nan, False) == pytest.approx(4.0)
    assert average(8.0) == pytest.approx((0.9 * 4 + 8) / 1.9)
