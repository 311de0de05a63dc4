"""A data set of the user's own: a table (CSV) of image files and their classes."""

import contextlib
import csv
import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cifar_towers.data import image_files
from cifar_towers.data.folder import of_files
from cifar_towers.data.own_data import ALL, OwnData
from cifar_towers.errors import did_you_mean, listed
from cifar_towers.registry import SPLIT_NAMES

COLUMNS = {  # names of columns in the first line, in upper or lower case
    "file": ("file", "path", "filename", "file_name", "filepath", "image", "image_path", "image_id", "id"),
    "label": ("label", "class", "category", "target", "class_name"),
    "split": ("split", "subset", "set"),
}
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
MAX_LISTED = 3  # wrong rows in one error message


def scan(table: Path) -> OwnData:
    """List the images of a table by class. Sort the classes as numbers if all are numbers, otherwise as text.

    Raises:
      OSError, ValueError: the table cannot be read or has no header, has rows without an image, a class or a split, has
        rows of more or fewer fields than the header, has fewer than two classes, or has a class without images to train
        or test on.
    """
    examples: dict[str, dict[Path, str]] = {}
    split_of = {name: split for split, names in (SPLIT_NAMES | {ALL: (ALL,)}).items() for name in names}
    seen: dict[Path, tuple[str, str]] = {}  # file -> its line and class
    wrong: list[str] = []
    hints: list[str] = []
    with table.open(encoding="utf-8-sig", newline="") as lines:
        columns, width, separator = _read_header(lines.readline())
        rows = csv.reader(lines, delimiter=separator)
        list_names = functools.cache(_list_names)  # to look a file up costs much on some file systems
        list_places = functools.cache(functools.partial(_list_places, table.parent))
        for row in filter(any, rows):
            line = f"line {rows.line_num + 1}"
            cells = {name: row[index].strip() if index < len(row) else "" for name, index in columns.items()}
            file, label, name = cells["file"], cells["label"], cells.get("split", ALL)
            split = split_of.get(name.lower())
            find = functools.partial(_find_image, table.parent, list_places(split or ALL), file, list_names)
            path = find()
            problem = hint = ""
            if "".join(row[width:]).strip() or (path and len(row) < width):
                problem = f"{len(row)} instead of {width} fields"
                hint = f"put a field that contains a {SEPARATORS[separator]} in quotes" if len(row) > width else ""
            elif not path and os.path.isfile(os.path.join(table.parent, file)):
                problem, hint = f"{file} is no image", f"images are {', '.join(image_files.SUFFIXES)}"
            elif not path:
                problem = f"no file {file}"
                if similar := find(str.lower):
                    hint = f"{similar.name} is there"
            elif path in seen:
                problem, (first_line, first_label) = f"{file} is listed twice", seen[path]
                hint = f"{first_line} says {first_label}, {line} {label}"
            elif not label:
                problem = "no class"
            elif not split:
                problem = f"no split {name}"
                hint = f"{did_you_mean(name.lower(), split_of)}splits are {', '.join(split_of)}"
            else:
                seen[path] = line, label
                examples.setdefault(split, {})[path] = label
                continue
            wrong.append(f"{line} ({problem})")
            hints.append(hint)
    if wrong:
        shown = dict.fromkeys(filter(None, hints[:MAX_LISTED]))
        where = f"correct or remove them; files are looked for in {table.parent}"
        raise ValueError("; ".join([f"wrong rows ({len(wrong)}): {listed(wrong, MAX_LISTED)}", *shown, where]))
    found = Counter(label for _, label in seen.values())
    once = [f"{label} in {line} ({path})" for path, (line, label) in seen.items() if found[label] == 1]
    are_numbers = all(name.isdecimal() for name in found)
    class_names = sorted(found, key=lambda name: (int(name) if are_numbers else 0, name))
    return of_files(table.parent, examples, class_names, f"the only rows are {listed(once)}" if once else "add another")


def _read_header(line: str) -> tuple[dict[str, int], int, str]:
    """Return the indices of the columns, by the names in `COLUMNS`, their number, and the character between columns."""
    headers = []
    for separator in [separator for separator in SEPARATORS if separator in line] or "|: ":
        header = line.rstrip().rstrip(separator)
        names = [name.strip().lower() for name in next(csv.reader([header], delimiter=separator), [])]
        known = {column: [name for name in spellings if name in names] for column, spellings in COLUMNS.items()}
        columns = {column: names.index(found[0]) for column, found in known.items() if found}
        if {"file", "label"} <= columns.keys():
            if separator not in SEPARATORS:
                raise ValueError(f"its columns are separated by {separator!r}; use a comma, semicolon or tab")
            return columns, len(names), separator
        headers.append((names, columns))
    names, columns = max(headers, key=lambda header: len(header[0]))
    missing = [column for column in ("file", "label") if column not in columns]
    needed = " and ".join(f"a column {' or '.join(COLUMNS[column])}" for column in missing)
    advice = "put file,label above the rows, or in the place of other names"
    if columns and (others := [name for index, name in enumerate(names) if index not in columns.values()]):
        advice = f"rename {' or '.join(others)} to {missing[0]}"
    raise ValueError(f"its first line, {line.strip()[:40]}, must name {needed}; {advice}")


def _list_places(root: Path, split: str) -> tuple[str, ...]:
    """Return where files of a split may be: the table's folder and some in it, of train if the split has none."""
    owner = "train" if split == ALL else split
    own = (*SPLIT_NAMES[owner], f"{owner}_images")
    if not any((root / name).is_dir() for name in own):
        own = ("train", "train_images")
    return "", *own[:-1], "images", own[-1]


def _find_image(
    root: Path,
    places: Sequence[str],
    name: str,
    list_names: Callable[..., Mapping[str, str]],
    fold: Callable[[str], str] = str,
) -> Path | None:
    """Return the path of a file that a table names, with or without suffix, or None. Compare names after `fold`."""
    suffixes = ("",) if name.lower().endswith(image_files.SUFFIXES) else image_files.SUFFIXES
    for place in places:
        folder, stem = os.path.split(os.path.join(root, place, name.replace("\\", "/")))
        names = list_names(folder, fold)
        if found := [names[key] for suffix in suffixes if (key := fold(stem + suffix)) in names]:
            return Path(folder, found[0])
    return None


def _list_names(folder: str, fold: Callable[[str], str]) -> Mapping[str, str]:
    """Return the names in a folder by their folded form, or none if it cannot be listed."""
    with contextlib.suppress(OSError, ValueError):
        return {fold(name): name for name in os.listdir(folder)}
    return {}
