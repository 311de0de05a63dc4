"""The common part of a user's own data sets: the order of the examples, the test split, and how they are read."""

import functools
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import listed

SPLITS = ("train", "validation", "test")
TEST_FRACTION = 0.2  # of each class, if there is no test split


class OwnData(NamedTuple):
    """The examples of a user's data set, located but not read."""

    class_names: tuple[str, ...]
    splits: Mapping[str, tuple[Sequence[Any], np.ndarray]]  # name in `SPLITS` -> n items, and their classes [n] int64
    read: Callable[[Sequence[Any], int], np.ndarray]  # (items, image size S) -> [n, S, S, 3] uint8
    hash_of: Callable[[Any], bytes]  # stays the same when the data are moved


def of_files(root: Path, files: Mapping[str, Mapping[Path, str]], classes: Mapping[str, Collection[str]]) -> OwnData:
    """Return the data set of image files below `root`.

    Args:
      files: split -> file -> name of its class.
      classes: split -> names of its classes, also of those without files.

    Raises:
      ValueError: a split has a class that train lacks.
    """
    class_names = tuple(sorted(classes.get("train") or {name for names in classes.values() for name in names}))
    numbers = {name: number for number, name in enumerate(class_names)}
    for split, names in classes.items():
        if unknown := sorted({*names}.difference(class_names)):
            raise ValueError(f"{split} has the classes {listed(unknown)}, and train only {listed(class_names)}")
    splits = {
        split: ([*labels], np.array([numbers[name] for name in labels.values()], np.int64))
        for split, labels in files.items()
    }
    return OwnData(class_names, splits, image_files.read_all, functools.partial(_hash_name, root))


def complete(data: OwnData) -> OwnData:
    """Put the examples in the order of their hashes, and hold out a fifth of each class if there is no test split.

    In this order the first examples are a random sample of the split.

    Raises:
      ValueError: a split is empty, or a class has no example to train on.
    """
    splits = {}
    for name in (name for name in SPLITS if name in data.splits):
        items, labels = data.splits[name]
        if not len(items):
            raise ValueError(f"{name} has no images")
        hashes = [data.hash_of(item) for item in items]
        splits[name] = _take(items, labels, np.array(sorted(range(len(items)), key=hashes.__getitem__)))
    if "train" in splits:
        items, labels = splits["train"]
        if "test" not in splits:
            held_out = np.zeros(len(labels), bool)
            for number in range(len(data.class_names)):
                places = np.flatnonzero(labels == number)
                held_out[places[: max(1, round(TEST_FRACTION * len(places)))]] = True
            splits["test"] = _take(items, labels, np.flatnonzero(held_out))
            splits["train"] = _take(items, labels, np.flatnonzero(~held_out))
        counts = np.bincount(splits["train"][1], minlength=len(data.class_names))
        if missing := [name for name, count in zip(data.class_names, counts, strict=True) if not count]:
            raise ValueError(f"there are no images of {listed(missing)} to train on")
    return data._replace(splits=splits)


def load(data: OwnData, image_size: int, names: Sequence[str]) -> dict[str, Split]:
    """Read the splits of these names that exist. Mean and deviation are those of the first, train if it is read."""
    found = {name: split for name, split in data.splits.items() if name in names}
    images = {name: data.read(items, image_size) for name, (items, _) in found.items()}
    info = DatasetInfo(data.class_names, image_size, *moments(next(iter(images.values())))) if images else DatasetInfo()
    return {name: Split(images[name], labels, info) for name, (_, labels) in found.items()}


def _take(items: Sequence[Any], labels: np.ndarray, places: np.ndarray) -> tuple[list[Any], np.ndarray]:
    return [items[place] for place in places], labels[places]


def _hash_name(root: Path, path: Path) -> bytes:
    folder = "" if path.parent == root else path.parent.name  # the name of the root may change
    return hashlib.sha256(os.fsencode(f"{folder}/{path.name}")).digest()
