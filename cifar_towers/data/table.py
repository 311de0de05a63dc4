"""A data set of the user's own: a table (CSV) of image files and their classes."""

import contextlib
import csv
import functools
import os
from collections.abc import Callable, Set
from pathlib import Path

from cifar_towers.data import image_files
from cifar_towers.data.folder import of_files
from cifar_towers.data.own_data import ALL, OwnData
from cifar_towers.errors import listed
from cifar_towers.registry import SPLIT_NAMES

COLUMNS = {  # names of columns in the first line, in upper or lower case
    "file": ("file", "path", "filename", "file_name", "filepath", "image", "image_path", "image_id", "id"),
    "label": ("label", "class", "category", "target", "class_name"),
    "split": ("split", "subset", "set"),
}
PLACES = ("", "train", "images", "train_images")  # folders beside the table where its files may be
MAX_LISTED = 3  # wrong rows in one error message


def scan(table: Path) -> OwnData:
    """List the images of a table by class. The classes are in the order of numbers if they are numbers.

    Raises:
      OSError, ValueError: the table cannot be read or has no header, has rows without an image, a class or a split, has
        fewer than two classes, or has a class without images to train or test on.
    """
    examples: dict[str, dict[Path, str]] = {}
    splits = SPLIT_NAMES | {ALL: (ALL,)}
    wrong: list[str] = []
    with table.open(encoding="utf-8-sig", newline="") as lines:
        columns, delimiter = _read_header(lines.readline())
        rows = csv.reader(lines, delimiter=delimiter)
        files: set[Path | None] = set()
        list_names = functools.cache(_list_names)  # to look a file up costs much on some file systems
        for row in filter(any, rows):
            cells = {name: row[index].strip() if index < len(row) else "" for name, index in columns.items()}
            path = _find_image(table.parent, cells["file"], list_names)
            name = cells.get("split", ALL)
            split = next((split for split, known in splits.items() if name.lower() in known), "")
            problems = {
                f"no file {cells['file']}": not path,
                f"{cells['file']} is listed twice": path in files,
                "no class": not cells["label"],
                f"no split {name}": not split,
            }
            if problem := next((text for text, is_wrong in problems.items() if is_wrong), ""):
                wrong.append(f"line {rows.line_num + 1} ({problem})")
            elif path:
                files.add(path)
                examples.setdefault(split, {})[path] = cells["label"]
    if wrong:
        hint = f"correct or remove them; files are looked for in {table.parent}"
        raise ValueError(f"wrong rows ({len(wrong)}): {listed(wrong, MAX_LISTED)}; {hint}")
    found = {label for labels in examples.values() for label in labels.values()}
    are_numbers = all(name.isdecimal() for name in found)
    return of_files(examples, sorted(found, key=lambda name: (int(name) if are_numbers else 0, name)))


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
