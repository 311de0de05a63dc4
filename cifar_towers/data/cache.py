"""Cache of decoded splits in the user's cache directory, so that later starts need neither TFDS nor image decoding.

A file holds a split's images and its labels, each as `np.save` writes it.
"""

import contextlib
import logging
import os
from pathlib import Path

import numpy as np

from cifar_towers import files
from cifar_towers.data.dataset import Split
from cifar_towers.errors import error_text

log = logging.getLogger(__name__)

UNUSABLE = (OSError, RuntimeError)  # the cache cannot be read or written, or the user has no home directory


def directory() -> Path:
    """`$XDG_CACHE_HOME/cifar_towers`, or `~/.cache/cifar_towers`; a RuntimeError without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cifar_towers"


def contains(name: str) -> bool:
    """Whether a file of this name exists. Its content is checked when it is loaded."""
    with contextlib.suppress(*UNUSABLE):
        return (directory() / name).is_file()
    return False


def load(name: str, digest: str) -> Split | None:
    """The cached split, or None if there is none that can be read and has this digest. Removes damaged files.

    The arrays are in memory, not mapped, so that what was verified cannot change.
    """
    try:
        path = directory() / name
        with path.open("rb") as file:
            split = _read(file)
        if split and split.digest == digest:
            return split
        log.warning("%s is damaged; it is removed and decoded again", path)
        path.unlink()
    except UNUSABLE:
        pass
    return None


def save(name: str, split: Split) -> None:
    """Write a split atomically, unless another process is writing to the cache; log if it cannot be written."""
    try:
        path = directory() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.parent / ".lock") as is_ours:
            if not is_ours:
                return
            with files.temporary_beside(path) as temporary:
                with temporary.open("wb") as file:
                    np.save(file, split.images)
                    np.save(file, split.labels)
                files.replace(temporary, path)
    except UNUSABLE as error:
        log.info("%s cannot be cached (%s); the next start decodes it again", name, error_text(error))


def _read(file) -> Split | None:
    try:
        split = Split(np.load(file), np.load(file))
    except OSError:
        raise
    except Exception:  # NumPy raises errors of all kinds on damaged headers
        return None
    return None if file.read(1) else split
