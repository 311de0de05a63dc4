"""Arrays of a data set: moments, splits, and what checkpoints store of them."""

import numpy as np
import pytest

from cifar_towers.data import dataset, synthetic
from cifar_towers.data.dataset import moments
from cifar_towers.data.sources import split_validation


@pytest.mark.parametrize("at_once", [1, 4])
def test_moments_by_hand(monkeypatch, at_once):
    monkeypatch.setattr(dataset, "PIXELS_PER_CHUNK", at_once)
    images = np.zeros((2, 1, 2, 3), np.uint8)
    images[:, 0, :, 0] = [10, 20], [30, 40]
    images[:, 0, :, 2] = 255
    mean, std = moments(images)
    assert mean == (25.0, 0.0, 255.0)
    assert std == (pytest.approx(np.sqrt(125)), 1.0, 1.0)


def test_validation_split_is_disjoint_and_reproducible():
    train = synthetic.make(300, 0, 0)
    rest, held_out = split_validation(train, 100)
    assert (len(rest.labels), len(held_out.labels)) == (200, 100)
    both = np.concatenate([rest.images, held_out.images]).reshape(300, -1)
    assert len(np.unique(both, axis=0)) == 300
    assert split_validation(train, 100)[1].digest == held_out.digest
    assert split_validation(train, 0)[0] is train


def test_changed_splits_are_found_by_a_checkpoints_digests():
    train = synthetic.make(20, 0, 0)
    test = synthetic.make(20, 0, 1)
    other = synthetic.make(20, 0, 2)
    data = dataset.Dataset("some", *split_validation(train, 5), test)
    metadata = {f"{name}_sha256": digest for name, digest in data.digests().items()}

    assert metadata.keys() == {"train_sha256", "validation_sha256", "test_sha256"}
    assert not data.changed_splits(metadata)
    assert data._replace(test=other).changed_splits(metadata) == ["test"]

    changed = data._replace(train=other, validation=other)
    assert changed.changed_splits(metadata) == ["train", "validation"]

    without = data._replace(validation=train.take(slice(0)))
    assert without.changed_splits(metadata) == ["validation"]  # it is missing now

    del metadata["validation_sha256"]
    assert data.changed_splits(metadata) == ["validation"]
    assert without.changed_splits(metadata) == []
