"""Image classification data sets of TensorFlow Datasets (TFDS)."""

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.dataset import CLASSES, DatasetInfo, Split, fifth_of_each_class, moments
from cifar_towers.errors import DataError, error_line

log = logging.getLogger(__name__)

Builder: TypeAlias = Any  # tfds.core.DatasetBuilder; importing TFDS takes seconds
# builders that number CIFAR-10's classes and do not name them
UNNAMED = ("cifar10_1", "cifar10_corrupted")
BATCH_SIZE = 100  # images that TFDS hands over at once


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
        # TFDS lists all names below
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"dataset={name} with data_dir={directory}: {reason}") from error


def load(name: str, directory: Path, image_size: int, wanted: Sequence[str]) -> dict[str, Split]:
    """Return the wanted splits that exist, of train and test. Each image is its central square,
    resized to `image_size`.

    The test split is `test`; `validation`, if there is no test; otherwise a fifth of each class of
    `train`, the same in every run.

    Raises:
      DataError: the data set cannot be downloaded or read, or is not images with one class each.
    """
    tfds = import_tfds()
    builder = make_builder(name, directory)
    try:
        image = _find_feature(builder.info, tfds.features.Image)
        label = _find_feature(builder.info, tfds.features.ClassLabel)
        if not builder.is_prepared():
            log.info("downloading and preparing %s in %s", name, directory)
            builder.download_and_prepare()
        names = _split_names(builder.info.splits, wanted)
        splits = {}
        for part, split in names.items():
            splits[part] = _read(builder, split, image, label, image_size)
        if "test" in wanted and "test" not in names and "train" in splits:
            log.info(
                "dataset=%s: no test split, so a fifth of each class is held out as test", name
            )
            splits["train"], splits["test"] = hold_out(splits["train"])
            splits = {part: splits[part] for part in wanted if part in splits}
    except Exception as error:
        raise DataError(
            f"dataset={name} in {directory} cannot be read ({error_line(error)})"
        ) from error
    if names.get("test") == "validation":
        log.info("dataset=%s: its validation is used as the test split", name)
    if splits:
        class_names = tuple(builder.info.features[label].names)
        if builder.name in UNNAMED:
            class_names = CLASSES
        info = DatasetInfo(class_names, image_size, *moments(next(iter(splits.values())).images))
        splits = {part: dataclasses.replace(split, info=info) for part, split in splits.items()}
    return splits


def _find_feature(info: Any, feature_class: type) -> str:
    """Return the name of the supervised feature of this class, or else of the only such feature."""
    names = [name for name, feature in info.features.items() if isinstance(feature, feature_class)]
    supervised = [name for name in info.supervised_keys or () if name in names]
    if supervised:
        names = supervised
    if len(names) != 1:
        raise DataError(
            f"images with one class each are needed; its features are {', '.join(info.features)}"
        )
    return names[0]


def _split_names(splits: Iterable[str], wanted: Sequence[str]) -> dict[str, str]:
    """Return the names of TFDS's splits for those of `train` and `test` that are wanted, as `load`
    chooses them. Without a test split `train` is needed for it.
    """
    names = {}
    test = next((split for split in ("test", "validation") if split in splits), None)
    if "train" in splits and ("train" in wanted or not test):
        names["train"] = "train"
    if test and "test" in wanted:
        names["test"] = test
    return names


def hold_out(train: Split) -> tuple[Split, Split]:
    """Return (train, test), where test has a random fifth of each class, the same in every run."""
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(train.labels))
    is_held_out = fifth_of_each_class(train.labels[order])
    rest = np.sort(order[~is_held_out])
    return train.take(rest), train.take(np.sort(order[is_held_out]))


def _read(builder: Builder, split: str, image: str, label: str, image_size: int) -> Split:
    """Return a split of a prepared data set, in the order in which it is stored."""
    tfds = import_tfds()
    # images of several sizes do not fit into one batch
    has_one_size = None not in builder.info.features[image].shape
    dataset = builder.as_dataset(
        split=split,
        shuffle_files=False,
        read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
        batch_size=BATCH_SIZE if has_one_size else 1,
    )
    images = []
    labels = []
    for batch in tfds.as_numpy(dataset):
        images.append(image_files.resize_all(batch[image], image_size))
        labels.append(batch[label])

    all_labels = np.concatenate(labels).astype(np.int64)
    if all_labels.min() < 0:
        raise DataError(f"{split} has examples without a label, {all_labels.min()}")
    return Split(np.concatenate(images), all_labels)
