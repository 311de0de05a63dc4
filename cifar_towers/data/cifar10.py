"""CIFAR-10 from TensorFlow Datasets (TFDS) or its own files: decoded, verified and cached.

The decoded splits are kept in the user's cache directory, so that later starts need neither TFDS nor image decoding.

Source of the images: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import socket
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePath

import numpy as np

from cifar_towers.data import tfds_source
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, error_line, error_text

log = logging.getLogger(__name__)

BUILDER = "cifar10/3.0.2"
SOURCE_HOST = "www.cs.toronto.edu"
CONNECT_TIMEOUT_SECONDS = 3.0
DIGESTS = {  # `Split.digest` of the decoded splits
    "train": "c50e2d9aebe4fd88c438994f8eb0f97707faa404b3760eb30bd3ede49611335a",
    "test": "4b43d2e153a74d4688cbf861a0a06235f0f42c0171aceaf852242dd01a54fc6d",
}
ARCHIVE = "cifar-10-binary.tar.gz"
COPY_NAMES = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-python.tar.gz", ARCHIVE)
BATCHES = {  # split -> published file -> its MD5. A binary file has the same name with the suffix .bin
    "train": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
}
IMAGE_BYTES = 3 * 32 * 32


class DownloadError(DataError):
    """CIFAR-10 is not on this machine and cannot be downloaded."""


def check_available(data_dir: str = "") -> None:
    """Return if CIFAR-10 is on this machine or its host answers. This takes seconds.

    Raises:
      DownloadError: neither.
    """
    directory = tfds_source.tfds_directory(data_dir)
    if is_cached() or is_prepared(directory) or _archive(directory).exists() or _find_copies(data_dir):
        return
    try:
        socket.create_connection((SOURCE_HOST, 443), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise DownloadError(f"no CIFAR-10 in {directory}, and {SOURCE_HOST} does not answer") from error


def load(data_dir: str = "", names: Iterable[str] = tuple(DIGESTS)) -> dict[str, Split]:
    """Return `train`, `test` or both, verified, from the cache or else from TFDS or CIFAR-10's own files.

    Raises:
      DataError: the prepared copy is damaged. DownloadError: there is no copy, and the download fails.
    """
    return {name: _load_cached(name) or _decode(name, data_dir) for name in names if name in DIGESTS}


def is_prepared(directory: Path) -> bool:
    """Return whether a TFDS directory has a prepared copy."""
    return (directory / BUILDER / "dataset_info.json").exists()


def is_cached() -> bool:
    """Return whether both decoded splits are in the cache."""
    return all(_cached_file(name).is_file() for name in DIGESTS)


def _decode(name: str, data_dir: str) -> Split:
    """Decode a split from the first good copy, or download it; then cache it."""
    directory = tfds_source.tfds_directory(data_dir)
    for copy in [] if is_prepared(directory) else _find_copies(data_dir):
        try:
            split = _read_copy(copy, name)
            break
        except Exception as error:  # of an archive that is half downloaded, for example
            log.warning("%s is not used: %s", copy, error_line(error))
    else:
        split = _from_tfds(directory, name)
    _save_to_cache(name, split)
    return split


def _archive(directory: Path) -> Path:
    return directory / "downloads/manual" / ARCHIVE  # where TFDS expects one that was downloaded by hand


def _from_tfds(directory: Path, name: str) -> Split:
    """Read a split of TFDS's copy, in the order that its digest needs. Download and prepare it first if necessary."""
    hint, error_type = "delete the copy, and it is prepared again", DataError
    if not is_prepared(directory):
        hint, error_type = f"put {ARCHIVE} into {_archive(directory).parent}", DownloadError
    try:
        split = tfds_source.load(BUILDER.replace("/", ":"), directory, 32, [name])[name]
        return _verified(name, split.images, split.labels)
    except DataError as error:
        raise error_type(f"CIFAR-10's {name} split: {error}; {hint}") from error


def _verified(name: str, images: np.ndarray, labels: np.ndarray) -> Split:
    split = Split(images, labels.astype(np.int64))
    if split.digest != DIGESTS[name]:
        raise DataError(f"{name} is damaged: its digest is {split.digest}, and must be {DIGESTS[name]}")
    return split


# The cache ------------------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/cifar_towers` or `~/.cache/cifar_towers`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cifar_towers"


def _cached_file(name: str) -> Path:
    return cache_directory() / f"cifar10-{name}-{DIGESTS[name][:16]}.npy"


def _load_cached(name: str) -> Split | None:
    """Return a cached split if there is one with the right digest.

    The arrays are in memory, not mapped, so that they cannot change after the check.
    """
    path = _cached_file(name)
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return _verified(name, np.load(file), np.load(file))
    except Exception as error:  # NumPy raises any on a damaged file
        log.warning("%s is not used: %s", path, error_line(error))
        return None


def _save_to_cache(name: str, split: Split) -> None:
    """Write a split under another name, then rename it, so that no process reads half of it. Only log a failure."""
    path = _cached_file(name)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.save(file, split.images)
            np.save(file, split.labels)
        os.replace(temporary, path)
    except OSError as error:
        log.info("CIFAR-10 %s cannot be cached (%s); the next start decodes it again", name, error_text(error))
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


# CIFAR-10's own files -------------------------------------------------------------------------------------------------


def _find_copies(data_dir: str) -> list[Path]:
    """Return the copies in TFDS's directory, Keras's cache and `./data`; only those in `data_dir` if that is given."""
    keras = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser() / "datasets/cifar-10-batches-py-target"
    places = [tfds_source.tfds_directory(data_dir), *([] if data_dir else [keras, Path("data")])]
    return [path for place in places for path in map(place.joinpath, COPY_NAMES) if path.exists()]


def _read_copy(copy: Path, name: str) -> Split:
    """Return `train` or `test` of a folder or archive, in the order in which TFDS stores the split."""
    wanted = {batch + suffix for batch in BATCHES[name] for suffix in ("", ".bin")}
    if copy.is_dir():
        contents = {path.name: path.read_bytes() for path in copy.iterdir() if path.name in wanted}
    else:
        contents = {}
        with tarfile.open(copy) as archive:
            for member in archive:
                file = archive.extractfile(member) if PurePath(member.name).name in wanted else None
                if file:
                    contents[PurePath(member.name).name] = file.read()
    batches = []
    for batch, md5 in BATCHES[name].items():
        if content := contents.get(f"{batch}.bin"):
            records = np.frombuffer(content, np.uint8).reshape(-1, 1 + IMAGE_BYTES)  # a label, then the pixels
            batches.append((records[:, 0], records[:, 1:]))
        elif hashlib.md5(contents.get(batch, b"")).hexdigest() != md5:
            raise ValueError(f"{batch} is missing or not the published file")
        else:  # a pickle that is known executes nothing
            values = pickle.loads(contents[batch], encoding="bytes")
            batches.append((np.array(values[b"labels"]), values[b"data"]))
    labels, pixels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    order = stored_order(name, len(labels))
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return _verified(name, images[order], labels[order])


def stored_order(name: str, count: int) -> list[int]:
    """Return the order in which TFDS stores a split: by the MD5 of the split's name and the example's number."""
    return sorted(range(count), key=lambda number: hashlib.md5(f"{name}{number}".encode()).digest())
