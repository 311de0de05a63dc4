"""Data sets by name: CIFAR-10, the synthetic set, a folder of images, or any of TensorFlow Datasets."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cifar_towers.data import cifar10, folder, image_files, synthetic, tfds_source
from cifar_towers.data.dataset import CIFAR10, Dataset, Split, split_validation
from cifar_towers.data.folder import Folder
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.registry import FOLDER, check_dataset

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where a data set will be loaded from, determined before anything slow starts."""

    name: str  # as in `--dataset`, but never "auto"
    directory: Path | None = None
    banner: str = ""  # warning for the user about the choice
    folder: Folder | None = None  # its files, if it is a folder of images


class SourceType(NamedTuple):
    """One kind of data set: how to locate it, within seconds and without TensorFlow, and how to load it."""

    locate: Callable[[str, str], Source]  # (name, data_dir) -> source
    load: Callable[[Source, int], tuple[Split, Split]]  # (source, side) -> (train, test); any side that is at hand


def _locate_folder(name: str, data_dir: str) -> Source:
    files = folder.scan(Path(name.removeprefix(FOLDER)))
    return Source(f"{FOLDER}{files.root}", files.root, folder=files)


# By name or, where a path follows, by prefix. `registry.BUILT_IN` lists the same names for error messages.
SOURCES = {
    "cifar10": SourceType(
        lambda name, data_dir: Source(name, cifar10.locate(data_dir)),
        lambda source, side: cifar10.load(source.directory),
    ),
    "synthetic": SourceType(lambda name, data_dir: Source(name), lambda source, side: synthetic.load()),
    FOLDER: SourceType(_locate_folder, lambda source, side: folder.load(source.folder, side)),
}
TFDS = SourceType(  # every other name
    lambda name, data_dir: Source(name, tfds_source.locate(name, data_dir)),
    lambda source, side: tfds_source.load(source.name, source.directory, side),
)


def find(dataset: str, data_dir: str = "") -> Source:
    """Locate a data set: a name in `SOURCES`, `auto`, `folder:<path>`, or one of TFDS, whose directory is `data_dir`.

    Raises:
      DataError: CIFAR-10 or the folder cannot be read.
      UsageError: there is no such data set, or `data_dir` is no place for one.
    """
    check_dataset(dataset)
    _check_no_pictures(data_dir)
    if dataset != "auto":
        return _source_type(dataset).locate(dataset, data_dir)
    try:
        return find("cifar10", data_dir)
    except DataError as error:
        return _synthetic_fallback(error)


def load(
    source: Source, validation_examples: int = 0, side: int = CIFAR10.side, fall_back: bool = False
) -> tuple[Source, Dataset]:
    """The arrays of a data set, in images of side x side pixels, and the source they were loaded from.

    With `fall_back` the synthetic set replaces a CIFAR-10 that cannot be downloaded; a damaged copy is still an error.

    Raises:
      DataError: the data cannot be read or are damaged. UsageError: too many examples are held out, or there is no such
        data set.
    """
    try:
        train, test = _source_type(source.name).load(source, side)
    except DataError as error:
        if not fall_back or source.name != "cifar10" or cifar10.is_prepared(source.directory):
            raise
        source = _synthetic_fallback(error)
        train, test = synthetic.load()
    if source.name != "cifar10":  # which logs this itself
        for name, split in (("train", train), ("test", test)):
            summary = f"{len(split.labels)} images of {len(split.info.class_names)} classes, sha256 {split.digest[:16]}"
            log.info("%s %s: %s", printable(source.name), name, summary)
    if train.info.side != side:
        train, test = (_resized(split, side) for split in (train, test))
    if validation_examples >= len(train.labels):
        raise UsageError(f"validation_examples={validation_examples} leaves none of {len(train.labels)} to train on")
    train, validation = split_validation(train, validation_examples)
    return source, Dataset(source.name, train, validation, test)


def _check_no_pictures(data_dir: str) -> None:
    if data_dir and folder.holds_pictures(tfds_source.tfds_directory(data_dir)):
        raise UsageError(
            f"data_dir={data_dir} holds pictures, not prepared data sets; to train on them write "
            f"--dataset={FOLDER}{data_dir} instead"
        )


def _synthetic_fallback(reason: DataError) -> Source:
    banner = f"SYNTHETIC DATA, NOT CIFAR-10: accuracies of this run say nothing about CIFAR-10. Reason: {reason}"
    return Source("synthetic", banner=banner)


def _source_type(name: str) -> SourceType:
    return SOURCES.get(FOLDER if name.startswith(FOLDER) else name, TFDS)


def _resized(split: Split, side: int) -> Split:
    return Split(image_files.resize_all(split.images, side), split.labels, split.info._replace(side=side))
