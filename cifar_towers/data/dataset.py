"""What a data set is here: arrays in memory, with the splits a run trains, chooses and is judged on."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COUNTED = 10_000_000  # pixels at a time, each of which takes eight bytes


class DatasetInfo(NamedTuple):
    """What a net must know of the images it is for; it is kept with every checkpoint."""

    class_names: tuple[str, ...] = CLASSES
    side: int = 32  # pixels
    mean: tuple[float, ...] = (125.307, 122.961, 113.8575)  # levels 0..255 of the training images, a channel
    deviation: tuple[float, ...] = (62.985, 62.0925, 66.708)

    @classmethod
    def of(cls, saved: Mapping) -> "DatasetInfo":
        """From what JSON made of `_asdict()`; what is missing there is CIFAR-10's."""
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in saved.items() if name in cls._fields})


CIFAR10 = DatasetInfo()


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """n examples that nobody changes: images [n, side, side, 3] uint8, labels [n] int64, indices of classes."""

    images: np.ndarray
    labels: np.ndarray
    info: DatasetInfo = CIFAR10

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the images' bytes followed by the labels', in stored order; taken once."""
        digest = hashlib.sha256(np.ascontiguousarray(self.images))
        digest.update(np.ascontiguousarray(self.labels.astype(np.int64)))
        return digest.hexdigest()

    def class_counts(self) -> np.ndarray:
        """[C] examples of each class."""
        return np.bincount(self.labels, minlength=len(self.info.class_names))

    def take(self, examples: np.ndarray | slice) -> "Split":
        """Some of the examples, by their places."""
        return dataclasses.replace(self, images=self.images[examples], labels=self.labels[examples])


class Dataset(NamedTuple):
    """The splits of one data set; `validation` is empty unless examples were held out of train."""

    name: str
    train: Split
    validation: Split
    test: Split

    @property
    def info(self) -> DatasetInfo:
        """What a net must know of the images."""
        return self.train.info

    def digests(self) -> dict[str, str]:
        """Of each split that has examples, by its name."""
        splits = {name: getattr(self, name) for name in ("train", "validation", "test")}
        return {name: split.digest for name, split in splits.items() if len(split.labels)}

    def changed(self, facts: Mapping) -> list[str]:
        """The splits that are not those a checkpoint was made with, by its facts, which for older ones tell less."""
        return [name for name, digest in self.digests().items() if facts.get(f"{name}_sha256", digest) != digest]


def chunks(images: np.ndarray, pixels: int) -> Iterator[np.ndarray]:
    """[n, H, W, C] images in their order, as many at a time as have so many pixels together, but at least one."""
    size = max(1, pixels // (images.shape[1] * images.shape[2]))
    return (images[start : start + size] for start in range(0, len(images), size))


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of [n, H, W, C] uint8 images, in levels; exact sums, whatever n is.
    A channel that does not vary has deviation 1."""
    levels = np.arange(256)
    means, deviations = [], []
    for channel in range(images.shape[3]):
        parts = chunks(images[..., channel, None], COUNTED)
        counts = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
        shares = counts / images[..., channel].size
        mean = float(shares @ levels)
        means.append(mean)
        deviations.append(float(np.sqrt(shares @ (levels - mean) ** 2)) or 1.0)
    return tuple(means), tuple(deviations)


def split_validation(train: Split, count: int) -> tuple[Split, Split]:
    """Takes `count` examples out of train, the same ones for every run: (the rest, the held out).

    They are the last `count` of one fixed shuffle, so that they do not follow the stored order.
    """
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(train.labels))
    kept, held = np.sort(order[: len(order) - count]), np.sort(order[len(order) - count :])
    return (train.take(kept) if count else train), train.take(held)
