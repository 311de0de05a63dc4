import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import all_reduce_mean, num_replicas, run_on_towers_synchronized, split_batch


def test_the_mean_of_all_towers_reaches_each(towers):
    @tf.function(autograph=False)
    def graph(x):
        return run_on_towers_synchronized(
            lambda tower, shard: all_reduce_mean(shard) + tower.index, towers(4), split_batch(x, towers(4))
        )

    np.testing.assert_array_equal(graph(tf.range(4.0)), [[1.5], [2.5], [3.5], [4.5]])


def normalised_loss(x, w):
    """Its gradient goes through two moments of the whole batch."""
    hidden = tf.tanh(x @ w)
    mean = all_reduce_mean(tf.reduce_mean(hidden, 0))
    deviation = tf.sqrt(all_reduce_mean(tf.reduce_mean((hidden - mean) ** 2, 0)) + 1e-3)
    return tf.reduce_mean(tf.sin(3 * ((hidden - mean) / deviation) @ w))


def gradient_of_loss(x, w):
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = normalised_loss(x, w)
    return tape.gradient(loss, w)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_through_a_meeting_average_to_those_of_the_whole_batch(towers, count):
    x, w = tf.random.stateless_normal([24, 3], [1, 2], dtype=tf.float64), tf.constant(np.eye(3) + 0.3)

    @tf.function(autograph=False)
    def graph(x):
        return run_on_towers_synchronized(
            lambda tower, shard: gradient_of_loss(shard, w), towers(count), split_batch(x, towers(count))
        )

    np.testing.assert_allclose(sum(graph(x)) / count, gradient_of_loss(x, w), rtol=1e-12)


def test_each_tower_stays_on_its_device_forward_and_backward(towers):
    @tf.function(autograph=False)
    def graph(x):
        with tf.name_scope("outer"):
            run = run_on_towers_synchronized(
                lambda tower, shard: gradient_of_loss(shard, tf.eye(3)), towers(3), split_batch(x, towers(3))
            )
        return run

    operations = graph.get_concrete_function(tf.ones([6, 3])).graph.get_operations()
    products = [op for op in operations if op.type == "MatMul"]
    assert len(products) == 3 * 5
    for op in products:
        tower = next(tower for tower in towers(3) if f"outer/{tower.name}/" in op.name)
        assert op.device.endswith(tower.device.lstrip("/"))


def test_how_many_towers_meet(towers):
    @tf.function(autograph=False)
    def graph():
        return run_on_towers_synchronized(lambda tower, _: tf.constant(num_replicas()), towers(3), [0, 0, 0])

    assert [int(count) for count in graph()] == [3, 3, 3]
    assert num_replicas() == 1 and float(all_reduce_mean(tf.constant(2.0))) == 2.0


def test_one_towers_error_ends_all(towers):
    def fn(tower, shard):
        all_reduce_mean(shard)
        if tower.index == 1:
            raise KeyError("from tower_1")
        return all_reduce_mean(shard)

    with pytest.raises(KeyError, match="from tower_1"):
        tf.function(lambda x: run_on_towers_synchronized(fn, towers(3), split_batch(x, towers(3))), autograph=False)(
            tf.ones([3])
        )


def test_an_error_before_the_others_have_begun(towers, capfd):
    def fn(tower, shard):
        raise KeyError("from tower_0")

    with pytest.raises(KeyError, match="from tower_0"):
        tf.function(lambda x: run_on_towers_synchronized(fn, towers(3), split_batch(x, towers(3))), autograph=False)(
            tf.ones([3])
        )
    assert "Traceback" not in capfd.readouterr().err


def test_towers_may_be_any(towers):
    @tf.function(autograph=False)
    def graph(x):
        return run_on_towers_synchronized(
            lambda tower, shard: all_reduce_mean(shard), towers(4)[2:], split_batch(x, towers(2))
        )

    np.testing.assert_array_equal(graph(tf.range(2.0)), [[0.5], [0.5]])


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_towers_that_miss_a_meeting_are_told(towers, odd):
    def fn(tower, shard):
        return all_reduce_mean(shard) if tower.index != odd else shard

    with pytest.raises(RuntimeError, match="did not all come to the same meetings"):
        tf.function(lambda x: run_on_towers_synchronized(fn, towers(3), split_batch(x, towers(3))), autograph=False)(
            tf.ones([3])
        )
