"""A data set as arrays in memory, with its train, validation and test splits."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cifar_towers.errors import DataError, printable

log = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TEST_FRACTION = 0.2  # of each class, where there is no test split
PIXELS_PER_CHUNK = 10_000_000  # counted at a time


class DatasetInfo(NamedTuple):
    """Properties of a data set's images that a model depends on; every checkpoint stores them."""

    class_names: tuple[str, ...] = CLASSES
    image_size: int = 32  # pixels
    # per channel of the training images, levels 0..255
    mean: tuple[float, ...] = (125.307, 122.961, 113.8575)
    std: tuple[float, ...] = (62.985, 62.0925, 66.708)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "DatasetInfo":
        """Read `_asdict()` back from JSON, which turns tuples into lists."""
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()
        }
        return cls(**values)


CIFAR10 = DatasetInfo()


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Images [n, S, S, 3] uint8 and labels [n] int64 of n examples. The arrays are never written
    to.

    Own data have names [n], by which their user finds an image; see `describe`.
    """

    images: np.ndarray
    labels: np.ndarray
    info: DatasetInfo = CIFAR10
    names: np.ndarray | None = None

    def describe(self, index: int) -> str:
        """Return the name of an image, or else its place in the split."""
        return f"image {index}" if self.names is None else str(self.names[index])

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the images' bytes followed by the labels', in stored order."""
        digest = hashlib.sha256(np.ascontiguousarray(self.images).data)
        digest.update(np.ascontiguousarray(self.labels.astype(np.int64)).data)
        return digest.hexdigest()

    def class_counts(self) -> np.ndarray:
        """Return the number of examples of each class, [C]."""
        return np.bincount(self.labels, minlength=len(self.info.class_names))

    def take(self, examples: np.ndarray | slice) -> "Split":
        """Return the split of the examples at these indices."""
        return dataclasses.replace(
            self,
            images=self.images[examples],
            labels=self.labels[examples],
            names=None if self.names is None else self.names[examples],
        )


class Dataset(NamedTuple):
    """The splits of one data set; `validation` is empty unless there is one or examples were held
    out of train.
    """

    name: str
    train: Split
    validation: Split
    test: Split

    @property
    def info(self) -> DatasetInfo:
        """Properties of the images."""
        return self.train.info

    def digests(self) -> dict[str, str]:
        """Return the digest of each split that has examples, by the split's name."""
        splits = {name: getattr(self, name) for name in SPLITS}
        return {name: split.digest for name, split in splits.items() if len(split.labels)}

    def changed_splits(self, metadata: Mapping[str, Any]) -> list[str]:
        """Return the splits that differ from those whose digests a checkpoint's metadata has, or
        are new or missing.
        """
        digests = self.digests()
        return [name for name in SPLITS if digests.get(name) != metadata.get(f"{name}_sha256")]

    def check_unchanged(self, metadata: Mapping[str, Any], directory: Path) -> None:
        """Raise DataError if the run in a directory, whose checkpoint has this metadata, was
        trained on other images.
        """
        changed = self.changed_splits(metadata)
        if changed:
            raise DataError(
                f"{directory} was made with other {' and '.join(changed)} images than "
                f"{self.name} has now; give the --dataset of the run with its images as they were, "
                "another --train_dir, or --overwrite"
            )


def log_line(line: str) -> None:
    """Log a line that holds names of the user's."""
    log.info("%s", printable(line))


def fifth_of_each_class(labels: np.ndarray) -> np.ndarray:
    """Return [n] bool, true for the first examples of each class: a fifth of them, at least one.

    The examples must be in a random order. Those are the test split of a set without one.
    """
    is_held_out = np.zeros(len(labels), bool)
    for number in np.unique(labels):
        places = np.flatnonzero(labels == number)
        count = max(1, round(TEST_FRACTION * len(places)))
        is_held_out[places[:count]] = True
    return is_held_out


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of [n, H, W, 3] uint8 images; a deviation of 0
    becomes 1.
    """
    levels = np.arange(256)
    counts = np.zeros([3, 256])
    for part in chunks(images, PIXELS_PER_CHUNK):
        counts += np.reshape(Image.fromarray(part.reshape(1, -1, 3)).histogram(), [3, 256])
    means = []
    stds = []
    for frequencies in counts / counts[0].sum():
        means.append(float(frequencies @ levels))
        stds.append(float(np.sqrt(frequencies @ (levels - means[-1]) ** 2)) or 1.0)
    return tuple(means), tuple(stds)


def chunks(images: np.ndarray, pixels: int) -> Iterator[np.ndarray]:
    """Return consecutive parts of [n, H, W, C] images, of at most `pixels` pixels and at least one
    image each.
    """
    size = max(1, pixels // (images.shape[1] * images.shape[2]))
    return (images[start : start + size] for start in range(0, len(images), size))
