"""What a data set is here: arrays in memory, with the splits a run trains, chooses and is judged on."""

import dataclasses
import functools
import hashlib
from typing import NamedTuple

import numpy as np

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NUM_CLASSES = len(CLASSES)


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """n examples that nobody changes: images [n, 32, 32, 3] uint8, labels [n] int64."""

    images: np.ndarray
    labels: np.ndarray

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the images' bytes followed by the labels', in stored order; taken once."""
        digest = hashlib.sha256(np.ascontiguousarray(self.images))
        digest.update(np.ascontiguousarray(self.labels.astype(np.int64)))
        return digest.hexdigest()

    def class_counts(self) -> np.ndarray:
        """[10] examples of each class."""
        return np.bincount(self.labels, minlength=NUM_CLASSES)


class Dataset(NamedTuple):
    """The splits of one data set; `validation` is empty unless examples were held out of train."""

    name: str
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]


def hold_out(train: Split, count: int) -> tuple[Split, Split]:
    """Takes `count` examples out of train, the same ones for every run: (the rest, the held out).

    They are the last `count` of one fixed shuffle, so that they do not follow the stored order.
    """
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(train.labels))
    kept, held = np.sort(order[: len(order) - count]), np.sort(order[len(order) - count :])
    if not count:
        return train, Split(train.images[:0], train.labels[:0])
    return Split(train.images[kept], train.labels[kept]), Split(train.images[held], train.labels[held])
