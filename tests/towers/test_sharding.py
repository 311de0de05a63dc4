import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.towers import run_micro_batches, run_on_towers, split_batch, split_uneven_batch


def test_structures_of_tensors_and_arrays_are_split_on_axis_0(towers):
    batch = {"x": tf.reshape(tf.range(12), [6, 2]), "y": [np.arange(6)]}
    shards = split_batch(batch, towers(3))
    np.testing.assert_array_equal(shards[1]["x"], [[4, 5], [6, 7]])
    np.testing.assert_array_equal(shards[2]["y"][0], [4, 5])


def test_uneven_shards_come_with_their_numbers_of_examples(towers):
    """Also of a batch whose structure is a tuple."""
    shards, sizes = split_uneven_batch((np.arange(10), tf.zeros([10, 2])), towers(4))
    assert sizes == [3, 3, 2, 2] == [len(numbers) for numbers, _ in shards]
    assert np.concatenate([numbers for numbers, _ in shards]).tolist() == list(range(10))


def test_micro_batches_have_equal_sizes_and_are_added():
    parts = []

    def fn(part):
        parts.append(part.numpy().tolist())
        return part

    assert run_micro_batches(fn, tf.range(6), 3, tf.add).numpy().tolist() == [6, 9]
    assert parts == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("split", "batch", "mentions"),
    [
        (split_batch, tf.range(3), "3 examples"),
        (split_uneven_batch, tf.range(3), "^3 examples are too few for 4 towers$"),
        (split_batch, tf.range(11), "11 examples.*drop_remainder=True.*split_uneven_batch"),
        (split_batch, [tf.range(4), tf.range(8)], "{8, 4}|{4, 8}"),
        (
            lambda batch, towers: run_micro_batches(tf.identity, batch, 4, tf.add),
            tf.range(11),
            "11 examples",
        ),
    ],
    ids=[
        "empty shard",
        "empty shard, uneven",
        "uneven shards",
        "different lengths",
        "uneven micro-batches",
    ],
)
def test_batches_that_cannot_be_split_in_four_are_refused(towers, split, batch, mentions):
    """The mean over an empty shard is NaN, and the mean of means over uneven ones not that over the
    examples.
    """
    with pytest.raises(ValueError, match=mentions):
        split(batch, towers(4))


def test_each_tower_runs_in_its_device_and_name_scope(towers):
    @tf.function
    def graph(x):
        return run_on_towers(
            lambda tower, shard: tf.square(shard), towers(4), split_batch(x, towers(4))
        )

    squares = [
        op
        for op in graph.get_concrete_function(tf.ones([8])).graph.get_operations()
        if op.type == "Square"
    ]

    assert [(op.name, op.device[-5:]) for op in squares] == [
        (f"tower_{i}/Square", f"CPU:{i}") for i in range(4)
    ]
    np.testing.assert_array_equal(tf.concat(graph(tf.range(8.0)), 0), np.arange(8.0) ** 2)
