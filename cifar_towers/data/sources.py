"""Data sets by name: CIFAR-10, the synthetic set, images in files of your own, or any of TensorFlow Datasets (TFDS)."""

import csv
import functools
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers.data import arrays, cifar10, folder, image_files, own_data, synthetic, table, tfds_source
from cifar_towers.data.dataset import CIFAR10, Dataset, Split, split_validation
from cifar_towers.data.own_data import ALL, SPLITS, OwnData
from cifar_towers.errors import DataError, UsageError, error_text, listed, printable
from cifar_towers.registry import CSV, FOLDER, NPY, check_dataset, split_path, suggest_data

log = logging.getLogger(__name__)

TRAINED = ("train", "test")  # the splits that a run needs


class Source(NamedTuple):
    """A data set that has been located, before anything slow starts."""

    name: str  # as in `--dataset`, but never "auto"
    read: Callable[[int, Sequence[str]], Mapping[str, Split]]  # (image size, split names) -> splits in any size
    directory: Path | None = None
    banner: str = ""  # warning that synthetic data replace CIFAR-10; otherwise empty
    class_roots: tuple[Path, ...] = ()  # folders in `directory` whose subfolders are classes
    how_to_score_all: str = ""  # advice for data without splits: how to make all images the test split
    corruptions: tuple[str, ...] = ()  # names of the splits of corrupted test images, as fog_3
    has_validation: bool = False  # whether there is a validation split that `load` uses if none are held out

    def is_among_pictures(self, path: Path) -> bool:
        """Return whether files written to `path` would be among the pictures or taken for a class."""
        path = path.resolve()
        is_inside = any(path.is_relative_to(root.resolve()) for root in self.class_roots)
        return is_inside or bool(self.class_roots and self.directory and path == self.directory.resolve())


def find(dataset: str, data_dir: str = "") -> Source:
    """Locate a data set, within seconds and without TensorFlow.

    Args:
      dataset: a name in `SOURCES`, a path with a prefix in `SOURCES`, `auto`, or the name of a TFDS data set.

    Raises:
      DataError: CIFAR-10, or what is at the path, cannot be read.
      UsageError: there is no such data set, or `data_dir` is no place for one or would not be read.
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

    The validation split is the source's own, unless `validation_examples` are held out of train.

    Args:
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
        if source.name != "cifar10":  # whose module logs this itself
            classes = zip(split.info.class_names, split.class_counts(), strict=True)
            by_class = listed([f"{class_name} {count}" for class_name, count in classes], 10)
            summary = f"{len(split.labels)} images ({by_class}), sha256 {split.digest[:16]}"
            log.info("%s", printable(f"{source.name} {name}: {summary}"))
        if split.info.image_size != image_size:
            images = image_files.resize_all(split.images, image_size)
            splits[name] = Split(images, split.labels, split.info._replace(image_size=image_size), split.votes)
    return splits


def count_copies(split: Split, train: Split) -> int:
    """Return the number of images of a split that are copies of training images."""
    row = train.images.shape[1] // 2
    rows = {image[row].tobytes() for image in split.images}  # seconds faster than to hash all of each training image
    trained_on = {hash(image.tobytes()) for image in train.images if image[row].tobytes() in rows}
    return sum(hash(image.tobytes()) in trained_on for image in split.images) if trained_on else 0


def is_local(dataset: str) -> bool:
    """Return whether a data set is read without TFDS, which may download."""
    return dataset == "synthetic" or bool(split_path(dataset)[0]) or (dataset == "cifar10" and cifar10.is_cached())


def _locate_cifar10(name: str, data_dir: str) -> Source:
    directory = cifar10.locate(data_dir)
    return Source(name, lambda image_size, names: cifar10.load(directory, names, bool(data_dir)), directory)


def _refuse_data_dir(data_dir: str, prefix: str, path: str) -> None:
    if data_dir:
        guess = suggest_data(os.path.join(data_dir, path), f"{prefix}{path}") if prefix else ""
        raise UsageError(f"data_dir={data_dir} is not read with dataset={prefix}{path}: {guess}leave data_dir out")


def _locate_synthetic(name: str, data_dir: str, banner: str = "") -> Source:
    _refuse_data_dir(data_dir, "", name)
    return Source(name, lambda image_size, names: dict(zip(TRAINED, synthetic.load(), strict=True)), banner=banner)


def _locate_own(name: str, data_dir: str) -> Source:
    prefix, path = split_path(name)
    scan, how_to_score_all = OWN_DATA[prefix]
    root = Path(os.path.expanduser(path)).absolute()
    name = f"{prefix}{root}"
    if prefix == NPY and os.path.isfile(votes := root / "cifar10h-probs.npy"):
        own = _locate_cifar10("cifar10", data_dir)
        return own._replace(name=name, read=lambda *wanted: cifar10.add_votes(own.read(*wanted)["test"], votes))
    _refuse_data_dir(data_dir, prefix, path)
    try:
        data = scan(root)
        if not_utf8 := [text for text in (*data.class_names, name) if text != text.encode(errors="ignore").decode()]:
            raise ValueError(f"{listed(not_utf8)} is not valid UTF-8, which config.json needs; rename it")
    except UnicodeDecodeError as error:
        raise DataError(f"dataset={name} is not in UTF-8; save it as UTF-8 (Excel: CSV UTF-8)") from error
    except (OSError, ValueError, csv.Error) as error:
        problem = f"{error}"
        if isinstance(error, OSError):
            hint = f"if it was moved, give its place by --dataset={prefix}<path>"
            problem = f"{error.filename or root} cannot be read: {error_text(error)}; {hint}"
        raise DataError(f"dataset={name}: {suggest_data(f'{root}', name)}{problem}") from error
    undivided = how_to_score_all if ALL in data.splits else ""
    corrupted = tuple(name for name in data.splits if name not in (*SPLITS, ALL))
    read = functools.partial(own_data.load, data)
    return Source(name, read, root, "", data.class_roots, undivided, corrupted, "validation" in data.splits)


def _locate_tfds(name: str, data_dir: str) -> Source:
    directory = tfds_source.locate(name, data_dir)
    read = functools.partial(tfds_source.load, name, directory)
    return Source(name, read, directory, corruptions=tfds_source.match(name, directory))


# prefix before a path -> how to list the examples there, and `Source.how_to_score_all`
OWN_DATA: dict[str, tuple[Callable[[Path], OwnData], str]] = {
    FOLDER: (folder.scan, "move its folders into a folder test in it"),
    CSV: (table.scan, "add a column split with test in each row"),
    NPY: (arrays.scan, "call its arrays x_test and y_test"),
}

# How to locate a data set, by its name or by the prefix before a path: (name, data_dir) -> source. Every other name is
# one of TFDS. `registry.BUILT_IN` lists the same names for error messages.
SOURCES: dict[str, Callable[[str, str], Source]] = {
    "cifar10": _locate_cifar10,
    "synthetic": _locate_synthetic,
    **dict.fromkeys(OWN_DATA, _locate_own),
}


def _synthetic_fallback(reason: DataError) -> Source:
    banner = f"SYNTHETIC DATA, NOT CIFAR-10: accuracies of this run say nothing about CIFAR-10. Reason: {reason}"
    return _locate_synthetic("synthetic", "", banner)
