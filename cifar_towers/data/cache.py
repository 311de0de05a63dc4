"""Decoded splits, kept in the user's cache directory: a start that finds them needs neither TFDS nor PNG decoding.

A file holds a split's images, then its labels, as `Split.digest` takes them, so that its SHA-256 is the split's digest.
Knows nothing of CIFAR-10.
"""

import contextlib
import logging
import os
from pathlib import Path

import numpy as np

from cifar_towers.data.dataset import Split
from cifar_towers.errors import error_text
from cifar_towers.files import atomic_io

log = logging.getLogger(__name__)

IMAGE = (32, 32, 3)
BYTES = 32 * 32 * 3 + 8  # of an example and its label
UNUSABLE = (OSError, RuntimeError)  # it cannot be read or written, or the user has no home


def directory() -> Path:
    """Where decoded splits are kept: `$XDG_CACHE_HOME/cifar_towers`, or `~/.cache/cifar_towers`.

    Raises:
      RuntimeError: the user has no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cifar_towers"


def holds(name: str, count: int) -> bool:
    """Whether a file of this name and of `count` examples is there, whatever is in it."""
    with contextlib.suppress(*UNUSABLE):
        return (directory() / name).stat().st_size == count * BYTES
    return False


def load(name: str, digest: str) -> Split | None:
    """The split of this digest in a file; None if there is none that can be read. One that is damaged is removed, and
    that is said. It is in memory, not mapped, so that what is verified is what is used."""
    with contextlib.suppress(*UNUSABLE):
        path = directory() / name
        content = np.fromfile(path, np.uint8)
        count, rest = divmod(len(content), BYTES)
        images, labels, _ = np.split(content, [count * (BYTES - 8), count * BYTES])
        split = Split(images.reshape(count, *IMAGE), labels.view(np.int64))
        if split.digest == digest and not rest:
            return split
        log.warning("%s is damaged: removed, and made anew", path)
        path.unlink()
    return None


def save(name: str, split: Split) -> None:
    """Keeps a split, whole or not at all, unless another process does so now; where that cannot be, says so."""
    try:
        final = directory() / name
        final.parent.mkdir(parents=True, exist_ok=True)
        with atomic_io.locked(final.parent / ".lock") as ours:
            if ours:
                _write(final, split)
    except UNUSABLE as error:
        log.info("%s cannot be kept for the next start (%s), which decodes it again", name, error_text(error))


def _write(final: Path, split: Split) -> None:
    temporary = final.with_name(f".{final.name}.tmp")  # one for all, so that killed processes leave no more than one
    try:
        with temporary.open("wb") as file:
            np.ascontiguousarray(split.images).tofile(file)
            np.ascontiguousarray(split.labels).tofile(file)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
