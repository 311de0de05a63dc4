"""Data sets by name, and what all of them have in common."""

import numpy as np
import pytest

from cifar_towers.data import sources, synthetic
from cifar_towers.data.dataset import Split
from cifar_towers.errors import UsageError

SPLITS = {"train": synthetic.make(20, 0, 0), "validation": synthetic.make(8, 0, 2), "test": synthetic.make(10, 0, 1)}


def source_of(*names):
    return sources.Source("new", lambda image_size, wanted: {name: SPLITS[name] for name in names if name in wanted})


def test_name_that_cannot_be_that_of_a_data_set_is_refused():
    for name in ("Other", "photos/", "cifar-10", "labels.csv", "npz:", "folder:"):
        with pytest.raises(UsageError, match=f"dataset={name} is not "):
            sources.find(name)


def test_copies_are_equal_in_every_pixel():
    train = synthetic.make(20, 0, 0)
    images = train.images[:5].copy()
    images[0, 0, 0, 0] ^= 1  # all but a corner is equal
    images[1, 16] ^= 1
    assert sources.count_copies(Split(images, train.labels[:5]), train) == 3
    assert sources.count_copies(synthetic.make(10, 0, 1), train) == 0


def test_synthetic_is_balanced_seeded_and_disjoint():
    train, test = synthetic.make(500, 0, 0), synthetic.make(500, 0, 1)
    assert train.images.shape == (500, 32, 32, 3) and train.images.dtype == np.uint8
    assert (train.class_counts() == 50).all()
    assert synthetic.make(500, 0, 0).digest == train.digest != test.digest


def test_validation_split_of_a_source_is_used_unless_examples_are_held_out():
    source = source_of(*SPLITS)
    assert sources.load(source).digests() == {name: split.digest for name, split in SPLITS.items()}
    data = sources.load(source, validation_examples=5)
    assert (len(data.train.labels), len(data.validation.labels)) == (15, 5)


def test_held_out_images_leave_some_of_each_class():
    for count in (15, 20, 30):
        with pytest.raises(UsageError, match=f"validation_examples={count} leaves a class without images to train on"):
            sources.load(source_of(*SPLITS), validation_examples=count)


def test_source_with_a_test_split_alone_is_scored_and_not_trained_on():
    only_test = source_of("test")
    assert sources.load_split(only_test).digest == SPLITS["test"].digest
    small = sources.load_split(only_test, "test", 16)
    assert small.images.shape == (10, 16, 16, 3) and small.info.image_size == 16
    with pytest.raises(UsageError, match="dataset=new has no train examples"):
        sources.load(only_test)
    with pytest.raises(UsageError, match="new has no test examples"):
        sources.load_split(source_of("train", "validation"))
