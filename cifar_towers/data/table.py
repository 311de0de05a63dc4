"""A data set of the user's own: a table (CSV) of image files and their classes."""

import csv
from pathlib import Path

from cifar_towers.data.own_data import SPLITS, OwnData, of_files

COLUMNS = "the columns of the first line must be file,label or file,label,split, with commas, in UTF-8"


def scan(table: Path) -> OwnData:
    """List the images of a table with the columns `file`, `label` and perhaps `split`; files are relative to the table.

    Raises:
      OSError, ValueError: the table cannot be read, has other columns, or a row lacks a value, has an unknown split or
        names a file again.
    """
    files: dict[str, dict[Path, str]] = {}
    seen: set[Path] = set()
    with table.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        columns = rows.fieldnames or []
        if sorted(columns) not in (["file", "label"], ["file", "label", "split"]):
            raise ValueError(f"its columns are {', '.join(columns)}; {COLUMNS}")
        for row in rows:
            cells = {name: (row[name] or "").strip() for name in columns}
            path, split = table.parent / cells["file"], cells.get("split", "train")
            problem = ""
            if None in row or not all(cells.values()):
                problem = f"must have a value for each of {','.join(columns)}"
            elif split not in SPLITS:
                problem = f"has the split {split}; splits are {', '.join(SPLITS)}"
            elif path in seen:
                problem = f"names {cells['file']} again"
            if problem:
                raise ValueError(f"line {rows.line_num} {problem}")
            seen.add(path)
            files.setdefault(split, {})[path] = cells["label"]
    return of_files(table.parent, files, {split: {*labels.values()} for split, labels in files.items()})
