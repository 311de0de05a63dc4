import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import average_gradients


@pytest.fixture
def w():
    return tf.Variable([1.0, 2.0], name="w")


@pytest.fixture
def b():
    return tf.Variable([3.0], name="b")


def test_mean_of_three_towers(w, b):
    towers = [[(tf.constant([1.0, k]), w), (tf.constant([3.0 * k]), b)] for k in (1.0, 2.0, 6.0)]
    (mean_w, first), (mean_b, second) = average_gradients(towers)
    assert first is w and second is b
    np.testing.assert_allclose(mean_w, [1.0, 3.0], rtol=1e-6)
    np.testing.assert_allclose(mean_b, [9.0], rtol=1e-6)


def test_one_tower_returns_its_input(w):
    gradient = tf.constant([1.0, 2.0])
    assert average_gradients([[(gradient, w)]]) == [(gradient, w)]


def test_pairs_may_be_iterators(w):
    ((mean, _),) = average_gradients([zip([tf.constant([k, k])], [w], strict=True) for k in (1.0, 3.0)])
    np.testing.assert_allclose(mean, [2.0, 2.0])


def test_none_is_zeros_unless_no_tower_has_a_gradient(w, b):
    pairs = average_gradients([[(None, w), (tf.constant([1.0]), b)]] * 2)
    assert pairs[0] == (None, w)
    np.testing.assert_allclose(pairs[1][0], [1.0])
    ((mean, _),) = average_gradients([[(None, w)], [(tf.constant([2.0, 4.0]), w)]])
    np.testing.assert_allclose(mean, [1.0, 2.0])


def test_weighted_mean(w):
    towers = [[(tf.constant([1.0, 1.0]), w)], [(tf.constant([5.0, 9.0]), w)]]
    ((mean, _),) = average_gradients(towers, weights=[3, 1])
    np.testing.assert_allclose(mean, [2.0, 3.0])


def test_sparse_gradients_stay_sparse():
    table = tf.Variable(tf.zeros([4, 2]))
    first = tf.IndexedSlices(tf.constant([[2.0, 2.0]]), tf.constant([1]), tf.constant([4, 2]))
    second = tf.IndexedSlices(tf.constant([[4.0, 0.0], [6.0, 6.0]]), tf.constant([1, 3]), tf.constant([4, 2]))
    ((mean, _),) = average_gradients([[(first, table)], [(second, table)]])
    assert isinstance(mean, tf.IndexedSlices)
    np.testing.assert_allclose(tf.convert_to_tensor(mean), [[0, 0], [3, 1], [0, 0], [3, 3]])


def test_sparse_and_dense_average_to_dense():
    table = tf.Variable(tf.zeros([2, 1]))
    sparse = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([2, 1]))
    ((mean, _),) = average_gradients([[(sparse, table)], [(tf.constant([[4.0], [4.0]]), table)]])
    np.testing.assert_allclose(mean, [[2.0], [3.0]])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_dtype_is_preserved(dtype):
    v = tf.Variable(tf.zeros([1], dtype))
    ((mean, _),) = average_gradients([[(tf.constant([1.0], dtype), v)], [(tf.constant([2.0], dtype), v)]])
    assert mean.dtype == dtype
    np.testing.assert_allclose(tf.cast(mean, tf.float32), [1.5])


def test_no_towers_are_an_error():
    with pytest.raises(ValueError, match="at least one tower"):
        average_gradients([])


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0]])
def test_invalid_weights_are_an_error(w, weights):
    with pytest.raises(ValueError, match="2 numbers, one a tower"):
        average_gradients([[(None, w)], [(None, w)]], weights)


def test_different_variables_are_named(w, b):
    with pytest.raises(ValueError, match=r"tower_1 .* variable 0: tower_1 has 'b:0', tower_0 has 'w:0'"):
        average_gradients([[(None, w)], [(None, b)]])
    with pytest.raises(ValueError, match="variable 1: tower_1 has none, tower_0 has 'b:0'"):
        average_gradients([[(None, w), (None, b)], [(None, w)]])


def test_mean_is_on_the_device_of_the_variable():
    with tf.device("/CPU:3"):
        v = tf.Variable([1.0])

    @tf.function
    def mean():
        ((gradient, _),) = average_gradients([[(tf.constant([1.0]) * v, v)], [(tf.constant([3.0]) * v, v)]])
        return gradient

    adds = [op for op in mean.get_concrete_function().graph.get_operations() if op.type == "AddN"]
    assert [op.device[-5:] for op in adds] == ["CPU:3"]
