"""CIFAR-10 from TensorFlow Datasets (TFDS) or its own files: decoded, verified and cached.

The decoded splits are kept in the user's cache directory, so that later starts need neither TFDS
nor image decoding.

Source of the images: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import hashlib
import itertools
import logging
import os
import pickle
import socket
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import IO

import numpy as np

from cifar_towers import files
from cifar_towers.data import tfds_source
from cifar_towers.data.dataset import Split
from cifar_towers.data.tfds_source import tfds_directory
from cifar_towers.errors import DataError, error_line, error_text

log = logging.getLogger(__name__)

BUILDER = "cifar10/3.0.2"
SOURCE_HOST = "www.cs.toronto.edu"
CONNECT_TIMEOUT_SECONDS = 3.0
DIGESTS = {  # `Split.digest` of the decoded splits
    "train": "c50e2d9aebe4fd88c438994f8eb0f97707faa404b3760eb30bd3ede49611335a",
    "test": "4b43d2e153a74d4688cbf861a0a06235f0f42c0171aceaf852242dd01a54fc6d",
}
# the published files, in a folder or packed
FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
BATCHES = {  # split -> published file -> its MD5
    "train": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
}


def is_available(data_dir: str = "") -> bool:
    """Return whether CIFAR-10 is on this machine or its host answers. This takes at most
    seconds.
    """
    if is_prepared(tfds_directory(data_dir)) or _find_copies(data_dir):
        return True
    if all(_cached_file(name).is_file() for name in DIGESTS):
        return True
    return _host_answers()


def _host_answers() -> bool:
    """Return whether CIFAR-10 can be downloaded, as it seems."""
    try:
        socket.create_connection((SOURCE_HOST, 443), CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


def load(data_dir: str = "", names: Iterable[str] = tuple(DIGESTS)) -> dict[str, Split]:
    """Return `train`, `test` or both, verified, from the cache or else from TFDS or CIFAR-10's own
    files.

    Raises:
      DataError: the copy is damaged, or there is none and the download fails.
    """
    return {
        name: _load_cached(name) or _decode(name, data_dir) for name in names if name in DIGESTS
    }


def is_prepared(directory: Path) -> bool:
    """Return whether a TFDS directory has a prepared copy."""
    return (directory / BUILDER / "dataset_info.json").exists()


def _decode(name: str, data_dir: str) -> Split:
    """Decode a split of the copy that TFDS prepared, of CIFAR-10's own files or else of a download;
    then cache it.
    """
    directory = tfds_directory(data_dir)
    copies = [] if is_prepared(directory) else _find_copies(data_dir)
    for copy in copies:
        try:
            return _save_to_cache(name, _verified(name, *_read_copy(copy, name)))
        except Exception as error:  # e.g. of an archive that is half downloaded
            log.warning("%s is not used: %s", copy, error_line(error))
    if not is_prepared(directory) and not _host_answers():
        raise DataError(
            f"CIFAR-10's {name} split is not in {directory}, and {SOURCE_HOST} does not answer; "
            f"put {ARCHIVE} into that directory"
        )
    try:
        stored = tfds_source.load(BUILDER.replace("/", ":"), directory, 32, [name])[name]
        return _save_to_cache(name, _verified(name, stored.images, stored.labels))
    except Exception as error:
        hint = (
            f"delete {directory / BUILDER}"
            if is_prepared(directory)
            else f"put {ARCHIVE} into {directory}"
        )
        raise DataError(f"CIFAR-10's {name} split: {error_text(error, 400)}; {hint}") from error


def _verified(name: str, images: np.ndarray, labels: np.ndarray) -> Split:
    split = Split(images, labels.astype(np.int64))
    if split.digest != DIGESTS[name]:
        raise DataError(
            f"{name} is damaged: its digest is {split.digest}, and must be {DIGESTS[name]}"
        )
    return split


# The cache ----------------------------------------------------------------------------------------


def _cached_file(name: str) -> Path:
    """Return the path of a split's copy in `$XDG_CACHE_HOME/cifar_towers` or
    `~/.cache/cifar_towers`.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cifar_towers"
    return directory / f"cifar10-{name}-{DIGESTS[name][:16]}.npy"


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


def _save_to_cache(name: str, split: Split) -> Split:
    """Write a split so that no process reads half of it, and return it. Only log a failure."""
    path = _cached_file(name)

    def write(file: IO[bytes]) -> None:
        np.save(file, split.images)
        np.save(file, split.labels)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, write)
    except OSError as error:
        log.info(
            "CIFAR-10 %s cannot be cached (%s); the next start decodes it again",
            name,
            error_text(error),
        )
    return split


# CIFAR-10's own files -----------------------------------------------------------------------------


def _find_copies(data_dir: str) -> list[Path]:
    """Return the copies in TFDS's directory, Keras's cache and `./data`; only those in `data_dir`
    if that is given.
    """
    keras = (
        Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
        / "datasets/cifar-10-batches-py-target"
    )
    places = [tfds_directory(data_dir)]
    if not data_dir:
        places += [keras, Path("data")]

    copies = [place / name for place, name in itertools.product(places, (FOLDER, ARCHIVE))]
    return [copy for copy in copies if copy.exists()]


def _read_copy(copy: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of `train` or `test` in a folder or archive, in the order in which
    TFDS stores them.
    """
    contents: dict[str, bytes] = {}
    if copy.is_dir():
        contents = {
            path.name: path.read_bytes() for path in copy.iterdir() if path.name in BATCHES[name]
        }
    else:
        with tarfile.open(copy) as archive:
            for member in archive:
                batch = PurePath(member.name).name
                file = archive.extractfile(member) if batch in BATCHES[name] else None
                if file:
                    contents[batch] = file.read()

    labels = []
    pixels = []
    for batch, md5 in BATCHES[name].items():
        if hashlib.md5(contents.get(batch, b"")).hexdigest() != md5:
            raise ValueError(f"{batch} is missing or not the published file")
        # a pickle that is known executes nothing
        values = pickle.loads(contents[batch], encoding="bytes")
        labels.append(np.array(values[b"labels"]))
        pixels.append(values[b"data"])

    images = np.concatenate(pixels).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    order = stored_order(name, len(images))
    return images[order], np.concatenate(labels)[order]


def stored_order(name: str, count: int) -> list[int]:
    """Return the order in which TFDS stores a split: by the MD5 of the split's name and the
    example's number.
    """
    return sorted(range(count), key=lambda number: hashlib.md5(f"{name}{number}".encode()).digest())
