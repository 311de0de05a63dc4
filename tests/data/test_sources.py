"""Data sets by name, and what all of them have in common."""

import numpy as np
import pytest

from cifar_towers.data import sources, synthetic
from cifar_towers.data.dataset import Split
from cifar_towers.errors import UsageError

SPLITS = {
    "train": synthetic.make(20, 0, 0),
    "validation": synthetic.make(8, 0, 2),
    "test": synthetic.make(10, 0, 1),
}


def source_of(*names):
    return sources.Source(
        "new", lambda image_size, wanted: {name: SPLITS[name] for name in names if name in wanted}
    )


@pytest.mark.parametrize(
    "name", ["Other", "photos/", "cifar-10", "labels.csv", "npz:", "folder:", "cifar10_corrupted/*"]
)
def test_name_that_cannot_be_that_of_a_data_set_is_refused(name):
    with pytest.raises(UsageError, match=f"dataset={name}"):
        sources.find(name)


def test_copies_are_equal_in_every_pixel():
    train = SPLITS["train"]
    images = train.images[:5].copy()
    images[0, 0, 0, 0] ^= 1  # all but a corner is equal
    images[1, 16] ^= 1
    assert sources.count_copies(Split(images, train.labels[:5]), train) == 3
    assert sources.count_copies(SPLITS["test"], train) == 0


def test_synthetic_is_balanced_seeded_and_disjoint():
    train = synthetic.make(500, 0, 0)
    test = synthetic.make(500, 0, 1)
    assert train.images.shape == (500, 32, 32, 3)
    assert train.images.dtype == np.uint8
    assert (train.class_counts() == 50).all()
    assert synthetic.make(500, 0, 0).digest == train.digest
    assert sources.count_copies(test, train) == 0


def test_validation_split_of_a_source_is_used_unless_examples_are_held_out():
    source = source_of(*SPLITS)
    assert sources.load(source).digests() == {name: split.digest for name, split in SPLITS.items()}
    data = sources.load(source, validation_examples=5)
    assert (len(data.train.labels), len(data.validation.labels)) == (15, 5)


@pytest.mark.parametrize("count", [15, 20, 30])
def test_held_out_images_leave_some_of_each_class(count):
    with pytest.raises(UsageError, match=f"validation_examples={count}"):
        sources.load(source_of(*SPLITS), validation_examples=count)


def test_a_split_is_read_alone_and_resized_unless_it_is_missing():
    small = sources.load_split(source_of("test"), "test", 16)
    assert small.images.shape == (10, 16, 16, 3)
    assert small.info.image_size == 16
    with pytest.raises(UsageError, match="test"):
        sources.load_split(source_of("train", "validation"))
