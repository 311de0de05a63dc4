"""Data sets of the user's: a folder of pictures by class, a table (CSV) of pictures, or a file
of arrays (.npz).
"""

import csv
import functools
import hashlib
import os
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.dataset import (
    SPLITS,
    DatasetInfo,
    Split,
    fifth_of_each_class,
    log_line,
    moments,
)
from cifar_towers.errors import DataError, count, error_text, listed, printable
from cifar_towers.registry import CSV, FOLDER, NPZ


class ArrayRow(NamedTuple):
    """An image in an array of the user's."""

    row: int
    levels: np.ndarray


# n files or rows of arrays, and their classes [n] int64
Examples: TypeAlias = tuple[Sequence[Any], np.ndarray]
# names of the classes, and the splits
Scanned: TypeAlias = tuple[tuple[str, ...], dict[str, Examples]]

LAYOUT = (
    "pictures must be <class>/*, or train/<class>/*, test/<class>/* and, if there are any, "
    "validation/<class>/*"
)
COLUMNS = (
    "the columns of the first line must be file,label or file,label,split, with commas, in UTF-8"
)
ROWS = (
    "each row must have a value for each column, a file that no other row has, and the split "
    "train, validation or test"
)
ARRAYS = (
    "the arrays must be x_train and y_train, and may be x_test, y_test, x_validation, y_validation "
    "and class_names"
)
IMAGES = "images must be uint8, (n, size, size, 3) or (n, size, size), with levels from 0 to 255"
LABELS = "labels must be whole numbers, (n,), from 0 to the number of classes - 1"


def locate(prefix: str, root: Path) -> Callable[[int, Sequence[str]], dict[str, Split]]:
    """List the examples of a data set, in the order of their hashes, and read arrays, but no
    pictures.

    In this order the first examples are a random sample of the split. If there is no test split, a
    fifth of each class becomes the test split.

    Args:
      prefix: the layout of the data, a key of `SCANS`.

    Returns:
      A function (image size, names of splits) -> the named splits that exist. Their mean and
      deviation are computed from the first of them, which is train if train is read.

    Raises:
      DataError: the data cannot be read or have another layout, a split is empty, or a class has no
        training images.
    """
    try:
        class_names, scanned = SCANS[prefix](root)
        splits = {name: _sort(*scanned[name], root) for name in SPLITS if name in scanned}
        for name, (items, _) in splits.items():
            if not len(items):
                raise ValueError(f"{name} has no images")
        if "train" in splits and "test" not in splits:
            log_line(f"{prefix}{root}: no test split, so a fifth of each class is held out as test")
            splits["train"], splits["test"] = _hold_out(*splits["train"])
        if "train" in splits:
            _check_every_class_is_trained(class_names, splits["train"])
    except FileNotFoundError as error:
        raise DataError(
            f"dataset={prefix}{root}: {error}; give --dataset={prefix}<path> with its present path"
        ) from error
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"dataset={prefix}{root}: {error}") from error
    return functools.partial(_read_splits, class_names, splits)


def _check_every_class_is_trained(class_names: tuple[str, ...], train: Examples) -> None:
    """Raise ValueError if a class has no training images."""
    _, labels = train
    counts = np.bincount(labels, minlength=len(class_names))
    missing = [class_names[label] for label in np.flatnonzero(counts == 0)]
    if missing:
        raise ValueError(f"there are no images of {listed(missing)} to train on")


def _read_splits(
    class_names: tuple[str, ...],
    splits: Mapping[str, Examples],
    image_size: int,
    names: Sequence[str],
) -> dict[str, Split]:
    """Return the named splits that exist, in images of this size."""
    found = {name: split for name, split in splits.items() if name in names}
    if not found:
        return {}

    images = {name: _read(items, image_size) for name, (items, _) in found.items()}
    first = next(iter(images.values()))
    info = DatasetInfo(class_names, image_size, *moments(first))

    read_splits = {}
    for name, (items, labels) in found.items():
        item_names = np.array([_name(item) for item in items])
        read_splits[name] = Split(images[name], labels, info, item_names)
    return read_splits


def _sort(items: Sequence[Any], labels: np.ndarray, root: Path) -> Examples:
    """Sort examples by hashes that stay the same when the data are moved."""
    hashes = [_hash(item, root) for item in items]
    return _take(items, labels, sorted(range(len(items)), key=hashes.__getitem__))


def _name(item: Path | ArrayRow) -> str:
    """Return what an image is called: its folder and file, or its row in the array."""
    if isinstance(item, ArrayRow):
        return f"row {item.row}"
    return printable(f"{item.parent.name}/{item.name}")


def _hash(item: Path | ArrayRow, root: Path) -> bytes:
    if isinstance(item, ArrayRow):
        return hashlib.sha256(item.levels.tobytes()).digest()
    # the folder of a table may be renamed
    folder = "" if item.parent == root.parent else item.parent.name
    return hashlib.sha256(os.fsencode(f"{folder}/{item.name}")).digest()


def _take(items: Sequence[Any], labels: np.ndarray, places: Sequence[int] | np.ndarray) -> Examples:
    return [items[place] for place in places], labels[np.array(places, np.int64)]


def _hold_out(items: Sequence[Any], labels: np.ndarray) -> tuple[Examples, Examples]:
    """Return (train, test), where test has the first fifth of each class."""
    is_held_out = fifth_of_each_class(labels)
    train = _take(items, labels, np.flatnonzero(~is_held_out))
    return train, _take(items, labels, np.flatnonzero(is_held_out))


def _read(items: Sequence[Any], image_size: int) -> np.ndarray:
    """Return the images of files or of arrays: [n, image_size, image_size, 3] uint8."""
    if isinstance(items[0], Path):
        return image_files.read_all(items, image_size)
    levels = np.stack([row.levels for row in items])
    colored = levels if levels.ndim == 4 else np.repeat(levels[..., None], 3, axis=3)
    return image_files.resize_all(colored, image_size)


# The three layouts --------------------------------------------------------------------------------


def _scan_folder(root: Path) -> Scanned:
    """List the pictures `<root>/<class>/*`, or `<root>/<split>/<class>/*` if a folder has the name
    of a split.
    """
    folders, others = _list_entries(root)
    split_folders = {folder.name: folder for folder in folders if folder.name in SPLITS}
    beside = [folder.name for folder in folders if folder.name not in SPLITS]
    if split_folders and beside:
        raise ValueError(f"{listed(beside)} stands beside train, validation or test; {LAYOUT}")
    if not split_folders:
        split_folders = {"train": root}

    files: dict[str, dict[Path, str]] = {}
    classes: dict[str, list[str]] = {}
    left_out = {*others}
    for split, split_folder in split_folders.items():
        class_folders, others = _list_entries(split_folder)
        left_out |= {*others}
        classes[split] = [folder.name for folder in class_folders]
        files[split] = {}
        for folder in class_folders:
            deeper, entries = _list_entries(folder)
            if deeper:
                raise ValueError(f"{deeper[0]} is a folder inside a class; {LAYOUT}")
            pictures = [path for path in entries if image_files.is_picture(path)]
            left_out |= {*entries}.difference(pictures)
            files[split] |= dict.fromkeys(pictures, folder.name)

    if left_out:
        why = "hidden, not pictures, or outside the folder of a class"
        log_line(f"folder:{root}: {count(len(left_out), 'file')} ignored: {why}")
    return _number_classes(files, classes)


def _list_entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the visible subfolders of a folder, sorted, and its other entries."""
    folders: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            folders.append(path)
        else:
            others.append(path)
    return folders, others


def _scan_table(table: Path) -> Scanned:
    """List the pictures of a table with the columns `file`, `label` and perhaps `split`; files are
    relative to it.
    """
    files: dict[str, dict[Path, str]] = {}
    with table.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        columns = rows.fieldnames or []
        if sorted(columns) not in (["file", "label"], ["file", "label", "split"]):
            raise ValueError(f"its columns are {', '.join(columns)}; {COLUMNS}")
        for row in rows:
            cells = {name: (row[name] or "").strip() for name in columns}
            path = table.parent / cells["file"]
            split = cells.get("split", "train")

            is_listed = any(path in split_files for split_files in files.values())
            has_break = any("\n" in cell for cell in cells.values())  # a quote that was not closed
            is_complete = None not in row and all(cells.values()) and not has_break
            if not is_complete or split not in SPLITS or is_listed:
                raise ValueError(f"line {rows.line_num} is {','.join(cells.values())}; {ROWS}")
            files.setdefault(split, {})[path] = cells["label"]

    classes = {split: {*labels.values()} for split, labels in files.items()}
    return _number_classes(files, classes)


def _number_classes(
    files: Mapping[str, Mapping[Path, str]], classes: Mapping[str, Collection[str]]
) -> Scanned:
    """Return the sorted names of the classes, those of train if there is one, and the files with
    their numbers.

    Args:
      files: split -> file -> name of its class.
      classes: split -> names of its classes, also of those without files.
    """
    known = classes.get("train") or set().union(*classes.values())
    class_names = tuple(sorted({_composed(name) for name in known}))
    for split, names in classes.items():
        unknown = sorted({_composed(name) for name in names}.difference(class_names))
        if unknown:
            raise ValueError(
                f"{split} has classes that train lacks: {listed(unknown)}; train has "
                f"{listed(class_names)}"
            )

    numbers = {name: number for number, name in enumerate(class_names)}
    splits: dict[str, Examples] = {}
    for split, labels in files.items():
        classes_of_files = [numbers[_composed(name)] for name in labels.values()]
        splits[split] = [*labels], np.array(classes_of_files, np.int64)
    return class_names, splits


def _composed(name: str) -> str:
    """Return a class name in Unicode's composed form; file systems and editors use either form."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the class {name!r} is not UTF-8") from None
    return unicodedata.normalize("NFC", name)


def _scan_arrays(path: Path) -> Scanned:
    """Read the arrays of a file. Without `class_names`, the names of the classes are their
    numbers.
    """
    arrays = _load_arrays(path)
    names = arrays.pop("class_names", None)
    present = [split for split in SPLITS if f"x_{split}" in arrays]
    wanted = [f"x_{split}" for split in present] + [f"y_{split}" for split in present]
    if not present or {*arrays} != {*wanted}:
        raise ValueError(f"its arrays are {listed([*arrays], 10)}; {ARRAYS}")

    splits: dict[str, Examples] = {}
    for split in present:
        images = arrays[f"x_{split}"]
        labels = arrays[f"y_{split}"]
        _check_arrays(split, images, labels)
        if names is None:
            names = np.arange(int(labels.max()) + 1)
        if labels.min() < 0 or labels.max() >= len(names):
            raise ValueError(
                f"y_{split} has labels from {labels.min()} to {labels.max()}, and there are "
                f"{len(names)} classes; {LABELS}"
            )

        rows = [ArrayRow(index, levels) for index, levels in enumerate(images)]
        splits[split] = rows, labels.astype(np.int64)

    assert names is not None  # as there is a split
    if names.dtype.kind not in "Uiu":
        raise ValueError(f"class_names is {names.dtype}; names must be text")
    if len({*names.tolist()}) < len(names):
        raise ValueError("class_names has a name twice")
    return tuple(map(str, names.tolist())), splits


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is not an .npz file, as numpy.savez writes it")
        try:
            with np.load(file, allow_pickle=False) as saved:
                return {name: saved[name] for name in saved.files}
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"it is damaged ({error_text(error)})") from error


def _check_arrays(split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError unless the arrays of a split are square images, and a label of each."""
    is_square = images.ndim in (3, 4) and images.shape[1] == images.shape[2]
    has_colors = images.shape[3:] in ((), (3,))
    # levels up to 1 are those of floats that were cast
    is_image = images.dtype == np.uint8 and is_square and has_colors and images.max() >= 2
    if not is_image:
        raise ValueError(
            f"x_{split} is {images.dtype} {images.shape} with values up to {images.max()}; {IMAGES}"
        )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise ValueError(f"y_{split} is {labels.dtype} {labels.shape}; {LABELS}")


SCANS = {FOLDER: _scan_folder, CSV: _scan_table, NPZ: _scan_arrays}
