"""Moving averages of weights, and lookahead, by hand."""

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.training.averages import ExponentialMovingAverage, Lookahead


def test_weight_average_by_hand():
    v = tf.Variable([0.0])
    average = ExponentialMovingAverage([v], decay=0.9)
    v.assign([11.0])
    # (1 + 1) / (10 + 1): 2/11 of 0, 9/11 of 11
    average.update(tf.constant(1, tf.int64), tf.constant(True))

    np.testing.assert_allclose(average.averages[0], [9.0], rtol=1e-6)

    average.update(tf.constant(1000, tf.int64), tf.constant(True))  # 0.9
    np.testing.assert_allclose(average.averages[0], [0.9 * 9 + 0.1 * 11], rtol=1e-6)


@pytest.mark.parametrize("total", [10, 12])
def test_lookahead_by_hand(total):
    """The twelfth step is not finite: as the last one, it takes the slow weights nevertheless."""
    v = tf.Variable([0.0])
    slow = 0.0
    lookahead = Lookahead([v], total_steps=total, enabled=True)
    for step in range(1, total + 1):
        v.assign_add([1.0])
        before = float(v[0])
        lookahead.update(tf.constant(step, tf.int64), tf.constant(step < 12))
        if step % 5 == 0:
            decay = 0.95**5 * (step / total) ** 3
            slow = decay * slow + (1 - decay) * before
            np.testing.assert_allclose(v, [slow], rtol=1e-5)
        elif step < total:
            np.testing.assert_allclose(v, [before])

    np.testing.assert_allclose(v, [slow], rtol=1e-5)
