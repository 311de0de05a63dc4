"""The records of a run in metrics.jsonl, and numbers as text. Imports neither NumPy nor
TensorFlow.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar_towers import files


class JsonlWriter:
    """The records in metrics.jsonl, one JSON object per line; an error of writing is logged
    once.
    """

    def __init__(self, train_dir: Path):
        self._path = train_dir / files.METRICS
        self._best_effort = files.BestEffortWrites(self._path)
        self._line_start = ""

    def keep(self, condition: Callable[[dict], bool]) -> None:
        """Remove all records that do not meet the condition, as when a run resumes."""
        with self._best_effort:
            kept = [record for record in read_records(self._path) if condition(record)]
            files.write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record) -> None:
        with self._best_effort:
            line = self._line_start + files.to_json(record) + "\n"
            self._line_start = "\n"  # an error may cut this line
            with self._path.open("a") as file:
                file.write(line)
            self._line_start = ""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, if it exists, without lines that a crash or a full disk
    cut short.
    """
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        yield record


def tower_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the towers' values in a step's record, if any, by name: {"loss": [K]} as
    `tower_0/loss`, ...
    """
    scalars = {}
    for name, values in record.get("towers", {}).items():
        for tower, value in enumerate(values):
            scalars[f"tower_{tower}/{name}"] = value
    return scalars


def format_number(value: float | None, spec: str) -> str:
    """Return a number as text, or `-` for None. JSON files hold `null` for unknown and non-finite
    numbers.
    """
    return "-" if value is None else format(value, spec)


def format_rate(images_per_sec: float | None) -> str:
    """Return images per second as text, with a decimal if there are fewer than ten; `-` for None.

    >>> format_rate(1234.5), format_rate(0.42), format_rate(None)
    ('1,234', '0.4', '-')
    """
    return format_number(images_per_sec, ",.1f" if (images_per_sec or 0) < 10 else ",.0f")


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return rows with equally many cells as aligned text; the columns `left` are
    left-justified.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cell_formats = [
        f"{{:{'<' if column in left else '>'}{width}}}" for column, width in enumerate(widths)
    ]
    return "\n".join("  ".join(cell_formats).format(*row).rstrip() for row in rows)
