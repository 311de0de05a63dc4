"""The files of a run that other programs read: config.json, environment.json, metrics.jsonl."""

import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

PACKAGES = ("cifar-towers", "tensorflow", "keras", "tensorflow-datasets", "tensorboard", "numpy", "absl-py")


class Metrics:
    """metrics.jsonl: one object a line, appended. A resumed run first drops the lines after its step.

    Attributes:
      evaluated: the steps that evaluations are on record of.
    """

    def __init__(self, train_dir: Path, step: int = 0):
        self._path, self._going_on = train_dir / "metrics.jsonl", GoingOn(train_dir / "metrics.jsonl")
        self.evaluated: set[int] = set()
        with self._going_on():
            if self._path.exists():
                kept = [record for record in read(self._path) if record["step"] <= step]
                self.evaluated = {record["step"] for record in kept if record["kind"] == "eval"}
                write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record) -> None:
        """Appends one record; numbers that are not finite become null, as JSON has none."""
        record = {name: _plain(value) for name, value in record.items()}
        with self._going_on(), self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


class GoingOn:
    """`with going_on():` around what writes for the user's eyes: if it cannot, that is said once and ends no run."""

    def __init__(self, path: Path, errors: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._errors, self._said = path, errors, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one writing."""
        try:
            yield
        except self._errors as error:
            if not self._said:
                reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
                log.warning("%s cannot be written (%s); training goes on without it", self._path, reason)
            self._said = True


def going_on(path: Path):
    """Around the writing of one file that no run should end for."""
    return GoingOn(path)()


def _plain(value):
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return value


def read_json(path: Path) -> dict:
    """The object in a JSON file."""
    return json.loads(path.read_text())


def read(path: Path) -> Iterator[dict]:
    """The records of a metrics.jsonl; a last line cut short by a crash is passed over."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def write_json(path: Path, value: Mapping) -> None:
    """Writes an object, whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, default=str) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step, so that nobody finds half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def environment(towers, precision: str, data_digests: Mapping[str, str]) -> dict:
    """Where a run ran: versions, processor, devices, code and data."""
    return machine() | {
        "towers": [{"name": tower.name, "device": tower.device} for tower in towers],
        "precision": precision,
        "data_sha256": dict(data_digests),
    }


def machine() -> dict:
    """What a program runs on: command, versions, processor, code."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_revision": _git_revision(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_revision() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        told = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
        )
        return told.stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"
