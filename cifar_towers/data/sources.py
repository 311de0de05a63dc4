"""Data sets by name: CIFAR-10, the synthetic set, images in files of your own, or any of TensorFlow Datasets (TFDS)."""

import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers.data import arrays, cifar10, folder, image_files, synthetic, table, tfds_source
from cifar_towers.data.dataset import CIFAR10, Dataset, Split, split_validation
from cifar_towers.data.folder import Folder
from cifar_towers.errors import DataError, UsageError, listed, printable
from cifar_towers.registry import CSV, FOLDER, NPY, check_dataset, split_path

log = logging.getLogger(__name__)

TRAINED = ("train", "test")  # the splits that a run needs


class Source(NamedTuple):
    """A data set that has been located, before anything slow starts."""

    name: str  # as in `--dataset`, but never "auto"
    read: Callable[[int], Mapping[str, Split]]  # image size wanted -> train, validation, test or some, in any size
    directory: Path | None = None
    banner: str = ""  # warning for the user about the choice
    folder: Folder | None = None  # the files of a folder of images
    undivided: tuple[str, str] = ("", "")  # what data without a test split lack, and how all of them become one


def find(dataset: str, data_dir: str = "") -> Source:
    """Locate a data set, within seconds and without TensorFlow.

    Args:
      dataset: a name in `SOURCES`, after a prefix in `SOURCES` a path, `auto`, or the name of a TFDS data set.
      data_dir: directory of TFDS's data sets.

    Raises:
      DataError: CIFAR-10, or what is at the path, cannot be read.
      UsageError: there is no such data set, or `data_dir` is no place for one.
    """
    check_dataset(dataset)
    if data_dir and folder.holds_pictures(tfds_source.tfds_directory(data_dir)):
        raise UsageError(
            f"data_dir={data_dir} holds pictures, not prepared data sets; to train on them write "
            f"{shlex.quote(f'--dataset={FOLDER}{data_dir}')} instead"
        )
    if dataset != "auto":
        locate = SOURCES.get(split_path(dataset)[0] or dataset, _locate_tfds)
        return locate(dataset, data_dir)
    try:
        return _locate_cifar10("cifar10", data_dir)
    except DataError as error:
        return _synthetic_fallback(error)


def load(
    source: Source, validation_examples: int = 0, image_size: int = CIFAR10.image_size, fall_back: bool = False
) -> tuple[Source, Dataset]:
    """Return the source that was read, and its data set in images of this size.

    The validation split is `validation_examples` of train if there are to be some, otherwise the source's own.

    Args:
      validation_examples: number of examples to hold out of train.
      fall_back: read the synthetic set if CIFAR-10 cannot be downloaded. A damaged copy is still an error.

    Raises:
      DataError: the data cannot be read or are damaged.
      UsageError: too many examples are held out, the source lacks train or test, or it cannot be used.
    """
    try:
        splits = _load_splits(source, image_size, TRAINED)
    except DataError as error:
        if not fall_back or source.name != "cifar10" or (source.directory and cifar10.has_copy(source.directory)):
            raise
        source = _synthetic_fallback(error)
        splits = _load_splits(source, image_size, TRAINED)
    train, validation = splits["train"], splits.get("validation")
    if validation_examples >= len(train.labels):
        raise UsageError(f"validation_examples={validation_examples} leaves none of {len(train.labels)} to train on")
    if validation_examples or not validation:
        if validation:
            log.info("%s validation: not used, as validation_examples=%d", printable(source.name), validation_examples)
        train, validation = split_validation(train, validation_examples)
    return source, Dataset(source.name, train, validation, splits["test"])


def load_test(source: Source, image_size: int = CIFAR10.image_size) -> Split:
    """Return the test split of a source, which may have no other, as `load` does."""
    return _load_splits(source, image_size, ("test",))["test"]


def _load_splits(source: Source, image_size: int, needed: Sequence[str]) -> dict[str, Split]:
    """Return all splits of a source by name, in images of this size. Log a line about each."""
    splits = dict(source.read(image_size))
    if missing := [name for name in needed if name not in splits]:
        raise UsageError(
            f"dataset={source.name} has {' and '.join(splits)} examples and no {' or '.join(missing)} examples; "
            f"give a data set that has {' and '.join(needed)}"
        )
    for name, split in splits.items():
        if source.name != "cifar10":  # whose module logs this itself
            classes = zip(split.info.class_names, split.class_counts(), strict=True)
            by_class = listed([f"{class_name} {count}" for class_name, count in classes], 10)
            summary = f"{len(split.labels)} images ({by_class}), sha256 {split.digest[:16]}"
            log.info("%s", printable(f"{source.name} {name}: {summary}"))
        if split.info.image_size != image_size:
            images = image_files.resize_all(split.images, image_size)
            splits[name] = Split(images, split.labels, split.info._replace(image_size=image_size))
    return splits


def _locate_cifar10(name: str, data_dir: str) -> Source:
    directory = cifar10.locate(data_dir)
    return Source(name, lambda image_size: dict(zip(TRAINED, cifar10.load(directory), strict=True)), directory)


def _locate_synthetic(name: str, data_dir: str, banner: str = "") -> Source:
    return Source(name, lambda image_size: dict(zip(TRAINED, synthetic.load(), strict=True)), banner=banner)


def _locate_folder(name: str, data_dir: str) -> Source:
    files = folder.scan(Path(name.removeprefix(FOLDER)))
    missing = ("no test folder", "move its folders into a folder test in it") if files.is_undivided else ("", "")
    name = f"{FOLDER}{files.root}"
    return Source(name, lambda image_size: folder.load(files, image_size), files.root, "", files, missing)


def _locate_table(name: str, data_dir: str) -> Source:
    files = table.scan(_absolute(name))
    missing = ("no column split", "add one with test in each row") if files.is_undivided else ("", "")
    return Source(f"{CSV}{files.root}", lambda image_size: folder.load(files, image_size), None, "", files, missing)


def _locate_arrays(name: str, data_dir: str) -> Source:
    path = _absolute(name)
    class_names, splits = arrays.scan(path)
    missing = ("no test arrays", "call its arrays x_test and y_test") if arrays.ALL in splits else ("", "")
    return Source(f"{NPY}{path}", lambda image_size: arrays.load(class_names, splits, image_size), undivided=missing)


def _absolute(name: str) -> Path:
    return Path(os.path.expanduser(split_path(name)[1])).absolute()


def _locate_tfds(name: str, data_dir: str) -> Source:
    directory = tfds_source.locate(name, data_dir)
    return Source(name, lambda image_size: tfds_source.load(name, directory, image_size), directory)


# How to locate a data set, by its name or by the prefix before a path: (name, data_dir) -> source. Every other name is
# one of TFDS. `registry.BUILT_IN` lists the same names for error messages.
SOURCES: dict[str, Callable[[str, str], Source]] = {
    "cifar10": _locate_cifar10,
    "synthetic": _locate_synthetic,
    FOLDER: _locate_folder,
    CSV: _locate_table,
    NPY: _locate_arrays,
}


def _synthetic_fallback(reason: DataError) -> Source:
    banner = f"SYNTHETIC DATA, NOT CIFAR-10: accuracies of this run say nothing about CIFAR-10. Reason: {reason}"
    return _locate_synthetic("synthetic", "", banner)
