import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import run_micro_batches, run_on_towers, split_batch


def test_structures_are_split_on_axis_0(towers):
    batch = {"x": tf.reshape(tf.range(12), [6, 2]), "y": [tf.range(6)]}
    shards = split_batch(batch, towers(3))
    np.testing.assert_array_equal(shards[1]["x"], [[4, 5], [6, 7]])
    np.testing.assert_array_equal(shards[2]["y"][0], [4, 5])


def test_arrays_are_split_as_tensors(towers):
    shards = split_batch(np.arange(6).reshape(3, 2), towers(3))
    assert [shard.numpy().tolist() for shard in shards] == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_first_shards_have_the_remainder(towers):
    assert [len(s) for s in split_batch(tf.range(11), towers(4), allow_uneven=True)] == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("batch", "count", "message"),
    [
        (tf.range(3), 4, "3 examples .* into 4 parts"),
        (tf.range(11), 4, r"11 examples .* 4 parts: .*drop_remainder=True.*allow_uneven=True.*weights="),
        ([tf.range(3), tf.range(4)], 2, r"axis 0.* {3, 4}"),
    ],
    ids=["too few examples", "uneven shards", "different lengths"],
)
def test_split_batch_refuses(towers, batch, count, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, towers(count))


def test_no_shard_is_empty(towers):
    """The mean over an empty shard is NaN."""
    with pytest.raises(ValueError, match="3 examples"):
        split_batch(tf.range(3), towers(4), allow_uneven=True)


def test_micro_batches_have_equal_sizes():
    """The mean over parts of different sizes is not the mean over the examples."""
    assert [part.numpy().tolist() for part in run_micro_batches(tf.identity, tf.range(4), 2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="3 examples cannot be split evenly into 2 parts"):
        run_micro_batches(tf.identity, tf.range(3), 2)


def test_each_tower_runs_in_its_device_and_name_scope(towers):
    @tf.function
    def graph(x):
        return run_on_towers(lambda tower, shard: tf.square(shard), towers(4), split_batch(x, towers(4)))

    squares = [op for op in graph.get_concrete_function(tf.ones([8])).graph.get_operations() if op.type == "Square"]
    assert [(op.name, op.device[-5:]) for op in squares] == [(f"tower_{i}/Square", f"CPU:{i}") for i in range(4)]
    np.testing.assert_array_equal(tf.concat(graph(tf.range(8.0)), 0), np.arange(8.0) ** 2)
