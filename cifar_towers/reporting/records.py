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

log = logging.getLogger(__name__)

PACKAGES = ("cifar-towers", "tensorflow", "keras", "tensorflow-datasets", "tensorboard", "numpy", "absl-py")


class Metrics:
    """metrics.jsonl: one object a line, appended. A resumed run first drops the lines after its step."""

    def __init__(self, train_dir: Path, step: int = 0):
        self._path, self._failed = train_dir / "metrics.jsonl", False
        with self._going_on():
            if self._path.exists():
                kept = [record for record in read(self._path) if record["step"] <= step]
                write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record) -> None:
        """Appends one record; one that cannot be written never ends a run."""
        with self._going_on(), self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written (%s); training goes on without it", self._path, error.strerror)
            self._failed = True


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
