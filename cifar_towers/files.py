"""Files of a run: their names, and how they are written atomically."""

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from cifar_towers.errors import DataError, error_text

log = logging.getLogger(__name__)

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
REPORT = "report.html"
MISTAKES = "mistakes.png"
CONFUSION = "confusion.png"
LOCK = ".lock"  # locked by the process that writes the run
EVENT_DIRECTORIES = ("train", "eval")  # of TensorBoard's event files
EVENT_FILES = "events.out.tfevents.*"
WRITTEN = re.compile(
    "|".join(map(re.escape, (CONFIG, ENVIRONMENT, METRICS, RESULT, REPORT, MISTAKES, CONFUSION)))
    + r"|step-\d+\.npz(\.damaged)?|\.tmp-.*"
)
TEMPORARY = ".tmp-"


def belongs_to_run(name: str) -> bool:
    """Return whether a run writes a file or a directory of this name into its directory."""
    return name in EVENT_DIRECTORIES or bool(WRITTEN.fullmatch(name))


def remove_run(directory: Path) -> None:
    """Remove the files that a run has written into its directory, and nothing else."""
    for path in directory.iterdir():
        if path.is_file() and WRITTEN.fullmatch(path.name):
            path.unlink()
        elif path.is_dir() and path.name in EVENT_DIRECTORIES:
            for event_file in path.glob(EVENT_FILES):
                event_file.unlink()
            shutil.rmtree(path / "plugins" / "profile", ignore_errors=True)
            for empty in (path / "plugins", path):
                with contextlib.suppress(OSError):
                    empty.rmdir()


# Files that are replaced --------------------------------------------------------------------------


def write_whole(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically: after an error or a power loss the old file or the new one is there,
    never a part.

    Args:
      content: what to write, or a function that writes it to a file.
    """
    # always the same, so that killed processes leave only one
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def make(directory: Path) -> None:
    """Make a directory, and those above it, so that a power loss does not take them away again."""
    directory.mkdir(parents=True, exist_ok=True)
    for above in directory.absolute().parents:
        sync(above)


def sync(directory: Path) -> None:
    """Wait until the entries of a directory are on the disk, where its file system and its owner
    allow that.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class BestEffortWrites:
    """A context for writes that training does not depend on: it swallows their errors and warns of
    the first.
    """

    def __init__(self, path: Path, errors: tuple[type[Exception], ...] = (OSError,)):
        self._path = path
        self._errors = errors
        self._warned = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, self._errors):
            return False
        if not self._warned:
            log.warning(
                "%s cannot be written (%s); training continues without it",
                self._path,
                error_text(error),
            )
        self._warned = True
        return True


# Locks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock the file `path` during the context, and yield whether this process got the lock.

    The operating system releases the lock when the process ends, even if it is killed.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except BlockingIOError:
            is_ours = False
        yield is_ours


# JSON ---------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that this project wrote, empty if there is no file;
    DataError: it is damaged.
    """
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
        reason = "" if isinstance(found, dict) else "it holds no object"
    except (OSError, ValueError) as error:
        reason = error_text(error)
    if reason:
        raise DataError(
            f"{path} cannot be read ({reason}); put a good copy there, or remove the file"
        )
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_whole(path, to_json(value, indent=1) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON that all parsers read: numbers that are not finite become null, however deep they
    stand.
    """
    return json.dumps(_plain(value), indent=indent, default=str, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
