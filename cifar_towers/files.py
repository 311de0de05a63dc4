"""Files of a run: their names, and how files and directories are written whole or not at all.

A directory is committed in four acts. Its files are written into `.tmp-...`, with a manifest of sizes and SHA-256.
Files and directory are synced. The directory is renamed into place. Its parent is synced. If the process is killed or
the machine loses power at any moment, the old state or the new one remains, besides names that `sweep` removes.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from cifar_towers.errors import DataError, error_text

log = logging.getLogger(__name__)

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
RESULT, ROLLBACKS, REPORT, TIMES = "result.json", "rollbacks.json", "report.html", "times.json"
MISTAKES, CONFUSION = "mistakes.png", "confusion.png"
PROJECTOR = "projector_" + 8 * "[0-9]"  # directories of TensorBoard's projector, one per step
PROJECTOR_FILES = ("features.tsv", "metadata.tsv", "sprite.png", "projector_config.pbtxt")
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard reads every file with `tfevents` in its name
LOCK = ".lock"  # locked by the process that writes the run
CHECKPOINTS_DIR = "checkpoints"
FILES = (CONFIG, ENVIRONMENT, METRICS, RESULT, ROLLBACKS, REPORT, TIMES, MISTAKES, CONFUSION)
MANIFEST = "MANIFEST.json"
TEMPORARY, DAMAGED = ".tmp-", "damaged-"
LOCK_PATIENCE_SECONDS = 0.5  # `is_locked` holds a lock for far less


# Directories that are committed ---------------------------------------------------------------------------------------


def commit(final: Path, write: Callable[[Path], None]) -> None:
    """Make the directory `final` from what `write(directory)` puts into the directory it is given.

    Raises:
      OSError: it could not be written, for example on a full disk; what was there before stays. Nothing is left of the
        new directory unless only the last sync failed: then it stands, but may not survive a power loss.
    """
    with temporary_beside(final) as temporary:
        temporary.mkdir(parents=True)
        write(temporary)
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in temporary.iterdir()}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, final)
        for directory in (final.parent, final.parent.parent):  # the second, in case the first is new
            sync(directory)


def validate(directory: Path, hashes: bool = True) -> str:
    """Return how a committed directory differs from its manifest, in words; an empty string if it does not.

    Args:
      hashes: compare the contents of files too, which takes seconds, and not only their names and sizes.

    Raises:
      OSError: a file cannot be read now, as from a network drive that is gone; it may be undamaged.
    """
    name = MANIFEST
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
        if not wanted:
            return f"{MANIFEST} names no file"
        if strangers := {path.name for path in directory.iterdir()} - {MANIFEST} - wanted.keys():
            return f"{min(strangers)} does not belong there"
        for name, (num_bytes, digest) in sorted(wanted.items()):
            if (size := (directory / name).stat().st_size) != num_bytes:
                return f"{name} has {size:,} bytes, not {num_bytes:,}"
            if hashes and sha256(directory / name) != digest:
                return f"{name} has other content than was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except (IsADirectoryError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{name} cannot be read ({type(error).__name__})"
    return ""


def quarantine(directory: Path) -> Path:
    """Rename a damaged directory, so that nobody takes it for a good one; return its new path."""
    names = (f"{DAMAGED}{directory.name}" + (f"-{number}" if number else "") for number in itertools.count())
    aside = next(path for path in map(directory.with_name, names) if not path.exists())
    os.rename(directory, aside)
    sync(directory.parent)
    return aside


def remove(directory: Path) -> None:
    """Remove a directory. While it is half removed it has another name."""
    with temporary_beside(directory) as temporary:
        os.rename(directory, temporary)


def sweep(parent: Path) -> None:
    """Remove what killed processes left half written or half removed."""
    for leftover in parent.glob(f"{TEMPORARY}*"):
        _remove_any(leftover)


def make(directory: Path) -> None:
    """Make a directory, and those above it, so that a power loss does not take them away again."""
    directory.mkdir(parents=True, exist_ok=True)
    for above in directory.absolute().parents:
        with contextlib.suppress(OSError):  # other people's need not be ours to open
            sync(above)


def sync(path: Path) -> None:
    """Wait until the contents of a file or directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_in_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a directory. Links count as themselves."""
    size = 0
    for file in [path] if path.is_file() else files_below(path):
        with contextlib.suppress(FileNotFoundError):
            size += file.lstat().st_size
    return size


def files_below(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory while a run may replace them; `rglob` fails if a folder vanishes."""
    return (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)


# Files that are replaced ----------------------------------------------------------------------------------------------


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one step. After an error or a power loss nobody finds half of it: what was there stays."""
    with temporary_beside(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(temporary)
        os.replace(temporary, path)


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. Whatever is still there at the end is removed."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")  # always the same, so that killed processes leave only one
    if temporary.is_dir():
        shutil.rmtree(temporary)
    try:
        yield temporary
    finally:
        _remove_any(temporary)


def replace(new: Path, final: Path) -> None:
    """Move a file or directory to `final`, over what is there. If it cannot be moved, what was there before stays."""
    if not final.is_dir():
        os.replace(new, final)
        return
    earlier = final.with_name(f".{final.name}.old")
    _remove_any(earlier)
    os.replace(final, earlier)
    try:
        os.replace(new, final)
    except BaseException:
        os.replace(earlier, final)
        raise
    _remove_any(earlier)


def _remove_any(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class BestEffortWrites:
    """A context for writes that training does not depend on: it swallows their errors and warns of the first."""

    def __init__(self, path: Path, errors: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._errors, self._warned = path, errors, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, self._errors):
            return False
        if not self._warned:
            log.warning("%s cannot be written (%s); training continues without it", self._path, error_text(error))
        self._warned = True
        return True


# Locks ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Lock the file `path` during the context, and yield whether this process got the lock.

    The operating system releases the lock when the process ends, even if it is killed.

    Args:
      wait: wait until the lock is free. Otherwise give up after `LOCK_PATIENCE_SECONDS`.
    """
    deadline = math.inf if wait else time.monotonic() + LOCK_PATIENCE_SECONDS  # `is_locked` may be looking
    with path.open("a") as file:
        while not (is_ours := _try_lock(file, fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield is_ours


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file.

    The check itself holds a shared lock for an instant. A process in `locked` tries again after that instant.
    """
    try:
        with path.open("rb") as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _try_lock(file: IO, operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# JSON -----------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that this project wrote; raise a DataError if it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
        reason = "" if isinstance(found, dict) else "it holds no object"
    except (OSError, ValueError) as error:
        reason = error_text(error)
    if reason:
        raise DataError(f"{path} cannot be read ({reason}); put a good copy there, or remove the file")
    return found


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return what `read_json` returns; an empty object if there is no such file."""
    return read_json(path) if path.exists() else {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_whole(path, to_json(value, indent=1) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON that all parsers read: numbers that are not finite become null, however deep they stand."""
    return json.dumps(_plain(value), indent=indent, default=str, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
