import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data.batches import Batches
from cifar_towers.data.dataset import Split


def numbered(count=10):
    """Images filled with their index, which is also the label."""
    numbers = np.arange(count)
    return Split(np.broadcast_to(numbers.astype(np.uint8)[:, None, None, None], (count, 32, 32, 3)).copy(), numbers)


def test_epoch_has_each_example_at_most_once():
    batches = Batches(numbered(), 3, seed=0)
    assert batches.steps_per_epoch == 3
    for epoch in range(3):
        seen = np.concatenate([batches.at(step).labels for step in range(3 * epoch, 3 * epoch + 3)])
        assert len(set(seen)) == 9


def test_images_and_labels_match():
    batch = Batches(numbered(), 5, seed=1).at(7)
    np.testing.assert_array_equal(batch.images[:, 0, 0, 0], batch.labels)


def test_batch_is_a_function_of_seed_and_step():
    first, again, other = (Batches(numbered(), 4, seed) for seed in (5, 5, 6))
    for a, b in zip(tf.nest.flatten(first.at(3)), tf.nest.flatten(again.at(3)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.at(3).draws.window, other.at(3).draws.window)
    assert not np.array_equal(first.at(3).draws.window, first.at(4).draws.window)


def test_stream_starts_at_any_step():
    batches = Batches(numbered(), 2, seed=0)
    full = [batch.labels.numpy() for batch in batches.stream(0, 12)]
    tail = [batch.labels.numpy() for batch in batches.stream(7, 12)]
    np.testing.assert_array_equal(full[7:], tail)
    np.testing.assert_array_equal(full[7], batches.at(7).labels)


def flips_by_epoch(flip, epochs):
    batches = Batches(numbered(200), 200, seed=3, flip=flip)
    rows = []
    for epoch in range(epochs):
        batch = batches.at(epoch)
        rows.append(batch.draws.flip.numpy()[np.argsort(batch.labels)])
    return np.array(rows)


def test_alternating_flip_inverts_in_every_epoch():
    flips = flips_by_epoch("alternating", 4)
    assert 60 < flips[0].sum() < 140
    np.testing.assert_array_equal(flips[1], ~flips[0])
    np.testing.assert_array_equal(flips[2], flips[0])


def test_random_flip_and_none():
    random = flips_by_epoch("random", 3)
    assert 0.4 < random.mean() < 0.6 and not np.array_equal(random[0], random[1])
    assert not flips_by_epoch("none", 2).any()


def test_batch_larger_than_the_data_set_is_an_error():
    with pytest.raises(ValueError, match="batch_size=11 is more than the 10 training examples"):
        Batches(numbered(), 11, seed=0)
