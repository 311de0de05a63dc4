"""CIFAR-10 from its own files or TensorFlow Datasets (TFDS): located or downloaded, decoded, verified and cached.

The decoded splits are kept in the user's cache directory, so that later starts need neither TFDS nor image decoding.

Source of the images: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import logging
import os
import pickle
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath

import numpy as np

from cifar_towers import files
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
COPY_NAMES = (  # of copies in a place; the last four are those of Keras's versions
    *("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "cifar-10-batches-py"),
    *("cifar-10-batches-py-target/cifar-10-batches-py", "cifar-10-batches-py-target_archive"),
    "cifar-10-batches-py.tar.gz",
)
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
IMAGES_PER_BATCH, IMAGE_SHAPE, IMAGE_BYTES = 10_000, (3, 32, 32), 3072
MAX_BATCH_BYTES, MAX_ARCHIVE_BYTES = 65_000_000, 400_000_000  # no more is read; protocol 2 may take 62 and 370 MB
ARRAY_GLOBALS = {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct")}  # in pickles
REPLACE = "replace it by a good copy, or delete it"
CACHE_ERRORS = (OSError, RuntimeError)  # RuntimeError: the user has no home directory


def locate(data_dir: str = "") -> Path:
    """Return TFDS's directory, or the path of CIFAR-10's own files, if the data are there, cached or downloadable.

    This takes seconds at most.

    Raises:
      DataError: no copy, decoded or prepared, no archive to prepare one from, and no connection to download it.
      UsageError: `data_dir` has no copy and would not be used, because CIFAR-10 is cached.
    """
    directory = tfds_directory(data_dir)
    if is_prepared(directory) or _archive(directory).exists():
        return directory
    if copy := _find_own_files(data_dir, directory):
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
        votes = np.load(file)[stored_order("test", len(test.labels))]
    if votes.shape != (len(test.labels), len(CLASSES)) or (votes.argmax(1) == test.labels).mean() < 0.5:
        raise DataError(f"{file} holds no votes on CIFAR-10's {len(test.labels)} test images; give a good copy")
    return {"test": dataclasses.replace(test, votes=votes / votes.sum(1, keepdims=True))}


def _read_split(directory: Path, name: str, is_named: bool) -> Split:
    must_read = is_named and directory.is_dir() and is_copy(directory)
    split, place = None if must_read else _load_cached(name), f"{directory}"
    if split:
        place = f"{cache_directory()}" + (f", and {directory} is not read" if is_named else "")
    else:
        if is_copy(directory):
            split, hint = read_own_files(directory, name), f"replace {directory} by a good copy, or delete it"
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
    return is_prepared(directory) or is_copy(directory)


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


# CIFAR-10's own files, in a folder or an archive, as its home page, torchvision and Keras give them -------------------
#
# Nothing is unpacked to the disk. A pickle yields plain values only: nothing that it names is imported or called.


def _find_own_files(data_dir: str, directory: Path) -> Path | None:
    """Return the first copy of CIFAR-10's files in TFDS's directory, Keras's cache or `./data`; None without any.

    If a `data_dir` is given, it is TFDS's directory, and the only place.
    """
    keras = os.path.expanduser(os.environ.get("KERAS_HOME") or "~/.keras")
    places = (directory,) if data_dir else (directory, Path(keras, "datasets"), Path("data"))
    return next((path for place in places for path in (place, *map(place.joinpath, COPY_NAMES)) if is_copy(path)), None)


def is_copy(path: Path) -> bool:
    """Return whether a path is an archive, or a folder with at least one of CIFAR-10's files."""
    if path.is_file():
        return path.name.endswith((".tar.gz", "_archive"))
    return any((path / file).is_file() for name in BATCHES for file in _file_names(name))


def read_own_files(copy: Path, name: str) -> Split:
    """Return `train` or `test` of a copy, not verified, in the order in which TFDS stores the split.

    Raises:
      DataError: a file is missing or damaged, or it is a pickle that would execute code.
    """
    path, batches = copy, []
    try:
        contents = dict(_read_files(copy, _file_names(name)))
        for batch in BATCHES[name]:
            path = copy / (f"{batch}.bin" if f"{batch}.bin" in contents else batch)
            if path.name not in contents:
                raise FileNotFoundError("no such file")
            batches.append((_parse_binary if path.suffix else _parse_pickle)(contents[path.name]))
    except Exception as error:  # a damaged archive or pickle raises any
        raise DataError(f"{path} cannot be read as part of CIFAR-10 ({error_line(error)}); {REPLACE}") from error
    labels, pixels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    order = stored_order(name, len(labels))
    images = pixels.reshape(-1, *IMAGE_SHAPE).transpose(0, 2, 3, 1)
    return Split(np.ascontiguousarray(images[order]), labels[order].astype(np.int64))


def stored_order(name: str, count: int) -> list[int]:
    """Return the order in which TFDS stores a split: by the MD5 of the split's name and the example's number."""
    return sorted(range(count), key=lambda number: hashlib.md5(f"{name}{number}".encode()).digest())


def _file_names(name: str) -> set[str]:
    """Return the possible names of a split's files."""
    return {batch + suffix for batch in BATCHES[name] for suffix in (".bin", "")}


def _read_files(copy: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the files of these names in a folder or archive."""
    if copy.is_dir():
        for path in filter(Path.is_file, map(copy.joinpath, names)):
            with path.open("rb") as file:
                yield path.name, file.read(MAX_BATCH_BYTES)
        return
    with gzip.open(copy) as packed, tarfile.open(fileobj=io.BytesIO(packed.read(MAX_ARCHIVE_BYTES))) as archive:
        for member in archive:
            inner = archive.extractfile(member) if PurePath(member.name).name in names else None
            if inner:
                yield PurePath(member.name).name, inner.read(MAX_BATCH_BYTES)


def _parse_binary(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return labels [n] and pixels [n, 3072] of a file with a byte for the label before the pixels of each image."""
    needed = IMAGES_PER_BATCH * (1 + IMAGE_BYTES)
    if len(content) != needed:
        raise ValueError(f"it has {len(content):,} bytes, not {needed:,}")
    records = np.frombuffer(content, np.uint8).reshape(IMAGES_PER_BATCH, -1)
    return records[:, 0], records[:, 1:]


def _parse_pickle(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return labels [n] and pixels [n, 3072] of a pickled dictionary with a list of labels and an array."""
    batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    batch = {key.encode() if isinstance(key, str) else key: value for key, value in batch.items()}
    labels, pixels = np.array(batch[b"labels"], np.uint8), np.frombuffer(batch[b"data"].content, np.uint8)
    return labels.reshape(IMAGES_PER_BATCH), pixels.reshape(IMAGES_PER_BATCH, IMAGE_BYTES)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) == ("_codecs", "encode"):
            return _encode_latin1
        if (module.replace("_core", "core"), name) in ARRAY_GLOBALS:
            return _ArrayBytes
        raise pickle.UnpicklingError(f"a pickle that would execute {module}.{name}")


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Return bytes from the text that Python 3 writes in their place into pickles of protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"a pickle that would execute _codecs.encode for {encoding!r}")
    return text.encode("latin1")


class _ArrayBytes:
    """A stand-in for all that NumPy needs to unpickle an array. It keeps the bytes."""

    content = b""

    def __init__(self, *arguments: object): ...

    def __setstate__(self, state: tuple) -> None:
        self.content = state[-1]  # of an array, after version, shape, type and order
