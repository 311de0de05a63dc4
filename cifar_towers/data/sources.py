"""Data sets by name: CIFAR-10, the synthetic set, images in files of your own, or any of TensorFlow Datasets (TFDS)."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers.data import arrays, cifar10, folder, image_files, own_data, synthetic, table, tfds_source
from cifar_towers.data.dataset import CIFAR10, Dataset, Split, split_validation
from cifar_towers.data.own_data import SPLITS, OwnData
from cifar_towers.errors import DataError, UsageError, listed, printable
from cifar_towers.registry import CSV, FOLDER, NPZ, check_dataset, split_path

log = logging.getLogger(__name__)

TRAINED = ("train", "test")  # the splits that a run needs


class Source(NamedTuple):
    """A data set that has been located, before anything slow starts."""

    name: str  # as in `--dataset`, but never "auto"
    read: Callable[[int, Sequence[str]], Mapping[str, Split]]  # (image size, split names) -> splits in any size
    banner: str = ""  # warning that synthetic data replace CIFAR-10; otherwise empty
    corruptions: tuple[str, ...] = ()  # names of the splits of corrupted test images, as fog_3
    has_validation: bool = False  # whether there is a validation split that `load` uses if none are held out
    has_test: bool = True  # otherwise the test split is a fifth of each class


def find(dataset: str, data_dir: str = "") -> Source:
    """Locate a data set, within seconds and without TensorFlow.

    Args:
      dataset: `cifar10`, `synthetic`, `auto`, a path with a prefix in `OWN_DATA`, or the name of a TFDS data set.

    Raises:
      DataError: there is no such data set, or what is at the path cannot be read.
      UsageError: the name cannot be that of a data set.
    """
    check_dataset(dataset)
    prefix, path = split_path(dataset)
    if prefix:
        return _locate_own(prefix, Path(path).expanduser().absolute())
    if dataset == "auto":
        try:
            cifar10.check_available(data_dir)
        except cifar10.DownloadError as error:
            return _synthetic_fallback(error)
    if dataset in ("auto", "cifar10"):
        return Source("cifar10", lambda image_size, names: cifar10.load(data_dir, names))
    if dataset == "synthetic":
        return Source(dataset, lambda image_size, names: dict(zip(TRAINED, synthetic.load(), strict=True)))
    directory = tfds_source.tfds_directory(data_dir)
    read = functools.partial(tfds_source.load, dataset, directory)
    return Source(dataset, read, corruptions=tfds_source.locate(dataset, directory))


def load(
    source: Source, validation_examples: int = 0, image_size: int = CIFAR10.image_size, fall_back: bool = False
) -> tuple[Source, Dataset]:
    """Return the source that was read, and its data set in images of this size.

    The validation split is the source's own, unless `validation_examples` are held out of train.

    Args:
      fall_back: read the synthetic set if CIFAR-10 cannot be downloaded. A damaged copy is still an error.

    Raises:
      DataError: the data cannot be read or are damaged.
      UsageError: too many examples are held out, the source lacks train or test, or it has one class.
    """
    try:
        splits = _load_splits(source, image_size, TRAINED)
    except cifar10.DownloadError as error:
        if not fall_back:
            raise
        source = _synthetic_fallback(error)
        splits = _load_splits(source, image_size, TRAINED)
    train, validation = splits["train"], splits.get("validation")
    if len(train.info.class_names) < 2:
        raise UsageError(f"dataset={source.name} has one class; at least two are needed")
    if validation_examples >= len(train.labels):
        raise UsageError(f"validation_examples={validation_examples} leaves none of {len(train.labels)} to train on")
    if validation_examples or not validation:
        if validation:
            log.info("%s validation: not used, as validation_examples=%d", printable(source.name), validation_examples)
        before = train.class_counts()
        train, validation = split_validation(train, validation_examples)
        counts = zip(train.info.class_names, before, train.class_counts(), strict=True)
        if gone := [name for name, had, has in counts if had and not has]:
            raise UsageError(
                f"validation_examples={validation_examples} leaves no images of {listed(gone)} to train on; give fewer"
            )
    return source, Dataset(source.name, train, validation, splits["test"])


def load_split(
    source: Source, name: str = "test", image_size: int = CIFAR10.image_size, validation_examples: int = 0
) -> Split:
    """Return one split of a source, as `load` does. For `test` and `Source.corruptions`, nothing else is read."""
    if name in ("train", "validation"):
        return getattr(load(source, validation_examples, image_size)[1], name)
    return _load_splits(source, image_size, (name,), (name,))[name]


def _load_splits(
    source: Source, image_size: int, needed: Sequence[str], wanted: Sequence[str] = SPLITS
) -> dict[str, Split]:
    """Return the splits of a source by name, in images of this size. Log a line about each."""
    splits = dict(source.read(image_size, wanted))
    if missing := [name for name in needed if name not in splits]:
        raise UsageError(
            f"dataset={source.name} has no {' or '.join(missing)} examples; give a data set that has "
            f"{' and '.join(needed)}"
        )
    if "train" in splits and source.name != "cifar10" and (copies := count_copies(splits["test"], splits["train"])):
        count = len(splits["test"].labels)
        log.info("%s", printable(f"{source.name}: {copies} of {count} test images are copies of training images"))
    for name, split in splits.items():
        classes = zip(split.info.class_names, split.class_counts(), strict=True)
        by_class = listed([f"{class_name} {count}" for class_name, count in classes], 10)
        summary = f"{len(split.labels)} images ({by_class}), sha256 {split.digest[:16]}"
        log.info("%s", printable(f"{source.name} {name}: {summary}"))
        if split.info.image_size != image_size:
            images = image_files.resize_all(split.images, image_size)
            splits[name] = Split(images, split.labels, split.info._replace(image_size=image_size))
    return splits


def count_copies(split: Split, train: Split) -> int:
    """Return the number of images of a split that are copies of training images."""
    row = train.images.shape[1] // 2
    rows = {image[row].tobytes() for image in split.images}  # seconds faster than to hash all of each training image
    trained_on = {hash(image.tobytes()) for image in train.images if image[row].tobytes() in rows}
    return sum(hash(image.tobytes()) in trained_on for image in split.images) if trained_on else 0


# prefix before a path -> how to list the examples there
OWN_DATA: dict[str, Callable[[Path], OwnData]] = {FOLDER: folder.scan, CSV: table.scan, NPZ: arrays.scan}


def _locate_own(prefix: str, root: Path) -> Source:
    name = f"{prefix}{root}"
    try:
        found = OWN_DATA[prefix](root)
        data = own_data.complete(found)
    except (OSError, ValueError) as error:
        raise DataError(f"dataset={name}: {error}") from error
    has_test = "test" in found.splits
    if not has_test and "train" in found.splits:
        log.info("%s", printable(f"{name}: there is no test split, so a fifth of each class is the test split"))
    read = functools.partial(own_data.load, data)
    return Source(name, read, has_validation="validation" in data.splits, has_test=has_test)


def _synthetic_fallback(reason: DataError) -> Source:
    banner = f"SYNTHETIC DATA, NOT CIFAR-10: accuracies of this run say nothing about CIFAR-10. Reason: {reason}"
    return find("synthetic")._replace(banner=banner)
