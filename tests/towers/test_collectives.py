import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import (
    all_reduce_mean,
    make_parallel,
    make_parallel_model,
    num_replicas,
    run_on_towers,
    run_on_towers_synchronized,
    split_batch,
)


def synchronized(fn, towers, batch):
    """Run `fn(tower, shard)` on every tower."""
    return run_on_towers_synchronized(fn, towers, split_batch(batch, towers))


run_synchronized = tf.function(synchronized, autograph=False)


def test_every_tower_gets_the_mean(towers):
    result = run_synchronized(
        lambda tower, shard: all_reduce_mean(shard) + tower.index, towers(6)[2:], tf.range(4.0)
    )
    np.testing.assert_array_equal(result, [[3.5], [4.5], [5.5], [6.5]])


def loss_gradient(x, w):
    """Compute the gradient of a loss that depends on two moments of the whole batch."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        hidden = tf.tanh(x @ w)
        mean = all_reduce_mean(tf.reduce_mean(hidden, 0))
        std = tf.sqrt(all_reduce_mean(tf.reduce_mean((hidden - mean) ** 2, 0)) + 1e-3)
        loss = tf.reduce_mean(tf.sin(3 * ((hidden - mean) / std) @ w))
    return tape.gradient(loss, w)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_average_to_those_of_the_whole_batch(towers, count):
    x = tf.random.stateless_normal([24, 3], [1, 2], dtype=tf.float64)
    w = tf.constant(np.eye(3) + 0.3)
    gradients = run_synchronized(lambda tower, shard: loss_gradient(shard, w), towers(count), x)
    np.testing.assert_allclose(sum(gradients) / count, loss_gradient(x, w), rtol=1e-12)


def test_forward_and_backward_are_on_the_tower_device(towers):
    @tf.function(autograph=False)
    def graph(x):
        with tf.name_scope("outer"):
            return synchronized(lambda tower, shard: loss_gradient(shard, tf.eye(3)), towers(3), x)

    operations = graph.get_concrete_function(tf.ones([6, 3])).graph.get_operations()
    products = [op for op in operations if op.type == "MatMul"]

    assert len(products) == 3 * 5

    for op in products:
        tower = next(tower for tower in towers(3) if f"outer/{tower.name}/" in op.name)
        assert op.device.endswith(tower.device.lstrip("/"))


def test_num_replicas(towers):
    counts = run_synchronized(lambda tower, _: tf.constant(num_replicas()), towers(3), tf.zeros(3))
    assert [int(count) for count in counts] == [3, 3, 3]
    assert num_replicas() == 1
    assert float(all_reduce_mean(tf.constant(2.0))) == 2.0


@pytest.mark.parametrize("failing", [0, 1])
def test_error_in_one_tower_ends_all(towers, failing):
    """The first raises it before the others start, the second while the first waits for its
    mean.
    """

    def fn(tower, shard):
        if tower.index == failing:
            raise KeyError(tower.name)
        return all_reduce_mean(shard)

    with pytest.raises(KeyError, match=f"tower_{failing}"):
        run_synchronized(fn, towers(3), tf.ones([3]))


@pytest.mark.parametrize("skipping", [0, 1, 2])
def test_different_numbers_of_calls_are_an_error(towers, skipping):
    def fn(tower, shard):
        return all_reduce_mean(shard) if tower.index != skipping else shard

    with pytest.raises(RuntimeError, match="all_reduce_mean"):
        run_synchronized(fn, towers(3), tf.ones([3]))


@pytest.mark.parametrize("shards", [[1.0, 2.0, 3.0], [1.0]])
@pytest.mark.parametrize("run", [run_on_towers, run_on_towers_synchronized])
def test_there_is_one_shard_for_each_tower(towers, run, shards):
    """A shard without a tower would be dropped."""
    with pytest.raises(ValueError):
        tf.function(lambda: run(lambda tower, shard: shard, towers(2), shards))()


def test_towers_are_synchronized_in_a_graph_only(towers):
    with pytest.raises(RuntimeError):
        synchronized(lambda tower, shard: all_reduce_mean(shard), towers(2), tf.ones([2]))


class Centered(keras.layers.Layer):
    def call(self, x, training=False):
        return x - all_reduce_mean(tf.reduce_mean(x, 0)) if training else x


def test_towers_that_do_not_meet_have_no_mean(towers):
    """They would take the mean of their shards for it."""
    shards = split_batch(tf.range(4.0), towers(2))
    model = keras.Sequential([keras.Input((3,)), Centered()])
    parallel = make_parallel_model(model, towers(2))
    for run in (
        lambda: run_on_towers(lambda tower, shard: all_reduce_mean(shard), towers(2), shards),
        lambda: run_on_towers(lambda tower, shard: num_replicas(), towers(2), shards),
        lambda: make_parallel(lambda x: all_reduce_mean(x), towers(2), x=tf.range(4.0)),
        lambda: parallel(tf.ones([4, 3]), training=True),
    ):
        for call in (run, tf.function(run, autograph=False)):
            with pytest.raises(RuntimeError, match="run_on_towers_synchronized"):
                call()

    assert float(all_reduce_mean(tf.constant(2.0))) == 2.0  # afterwards


def test_a_batch_of_its_own_has_a_mean_without_meeting(towers):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    model = make_parallel_model(keras.Sequential([keras.Input((3,)), Centered()]), towers(1))

    np.testing.assert_array_equal(model(x, training=True), x - x.mean(0))

    (alone,) = run_on_towers(
        lambda tower, shard: all_reduce_mean(shard), towers(1), [tf.range(4.0)]
    )

    np.testing.assert_array_equal(alone, np.arange(4))

    def nested(tower, x):
        return run_on_towers(lambda inner, part: all_reduce_mean(part), towers(2), tf.split(x, 2))

    np.testing.assert_array_equal(
        run_synchronized(nested, towers(2), tf.range(4.0)), [[[1], [2]]] * 2
    )
