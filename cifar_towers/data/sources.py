"""Data sets by name: CIFAR-10, the synthetic set, images in your own files, or any of TensorFlow
Datasets (TFDS).
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_towers.data import cifar10, image_files, synthetic, tfds_source, user_data
from cifar_towers.data.dataset import CIFAR10, SPLITS, Dataset, Split, log_line
from cifar_towers.errors import UsageError, listed
from cifar_towers.registry import check_dataset, split_path

log = logging.getLogger(__name__)

TRAINED = ("train", "test")  # the splits that a run needs


class Source(NamedTuple):
    """A data set that has been located, before anything slow starts."""

    name: str  # as in `--dataset`, but never "auto"
    # (image size, split names) -> splits in any size
    read: Callable[[int, Sequence[str]], Mapping[str, Split]]


def find(dataset: str, data_dir: str = "") -> Source:
    """Locate a data set, within seconds and without TensorFlow.

    Args:
      dataset: `cifar10`, `synthetic`, `auto`, a path with a prefix in `registry.PREFIXES`, or the
        name of a TFDS data set. `auto` is `cifar10` if that is on this machine or can be
        downloaded, otherwise `synthetic`, and the log says why.

    Raises:
      DataError: there is no such data set, or what is at the path cannot be read.
      UsageError: the name cannot be that of a data set.
    """
    check_dataset(dataset)
    prefix, path = split_path(dataset)
    if prefix:
        root = Path(path).expanduser().absolute()
        return Source(f"{prefix}{root}", user_data.locate(prefix, root))
    if dataset == "auto":
        dataset = "cifar10"
        if not cifar10.is_available(data_dir):
            dataset = "synthetic"
            directory = tfds_source.tfds_directory(data_dir)
            log.info(
                f"dataset=auto is synthetic: no CIFAR-10 in {directory}, and {cifar10.SOURCE_HOST} "
                "does not answer; accuracies say nothing about CIFAR-10"
            )
    if dataset == "synthetic":
        return Source(
            dataset, lambda image_size, names: dict(zip(TRAINED, synthetic.load(), strict=True))
        )
    if dataset == "cifar10":
        return Source("cifar10", lambda image_size, names: cifar10.load(data_dir, names))
    directory = tfds_source.tfds_directory(data_dir)
    tfds_source.make_builder(dataset, directory)  # an unknown name is an error here
    return Source(dataset, functools.partial(tfds_source.load, dataset, directory))


def read_once(source: Source) -> Source:
    """Return the source for several runs: its splits are read once, and kept as long as it is."""
    return source._replace(read=functools.cache(source.read))


def load(
    source: Source, validation_examples: int = 0, image_size: int = CIFAR10.image_size
) -> Dataset:
    """Return the data set of a source in images of this size.

    The validation split is that of own data, unless `validation_examples` are held out of train.

    Raises:
      DataError: the data cannot be read or are damaged.
      UsageError: too many examples are held out, the source lacks train or test, or it has one
        class.
    """
    splits = _load_splits(source, image_size, TRAINED)
    train = splits["train"]
    validation = splits.get("validation")
    if len(train.info.class_names) < 2:
        raise UsageError(f"dataset={source.name} has one class; at least two are needed")
    if validation_examples or not validation:
        counts = train.class_counts()
        train, validation = split_validation(train, validation_examples)
        if (train.class_counts() < np.minimum(counts, 1)).any():
            raise UsageError(
                f"validation_examples={validation_examples} leaves a class without images to "
                "train on; give fewer"
            )
    return Dataset(source.name, train, validation, splits["test"])


def split_validation(train: Split, count: int) -> tuple[Split, Split]:
    """Return (training, validation); the `count` examples held out are the same in every run."""
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(train.labels))
    rest, held_out = np.split(order, [max(0, len(order) - count)])
    return (train.take(np.sort(rest)) if count else train), train.take(np.sort(held_out))


def load_split(
    source: Source,
    name: str = "test",
    image_size: int = CIFAR10.image_size,
    validation_examples: int = 0,
) -> Split:
    """Return one split of a source, as `load` does. For `test`, train is read only if the source
    makes the test split from it.
    """
    if name in ("train", "validation"):
        return getattr(load(source, validation_examples, image_size), name)
    return _load_splits(source, image_size, (name,), (name,))[name]


def _load_splits(
    source: Source, image_size: int, needed: Sequence[str], wanted: Sequence[str] = SPLITS
) -> dict[str, Split]:
    """Return the splits of a source by name, in images of this size. Log a line about each."""
    splits = dict(source.read(image_size, wanted))
    missing = [name for name in needed if name not in splits]
    if missing:
        raise UsageError(f"dataset={source.name} has no {' or '.join(missing)} examples")

    if "train" in splits and source.name != "cifar10":
        copies = count_copies(splits["test"], splits["train"])
        if copies:
            total = len(splits["test"].labels)
            log_line(
                f"{source.name}: {copies} of {total} test images are copies of training images"
            )

    for name, split in splits.items():
        if split.info.image_size != image_size:
            images = image_files.resize_all(split.images, image_size)
            info = split.info._replace(image_size=image_size)
            splits[name] = dataclasses.replace(split, images=images, info=info)
        log_line(f"{source.name} {name}: {_summary(splits[name])}")
    return splits


def _summary(split: Split) -> str:
    """Return the numbers of images, in all and of each class, and the digest."""
    counts = zip(split.info.class_names, split.class_counts(), strict=True)
    by_class = listed([f"{class_name} {count}" for class_name, count in counts], 10)
    return f"{len(split.labels)} images ({by_class}), sha256 {split.digest[:16]}"


def count_copies(split: Split, train: Split) -> int:
    """Return the number of images of a split that are copies of training images."""
    trained_on = {hash(image.tobytes()) for image in train.images}
    return sum(hash(image.tobytes()) in trained_on for image in split.images)
