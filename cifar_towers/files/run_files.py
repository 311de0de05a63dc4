"""The files in a run's directory that other programs read: their names, their sizes, and their JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cifar_towers.files import atomic_io

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
RESULT, ROLLBACKS, MISTAKES, REPORT = "result.json", "rollbacks.json", "mistakes.png", "report.html"
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard reads every file with `tfevents` in its name
TRUNCATED_EVENTS = ".kept.tmp"  # an event file while it is truncated
LAUNCH = ".launch"  # holds the name of the launch that cleared the directory
LOCK = ".lock"  # locked by the process that writes the run
CHECKPOINTS_DIR = "checkpoints"
FILES = (CONFIG, ENVIRONMENT, METRICS, RESULT, ROLLBACKS, MISTAKES, REPORT)


def list_checkpoints(train_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((train_dir / CHECKPOINTS_DIR).glob("step-*"))


def size_in_bytes(path: Path) -> int:
    """Of a file, or of all files below a directory; links count as themselves."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def to_json(value, indent: int | None = None) -> str:
    """JSON as all parsers read it: numbers that are not finite become null, however deep they stand."""
    return json.dumps(_plain(value), indent=indent, default=str, allow_nan=False)


def _plain(value):
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict:
    """The object in a JSON file."""
    return json.loads(path.read_text())


def read_json_if_any(path: Path) -> dict:
    """The object in a JSON file; an empty one if there is none, or not a whole one."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, value: Mapping) -> None:
    """Writes an object, whole or not at all."""
    atomic_io.write_whole(path, to_json(value, indent=1) + "\n")
