import hashlib

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data import synthetic
from cifar_towers.data.batches import Batches
from cifar_towers.data.dataset import Split
from cifar_towers.errors import UsageError


def numbered(count=10):
    """Images filled with their index, which is also the label."""
    numbers = np.arange(count)
    levels = numbers.astype(np.uint8)[:, None, None, None]
    images = np.broadcast_to(levels, (count, 32, 32, 3)).copy()
    return Split(images, numbers)


def test_epoch_has_each_example_at_most_once_with_its_label():
    batches = Batches(numbered(), 3, seed=0)
    assert batches.steps_per_epoch == 3
    for epoch in range(3):
        of_epoch = [batches.at(step) for step in range(3 * epoch, 3 * epoch + 3)]
        assert len(set(np.concatenate([batch.labels for batch in of_epoch]))) == 9
        for batch in of_epoch:
            np.testing.assert_array_equal(batch.images[:, 0, 0, 0], batch.labels)


EARLIER_DRAWS = (
    "flip",
    "window",
    "cutout",
    "brightness",
    "contrast",
    "example_index",
    "user",
)


@pytest.mark.parametrize(
    ("seed", "step", "flip", "own", "digest"),
    [
        (0, 0, "alternating", False, "520e2543ae812962"),
        (3, 7, "alternating", True, "3fe23196d03c9d64"),
        (2**31 - 1, 1000, "random", False, "f0dd52cdc7976bbb"),
    ],
)
def test_batches_are_those_of_earlier_versions(seed, step, flip, own, digest):
    """A run goes on with them after an update. Another digest needs another recipe or seed.
    Random numbers that are added later do not count.
    """
    batch = Batches(synthetic.make(60, 0, 0), 16, seed, flip, user_augmentation=own).at(step)
    draws = [getattr(batch.draws, name) for name in EARLIER_DRAWS]
    found = hashlib.sha256()
    for tensor in (batch.images, batch.labels, *draws):
        found.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    assert found.hexdigest()[:16] == digest


def test_batch_is_a_function_of_seed_and_step():
    first = Batches(numbered(), 4, seed=5)
    again = Batches(numbered(), 4, seed=5)
    other = Batches(numbered(), 4, seed=6)

    for a, b in zip(tf.nest.flatten(first.at(3)), tf.nest.flatten(again.at(3)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.at(3).draws.window, other.at(3).draws.window)
    assert not np.array_equal(first.at(3).draws.window, first.at(4).draws.window)


@pytest.mark.parametrize("device", ["", "/CPU:1"])
def test_stream_starts_at_any_step(device):
    """Also if its batches are copied to another device ahead of their step."""
    batches = Batches(numbered(), 2, seed=0, device=device)
    full = [batch.labels.numpy() for batch in batches.stream(0, 12)]
    tail = [batch.labels.numpy() for batch in batches.stream(7, 12)]
    np.testing.assert_array_equal(full[7:], tail)
    np.testing.assert_array_equal(full[7], batches.at(7).labels)
    assert next(iter(batches.stream(0, 1))).images.device.endswith(device[1:] or "CPU:0")


def test_flips_alternate_between_epochs_or_are_random_or_none():
    def flips(flip):
        epochs = [Batches(numbered(200), 200, seed=3, flip=flip).at(epoch) for epoch in range(4)]
        return np.array([batch.draws.flip.numpy()[np.argsort(batch.labels)] for batch in epochs])

    alternating = flips("alternating")
    random = flips("random")

    assert 60 < alternating[0].sum() < 140
    np.testing.assert_array_equal(alternating[1], ~alternating[0])
    np.testing.assert_array_equal(alternating[2], alternating[0])
    assert 0.4 < random.mean() < 0.6
    assert not np.array_equal(random[0], random[1])
    assert not flips("none").any()


def test_batch_larger_than_the_data_set_is_an_error():
    with pytest.raises(UsageError, match="11 .* 10 "):
        Batches(numbered(10), 11, seed=0)
