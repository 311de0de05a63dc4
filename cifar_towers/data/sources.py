"""Which data set a run gets: CIFAR-10 or the synthetic set, TensorFlow Datasets' others, or a folder of pictures."""

import logging
from pathlib import Path
from typing import NamedTuple

from cifar_towers.data import cifar10, image_files, synthetic, tfds_source
from cifar_towers.data import folder as folders
from cifar_towers.data.dataset import CIFAR10, Dataset, Split, split_validation
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.registry import BUILT_IN, FOLDER

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where a data set will come from, found before anything slow is started."""

    name: str  # as `--dataset` has it, but never "auto"
    directory: Path | None
    banner: str = ""  # what the user must know of the choice
    folder: folders.Folder | None = None  # what was found in it, where it is one of pictures


def find(dataset: str, data_dir: str = "") -> Source:
    """Decides on the source within seconds.

    Args:
      dataset: `cifar10`, `synthetic`, `auto`, `folder:<path>`, or a name that TensorFlow Datasets knows.
      data_dir: TFDS's directory.

    Raises:
      DataError: CIFAR-10, or the folder, was asked for and cannot be had.
    """
    if dataset == "synthetic":
        return Source("synthetic", None)
    if dataset.startswith(FOLDER):
        folder = folders.find(Path(dataset.removeprefix(FOLDER)))
        return Source(f"{FOLDER}{folder.root}", folder.root, folder=folder)
    if dataset not in BUILT_IN:
        return Source(dataset, cifar10.tfds_directory(data_dir))
    try:
        return Source("cifar10", cifar10.locate(data_dir))
    except DataError as error:
        if dataset == "cifar10":
            raise
        return synthetic_fallback(error)


def load(
    source: Source, validation_examples: int = 0, side: int = CIFAR10.side, fall_back: bool = False
) -> tuple[Source, Dataset]:
    """The arrays of a source, in images of side x side pixels, and the source they really came from.

    `fall_back` lets the synthetic set stand in where CIFAR-10 cannot be downloaded after all.

    Raises:
      DataError: the data cannot be read or is damaged. UsageError: too many examples are held out, or there is no such
        data set.
    """
    if source.name == "cifar10":
        try:
            train, test = cifar10.load(source.directory)
        except DataError as error:
            if not fall_back or cifar10.is_prepared(source.directory):  # a damaged copy is never papered over
                raise
            source = synthetic_fallback(error)
    elif source.folder:
        train, test = folders.load(source.folder, side)
    elif source.name != "synthetic":
        train, test = tfds_source.load(source.name, source.directory, side)
    if source.name == "synthetic":
        train, test = synthetic.load()
    if source.name != "cifar10":
        for name, split in (("train", train), ("test", test)):
            told = f"{len(split.labels)} images of {len(split.info.class_names)} classes, sha256 {split.digest[:16]}"
            log.info("%s %s: %s", printable(source.name), name, told)
    train, test = (_resized(split, side) for split in (train, test))
    if validation_examples >= len(train.labels):
        raise UsageError(f"validation_examples={validation_examples} leaves none of {len(train.labels)} to train on")
    kept, held = split_validation(train, validation_examples)
    return source, Dataset(source.name, kept, held, test)


def _resized(split: Split, side: int) -> Split:
    if split.info.side == side:
        return split
    return Split(image_files.fit_all(split.images, side), split.labels, split.info._replace(side=side))


def synthetic_fallback(reason: DataError) -> Source:
    return Source(
        "synthetic",
        None,
        f"SYNTHETIC DATA, NOT CIFAR-10: accuracies of this run say nothing about CIFAR-10. Reason: {reason}",
    )
