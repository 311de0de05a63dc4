"""Which data set a run gets: CIFAR-10, the synthetic set, or CIFAR-10 if at all possible."""

import logging
from pathlib import Path
from typing import NamedTuple

from cifar_towers.data import cifar10, synthetic
from cifar_towers.data.dataset import CLASSES, Dataset, hold_out
from cifar_towers.errors import DataError, UsageError

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where a data set will come from, found before anything slow is started."""

    name: str  # "cifar10" or "synthetic"
    directory: Path | None
    banner: str = ""  # what the user must know of the choice


def find(dataset: str, data_dir: str = "") -> Source:
    """Decides on the source within seconds.

    Args:
      dataset: `cifar10`, `synthetic`, or `auto`.
      data_dir: TFDS's directory, for CIFAR-10.

    Raises:
      DataError: `cifar10` was asked for and cannot be had.
    """
    if dataset == "synthetic":
        return Source("synthetic", None)
    try:
        return Source("cifar10", cifar10.locate(data_dir))
    except DataError as error:
        if dataset == "cifar10":
            raise
        return _stand_in(error)


def load(source: Source, validation_examples: int = 0, fall_back: bool = False) -> tuple[Source, Dataset]:
    """The arrays of a source, and the source they really came from.

    `fall_back` lets the synthetic set stand in where CIFAR-10 cannot be downloaded after all.

    Raises:
      DataError: the data cannot be read or is damaged. UsageError: too many examples are held out.
    """
    class_names = CLASSES
    if source.name == "cifar10":
        try:
            train, test = cifar10.load(source.directory)
        except DataError as error:
            if not fall_back or cifar10.is_prepared(source.directory):  # a damaged copy is never papered over
                raise
            source = _stand_in(error)
    if source.name == "synthetic":
        train, test = synthetic.load()
        class_names = synthetic.CLASSES
        for name, split in (("train", train), ("test", test)):
            log.info("synthetic %s: %d images, sha256 %s", name, len(split.labels), split.digest[:16])
    if validation_examples >= len(train.labels):
        raise UsageError(f"validation_examples={validation_examples} leaves none of {len(train.labels)} to train on")
    kept, held = hold_out(train, validation_examples)
    return source, Dataset(source.name, kept, held, test, class_names)


def _stand_in(reason: DataError) -> Source:
    return Source(
        "synthetic",
        None,
        f"SYNTHETIC DATA, NOT CIFAR-10: accuracies of this run say nothing about CIFAR-10. Reason: {reason}",
    )
