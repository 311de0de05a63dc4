"""CIFAR-10 from its own files or TensorFlow Datasets (TFDS): located or downloaded, decoded, verified and cached.

The decoded splits are kept in the user's cache directory, so that later starts need neither TFDS nor image decoding.

Source of the images: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cifar_towers import files
from cifar_towers.data import cifar10_files
from cifar_towers.data.dataset import CLASSES, Split
from cifar_towers.data.tfds_source import in_stored_order, prepare, reachable, tfds_directory
from cifar_towers.errors import DataError, UsageError, error_line, error_text

log = logging.getLogger(__name__)

BUILDER = "cifar10/3.0.2"
ARCHIVE = "cifar-10-binary.tar.gz"
SOURCE_HOST = "www.cs.toronto.edu"
DIGESTS = {  # `Split.digest` of the decoded splits
    "train": "c50e2d9aebe4fd88c438994f8eb0f97707faa404b3760eb30bd3ede49611335a",
    "test": "4b43d2e153a74d4688cbf861a0a06235f0f42c0171aceaf852242dd01a54fc6d",
}
PREPARE_AGAIN = "delete the copy, and it is prepared again"
CACHE_ERRORS = (OSError, RuntimeError)  # RuntimeError: the user has no home directory


def locate(data_dir: str = "") -> Path:
    """Return TFDS's directory or that of CIFAR-10's own files, if it is there or is cached or can be downloaded.

    This takes seconds at most.

    Raises:
      DataError: no copy, decoded or prepared, no archive to prepare one from, and no connection to download it.
      UsageError: `data_dir` has no copy and would not be used, because CIFAR-10 is cached.
    """
    directory = tfds_directory(data_dir)
    if is_prepared(directory) or _archive(directory).exists():
        return directory
    if copy := cifar10_files.find(data_dir, directory):
        return copy
    if data_dir and is_cached():
        problem = f"has no {BUILDER}" if directory.exists() else "does not exist"
        raise UsageError(
            f"data_dir={data_dir} {problem}, and would not be used: CIFAR-10 is read from {cache_directory()}; leave "
            f"data_dir out, or give one that holds {BUILDER}"
        )
    return _check_available(directory)


def load(directory: Path, names: Iterable[str] = tuple(DIGESTS), is_named: bool = False) -> dict[str, Split]:
    """Return `train`, `test` or both, verified, from the cache or else from the copy.

    CIFAR-10's own files in a directory that the user named are read even if they are cached: that takes a second.

    Raises:
      DataError: the copy cannot be prepared or read, or differs from CIFAR-10.
    """
    return {name: _read_split(directory, name, is_named) for name in names if name in DIGESTS}


def add_votes(test: Split, file: Path) -> dict[str, Split]:
    """Return the test split with people's votes from a file of CIFAR-10H, whose order is that of CIFAR-10's own files.

    Source: J. C. Peterson et al., "Human uncertainty makes classification more robust", arXiv 1908.07086.
    """
    votes = np.zeros(0)
    with contextlib.suppress(Exception):  # NumPy raises any on a damaged file
        votes = np.load(file)[cifar10_files.stored_order("test", len(test.labels))]
    if votes.shape != (len(test.labels), len(CLASSES)) or (votes.argmax(1) == test.labels).mean() < 0.5:
        raise DataError(f"{file} holds no votes on CIFAR-10's {len(test.labels)} test images; give a good copy")
    return {"test": dataclasses.replace(test, votes=votes / votes.sum(1, keepdims=True))}


def _read_split(directory: Path, name: str, is_named: bool) -> Split:
    must_read = is_named and directory.is_dir() and cifar10_files.is_copy(directory)
    split, place = None if must_read else _load_cached(name), f"{directory}"
    if split:
        place = f"{cache_directory()}" + (f", and {directory} is not read" if is_named else "")
    else:
        if cifar10_files.is_copy(directory):
            split, hint = cifar10_files.read_split(directory, name), f"replace {directory} by a good copy, or delete it"
        else:
            split, hint = _from_tfds(_check_available(directory), name), PREPARE_AGAIN
        if split.digest != DIGESTS[name]:
            raise DataError(
                f"CIFAR-10's {name} split is damaged: its {len(split.labels)} examples have the digest {split.digest}, "
                f"it must be {DIGESTS[name]}; {hint}"
            )
        _save_to_cache(name, split)
    count, per_class, digest = len(split.labels), split.class_counts()[0], split.digest
    log.info("CIFAR-10 %s: %d images, %d per class, sha256 %s, from %s", name, count, per_class, digest[:16], place)
    return split


def is_prepared(directory: Path) -> bool:
    """Return whether a TFDS directory has a prepared copy."""
    return (directory / BUILDER / "dataset_info.json").exists()


def has_copy(directory: Path) -> bool:
    """Return whether a path of `locate` has a copy, prepared or in CIFAR-10's own files."""
    return is_prepared(directory) or cifar10_files.is_copy(directory)


def _check_available(directory: Path) -> Path:
    """Return the TFDS directory; raise a DataError if CIFAR-10 is neither there nor elsewhere."""
    archive = _archive(directory)
    if is_cached() or is_prepared(directory) or archive.exists() or reachable(f"https://{SOURCE_HOST}"):
        return directory
    raise DataError(
        f"no CIFAR-10 in {directory} and {SOURCE_HOST} does not answer; put {ARCHIVE} into {archive.parent}, "
        "or give --data_dir=<a directory that holds cifar10/3.0.2 or cifar-10-batches-py>, or train on "
        "--dataset=synthetic"
    )


def _archive(directory: Path) -> Path:
    return directory / "downloads" / "manual" / ARCHIVE  # where TFDS expects one that was downloaded by hand


def _from_tfds(directory: Path, name: str) -> Split:
    """Read a split of the prepared copy, in the order that its digest needs. Prepare the copy first if necessary."""
    try:
        builder = prepare(BUILDER.replace("/", ":"), directory, "CIFAR-10 (170 MB)")
        batches = in_stored_order(builder, name, batch_size=1000)
        images, labels = zip(*((batch["image"], batch["label"]) for batch in batches), strict=True)
        return Split(np.concatenate(images), np.concatenate(labels).astype(np.int64))
    except DataError as error:  # the prepared copy is damaged
        raise DataError(f"CIFAR-10's {name} split: {error}") from error
    except Exception as error:
        hint = PREPARE_AGAIN if is_prepared(directory) else f"put {ARCHIVE} into {_archive(directory).parent}"
        raise DataError(
            f"CIFAR-10's {name} split in {directory} cannot be read ({error_line(error)}); {hint}"
        ) from error


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/cifar_towers` or `~/.cache/cifar_towers`; raise a RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cifar_towers"


def _cached_file(name: str) -> Path:
    return cache_directory() / f"cifar10-{name}-{DIGESTS[name][:16]}.npy"


def is_cached() -> bool:
    """Return whether both decoded splits are in the cache."""
    with contextlib.suppress(*CACHE_ERRORS):
        return all(_cached_file(name).is_file() for name in DIGESTS)
    return False


def _load_cached(name: str) -> Split | None:
    """Return a cached split if there is one with the right digest. Remove a damaged file.

    The arrays are in memory, not mapped, so that they cannot change after the check.
    """
    with contextlib.suppress(*CACHE_ERRORS):
        path = _cached_file(name)
        with path.open("rb") as file, contextlib.suppress(Exception):  # NumPy raises any on a damaged file
            split = Split(np.load(file), np.load(file))
            if split.digest == DIGESTS[name]:
                return split
        log.warning("%s is damaged; it is removed and decoded again", path)
        path.unlink()
    return None


def _save_to_cache(name: str, split: Split) -> None:
    """Write a split atomically, unless it is there or another process is writing to the cache. Only log a failure."""
    try:
        path = _cached_file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.parent / ".lock") as is_ours:
            if not is_ours or path.is_file():
                return
            with files.temporary_beside(path) as temporary:
                with temporary.open("wb") as file:
                    np.save(file, split.images)
                    np.save(file, split.labels)
                files.replace(temporary, path)
    except CACHE_ERRORS as error:
        log.info("CIFAR-10 %s cannot be cached (%s); the next start decodes it again", name, error_text(error))
