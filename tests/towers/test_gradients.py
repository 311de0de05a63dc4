import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import average_gradients

W = tf.Variable([1.0, 2.0], name="w")
B = tf.Variable([3.0], name="b")


def mean_of(*gradients, like):
    """Average one gradient of each tower."""
    variable = tf.Variable(tf.zeros_like(like))
    ((mean, _),) = average_gradients([[(gradient, variable)] for gradient in gradients])
    return mean


def sparse(rows, indices):
    return tf.IndexedSlices(tf.constant(rows), tf.constant(indices), tf.constant([4, 2]))


def test_mean_of_three_towers():
    towers = [
        zip([tf.constant([1.0, k]), tf.constant([3.0 * k])], [W, B], strict=True)
        for k in (1.0, 2.0, 6.0)
    ]
    (mean_w, first), (mean_b, second) = average_gradients(towers)

    assert first is W
    assert second is B
    np.testing.assert_allclose(mean_w, [1.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(mean_b, [9.0], rtol=1e-6)


def test_none_is_zeros_unless_no_tower_has_a_gradient():
    pairs = [(None, W), (tf.constant([1.0]), B)]
    assert average_gradients([pairs]) == pairs  # of a single tower
    none, (mean, _) = average_gradients([pairs, pairs])
    assert none == (None, W)
    assert float(mean[0]) == 1.0
    np.testing.assert_allclose(mean_of(None, tf.constant([2.0, 4.0]), like=W), [1.0, 2.0])


def test_sparse_gradients_stay_sparse_unless_one_is_dense():
    table = tf.zeros([4, 2])
    first = sparse([[2.0, 2.0]], [1])
    mean = mean_of(first, sparse([[4.0, 0.0], [6.0, 6.0]], [1, 3]), like=table)

    assert isinstance(mean, tf.IndexedSlices)
    np.testing.assert_allclose(tf.convert_to_tensor(mean), [[0, 0], [3, 1], [0, 0], [3, 3]])
    np.testing.assert_allclose(
        mean_of(first, table + 4, like=table), [[2, 2], [3, 3], [2, 2], [2, 2]]
    )


def test_weights_may_be_tensors():
    """(3 * [1, 2] + 1 * [5, 6]) / 4 = [2, 3], with weights that are known, and known when the graph
    runs only.
    """
    first = tf.constant([1.0, 2.0])
    second = tf.constant([5.0, 6.0])

    @tf.function(input_signature=[tf.TensorSpec([2], tf.int32)])
    def in_graph(weights):
        ((mean, _),) = average_gradients([[(first, W)], [(second, W)]], weights=tf.unstack(weights))
        return mean

    for weights in ([tf.constant(3), tf.constant(1)], [tf.constant(1.5), 0.5]):
        ((mean, _),) = average_gradients([[(first, W)], [(second, W)]], weights=weights)
        np.testing.assert_allclose(mean, [2.0, 3.0], rtol=1e-6)

    np.testing.assert_allclose(in_graph([3, 1]), [2.0, 3.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("towers", "weights", "mentions"),
    [
        ([[(tf.constant([1.0, 1.0]), W)]] * 2, [1], "zip"),
        ([[(None, W)], [(None, B)]], None, "tower_1.*b:0.*tower_0.*w:0"),
        ([[(None, W), (None, B)], [(None, W)]], None, "zip"),
        ([[(None, W)], [(None, keras.Variable([1.0], name="other"))]], None, "tower_1.*other"),
    ],
)
def test_towers_that_disagree_are_refused(towers, weights, mentions):
    with pytest.raises(ValueError, match=mentions):
        average_gradients(towers, weights)


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_mean_is_on_the_device_of_the_variable(make):
    with tf.device("/CPU:3"):
        v = make([1.0])

    @tf.function
    def mean():
        ((gradient, _),) = average_gradients(
            [[(tf.constant([1.0]) * v, v)], [(tf.constant([3.0]) * v, v)]]
        )
        return gradient

    adds = [op for op in mean.get_concrete_function().graph.get_operations() if op.type == "AddN"]
    assert [op.device[-5:] for op in adds] == ["CPU:3"]
