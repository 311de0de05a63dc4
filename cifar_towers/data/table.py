"""A data set of the user's own: a table (CSV) of image files and their classes."""

import contextlib
import csv
import functools
import os
from collections.abc import Callable, Set
from pathlib import Path

from cifar_towers.data import image_files
from cifar_towers.data.folder import SPLIT_NAMES, Folder, hash_name, hold_out
from cifar_towers.errors import DataError, error_text, listed

COLUMNS = {  # names of columns in the first line, in upper or lower case
    "file": ("file", "path", "filename", "file_name", "filepath", "image", "image_path", "image_id", "id"),
    "label": ("label", "class", "category", "target", "class_name"),
    "split": ("split", "subset", "set"),
}
PLACES = ("", "train", "images", "train_images")  # folders beside the table where its files may be
MAX_LISTED = 3  # wrong rows in one error message


def scan(table: Path) -> Folder:
    """List the images of a table by class. Without a column of splits, a fifth of each class becomes the test split.

    Raises:
      DataError: the table cannot be read or has no header, has rows without an image, a class or a split, has fewer
        than two classes, or has a class without images to train or test on.
    """
    splits: dict[str, dict[str, list[Path]]] = {}
    wrong: list[str] = []
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            columns, delimiter = _read_header(lines.readline())
            rows = csv.reader(lines, delimiter=delimiter)
            files: set[Path | None] = set()
            list_names = functools.cache(_list_names)  # to look a file up costs much on some file systems
            for row in filter(any, rows):
                cells = {name: row[index].strip() if index < len(row) else "" for name, index in columns.items()}
                path, split = _find_image(table.parent, cells["file"], list_names), cells.get("split", "train")
                names = [name for name, spellings in SPLIT_NAMES.items() if split.lower() in spellings]
                problems = {
                    f"no file {cells['file']}": not path,
                    f"{cells['file']} is listed twice": path in files,
                    "no class": not cells["label"],
                    f"no split {split}": not names,
                }
                if problem := next((text for text, is_wrong in problems.items() if is_wrong), ""):
                    wrong.append(f"line {rows.line_num + 1} ({problem})")
                elif path:
                    files.add(path)
                    splits.setdefault(names[0], {}).setdefault(cells["label"], []).append(path)
    except (OSError, ValueError, csv.Error) as error:
        is_encoding = isinstance(error, UnicodeDecodeError)
        reason = "it is not in UTF-8; save it as UTF-8" if is_encoding else error_text(error, 300)
        raise DataError(f"dataset=csv:{table} cannot be read: {reason}") from error
    if wrong:
        hint = f"correct or remove them; files are looked for in {table.parent}"
        raise DataError(f"dataset=csv:{table}: wrong rows ({len(wrong)}): {listed(wrong, MAX_LISTED)}; {hint}")
    if "split" not in columns:
        halves = {name: hold_out(paths, hash_name) for name, paths in splits.get("train", {}).items()}
        splits = {split: {name: half[i] for name, half in halves.items()} for i, split in enumerate(("train", "test"))}
    return _sort_classes(table, splits, "split" not in columns)


def _read_header(line: str) -> tuple[dict[str, int], str]:
    """Return the indices of the columns, by the names in `COLUMNS`, and the character between columns."""
    for delimiter in ",;\t":
        names = [name.strip().lower() for name in next(csv.reader([line], delimiter=delimiter), [])]
        known = {column: [name for name in spellings if name in names] for column, spellings in COLUMNS.items()}
        columns = {column: names.index(found[0]) for column, found in known.items() if found}
        if {"file", "label"} <= columns.keys():
            return columns, delimiter
    needed = " and ".join(f"a column {' or '.join(COLUMNS[column])}" for column in ("file", "label"))
    raise ValueError(f"its first line, {line.strip()[:40]}, must name {needed}; put file,label above the rows")


def _find_image(root: Path, name: str, list_names: Callable[[str], Set[str]]) -> Path | None:
    """Return the path of a file that a table names, with or without its suffix; None if there is no such file."""
    suffixes = ("",) if name.lower().endswith(image_files.SUFFIXES) else image_files.SUFFIXES
    for place in PLACES:
        folder, stem = os.path.split(os.path.join(root, place, name.replace("\\", "/")))
        if suffix := [suffix for suffix in suffixes if stem + suffix in list_names(folder)]:
            return Path(folder, stem + suffix[0])
    return None


def _list_names(folder: str) -> Set[str]:
    """Return the names in a folder, or none if it cannot be listed."""
    with contextlib.suppress(OSError, ValueError):
        return {*os.listdir(folder)}
    return set()


def _sort_classes(table: Path, splits: dict[str, dict[str, list[Path]]], is_undivided: bool) -> Folder:
    """Return the files of a table with its classes in one order, that of the numbers if they are numbers."""
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    found = {name for classes in splits.values() for name in classes}
    are_numbers = all(name.isdecimal() for name in found)
    names = sorted(found, key=lambda name: (int(name) if are_numbers else 0, name))
    required = ("train", "test") if "train" in splits else ("test",)
    if len(names) < len(required):
        raise DataError(f"dataset=csv:{table}: at least two classes are needed, and there is {listed(names) or 'none'}")
    for split in required:
        if empty := [name for name in names if not splits.get(split, {}).get(name)]:
            raise DataError(f"dataset=csv:{table}: no rows of {listed(empty)} to {split} on; add some for every class")
    train, validation, test = (
        {name: sorted(splits[split][name]) for name in names if name in splits[split]} if split in splits else {}
        for split in SPLIT_NAMES
    )
    return Folder(table, train, test, (table,) if is_undivided else (), validation)
