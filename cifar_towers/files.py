"""The files of a run: their names, and how files and directories are written whole or not at all.

How a directory is committed: its files are written into `.tmp-...`, with a manifest of their sizes and SHA-256. Files
and directory are synced. Then the directory is renamed into place and its parent is synced. A process that is killed,
or a machine that loses power, at any moment leaves the old state or the new one, and names that `sweep` removes. A file
that `write_whole` replaces is not synced.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from cifar_towers.errors import error_text

log = logging.getLogger(__name__)

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
RESULT, ROLLBACKS, MISTAKES, REPORT = "result.json", "rollbacks.json", "mistakes.png", "report.html"
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard reads every file with `tfevents` in its name
TRUNCATED_EVENTS = ".kept.tmp"  # an event file while it is truncated
LAUNCH = ".launch"  # holds the name of the launch that cleared the directory
LOCK = ".lock"  # locked by the process that writes the run
CHECKPOINTS_DIR = "checkpoints"
FILES = (CONFIG, ENVIRONMENT, METRICS, RESULT, ROLLBACKS, MISTAKES, REPORT)
MANIFEST = "MANIFEST.json"
TEMPORARY, TRASH, DAMAGED = ".tmp-", ".trash-", "damaged-"


def make(directory: Path) -> None:
    """Makes a directory, and those above it, that a power loss does not take away again.

    Raises:
      OSError: it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for above in directory.absolute().parents:
        with contextlib.suppress(OSError):  # other people's need not be ours to open
            sync(above)


def commit(final: Path, write: Callable[[Path], None]) -> None:
    """Makes `final` with what `write(directory)` puts into the directory it is given.

    Raises:
      OSError: it could not be written, as on a full disk; what was there before stays. Nothing is left of it, unless
        only the last sync failed: then it stands, but may not survive a power loss.
    """
    parent = final.parent
    temporary = parent / f"{TEMPORARY}{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in temporary.iterdir()}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, final)
        for directory in (parent, parent.parent):  # the second, in case the first is new
            sync(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step, so that nobody finds half of it.

    Raises:
      OSError: it could not be written; what was there before stays, and nothing is left of it.
    """
    with temporary_beside(path) as temporary:
        if isinstance(content, str):
            temporary.write_text(content)
        else:
            temporary.write_bytes(content)
        os.replace(temporary, path)


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A path to write a file or directory at before it is moved to `path`; removed at the end if it was not moved."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")  # always the same, so that killed processes leave only one
    if temporary.is_dir():
        shutil.rmtree(temporary)
    try:
        yield temporary
    finally:
        _remove_any(temporary)


def replace(new: Path, final: Path) -> None:
    """Move a file or directory to `final`, over what is there.

    Raises:
      OSError: it could not be moved; what was there before stays.
    """
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


def validate(directory: Path) -> str:
    """What differs from the manifest, in words; empty if every file is there as it was written, and none besides."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        wanted = {name: (facts["bytes"], facts["sha256"]) for name, facts in manifest.items()}
        found = {path.name for path in directory.iterdir()} - {MANIFEST}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if not wanted:
        return f"{MANIFEST} names no file"
    for name in sorted(wanted.keys() | found):
        path = directory / name
        if name not in found:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} does not belong there"
        try:
            if path.stat().st_size != wanted[name][0]:
                return f"{name} has {path.stat().st_size:,} bytes, not {wanted[name][0]:,}"
            if sha256(path) != wanted[name][1]:
                return f"{name} has other content than was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def quarantine(directory: Path) -> Path:
    """Renames a damaged directory, so that nobody takes it for good; its new path."""
    numbers = (f"-{number}" if number else "" for number in range(1_000_000))
    aside = next(
        path for end in numbers if not (path := directory.with_name(f"{DAMAGED}{directory.name}{end}")).exists()
    )
    os.rename(directory, aside)
    sync(directory.parent)
    return aside


def remove(directory: Path) -> None:
    """Removes a directory; one that is half removed has another name."""
    trash = directory.with_name(f"{TRASH}{directory.name}-{uuid.uuid4().hex[:8]}")
    os.rename(directory, trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes what killed processes left half written or half removed."""
    for prefix in (TEMPORARY, TRASH):
        for leftover in parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process, and no other, has the lock file `path` while inside, which it may `wait` for. It ends with
    the process, however that ends, so a lock left by a dead one does not count."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def sync(path: Path) -> None:
    """Has the disk, not just the system, know what is in a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    write_whole(path, to_json(value, indent=1) + "\n")


class BestEffortWrites:
    """Swallows write errors of a file or directory that training does not depend on; warns once.

    Use as `with best_effort():` around each write.
    """

    def __init__(self, path: Path, errors: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._errors, self._warned = path, errors, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which the errors are swallowed."""
        try:
            yield
        except self._errors as error:
            if not self._warned:
                log.warning("%s cannot be written (%s); training continues without it", self._path, error_text(error))
            self._warned = True


def best_effort_writes(path: Path) -> contextlib.AbstractContextManager[None]:
    """`BestEffortWrites` around a single write."""
    return BestEffortWrites(path)()
