"""Image classification data sets of TensorFlow Datasets (TFDS)."""

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from cifar_towers.data import image_files
from cifar_towers.data.dataset import CLASSES, DatasetInfo, Split, moments
from cifar_towers.errors import DataError, error_line

log = logging.getLogger(__name__)

Builder: TypeAlias = Any  # tfds.core.DatasetBuilder; importing TFDS takes seconds
UNNAMED = (
    "cifar10_1",
    "cifar10_corrupted",
)  # builders that number CIFAR-10's classes and do not name them


def tfds_directory(data_dir: str = "") -> Path:
    """Return the directory of TFDS's data sets: `data_dir`, `TFDS_DATA_DIR` or
    `~/tensorflow_datasets`.
    """
    return Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def import_tfds() -> ModuleType:
    """Import TFDS, which takes seconds and reads TFDS_DATA_DIR. Switch its progress bars and log
    lines off.
    """
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    logging.getLogger("absl").setLevel(logging.ERROR)
    return tfds


def make_builder(name: str, directory: Path) -> Builder:
    """Make TFDS's builder of a data set, from the description in the prepared copy if there is one.

    Raises:
      DataError: TFDS has no such data set, or its description is damaged.
    """
    try:
        return import_tfds().builder(name, data_dir=str(directory))
    except Exception as error:
        reason = next(
            iter(str(error).splitlines()), type(error).__name__
        )  # TFDS lists all names below
        raise DataError(f"dataset={name} with data_dir={directory}: {reason}") from error


def load(name: str, directory: Path, image_size: int, wanted: Sequence[str]) -> dict[str, Split]:
    """Return those of train and test that are wanted and exist, each image's central square resized
    to `image_size`.

    The test split is `test`; `validation`, if there is no test; otherwise the last fifth of
    `train`.

    Raises:
      DataError: the data set cannot be downloaded or read, or is not images with one class each.
    """
    tfds, builder = import_tfds(), make_builder(name, directory)
    try:
        image, label = (
            _find_feature(builder.info, kind)
            for kind in (tfds.features.Image, tfds.features.ClassLabel)
        )
        if not builder.is_prepared():
            log.info("preparing %s in %s", name, directory)
            builder.download_and_prepare()
        parts = {
            part: split
            for part, split in _split_names(builder.info.splits).items()
            if part in wanted
        }
        splits = {
            part: _read(builder, split, image, label, image_size) for part, split in parts.items()
        }
    except Exception as error:
        raise DataError(
            f"dataset={name} in {directory} cannot be read ({error_line(error)})"
        ) from error
    if parts.get("test", "test") != "test":
        log.info("dataset=%s: its %s is used as the test split", name, parts["test"])
    if splits:
        class_names = (
            CLASSES if builder.name in UNNAMED else tuple(builder.info.features[label].names)
        )
        info = DatasetInfo(class_names, image_size, *moments(next(iter(splits.values())).images))
        splits = {part: dataclasses.replace(split, info=info) for part, split in splits.items()}
    return splits


def _find_feature(info: Any, kind: type) -> str:
    """Return the name of the supervised feature of this kind, or else of the only feature of this
    kind.
    """
    names = [name for name, feature in info.features.items() if isinstance(feature, kind)]
    names = [name for name in info.supervised_keys or () if name in names] or names
    if len(names) != 1:
        raise DataError(
            "images with one class each are needed, and its features are "
            f"{', '.join(info.features)}"
        )
    return names[0]


def _split_names(splits: Iterable[str]) -> dict[str, str]:
    """Return the names of TFDS's splits for `train` and `test`, or for `test` alone, as `load`
    chooses them.
    """
    test = next((split for split in ("test", "validation") if split in splits), None)
    if "train" in splits:
        return (
            {"train": "train", "test": test}
            if test
            else {"train": "train[:80%]", "test": "train[80%:]"}
        )
    return {"test": test} if test else {}


def _read(builder: Builder, split: str, image: str, label: str, image_size: int) -> Split:
    """Return a split of a prepared data set, in the order in which it is stored."""
    tfds = import_tfds()
    config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    images, labels = [], []
    for example in tfds.as_numpy(
        builder.as_dataset(split=split, shuffle_files=False, read_config=config)
    ):
        levels = example[image]
        picture = Image.fromarray(levels.squeeze(-1) if levels.shape[-1] == 1 else levels)
        images.append(image_files.to_levels(picture, image_size))
        labels.append(example[label])
    return Split(np.stack(images), np.array(labels, np.int64))
