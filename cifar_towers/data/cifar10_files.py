"""CIFAR-10's own files, in a folder or an archive, as its home page, torchvision and Keras give them.

Nothing is unpacked to the disk. A pickle yields plain values only: nothing that it names is imported or called.
"""

import gzip
import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

import numpy as np

from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, error_line

NAMES = (  # of copies in a place; the last four are those of Keras's versions
    *("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "cifar-10-batches-py"),
    *("cifar-10-batches-py-target/cifar-10-batches-py", "cifar-10-batches-py-target_archive"),
    "cifar-10-batches-py.tar.gz",
)
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
IMAGES_PER_BATCH, IMAGE_SHAPE, IMAGE_BYTES = 10_000, (3, 32, 32), 3072
MAX_BATCH_BYTES, MAX_ARCHIVE_BYTES = 65_000_000, 400_000_000  # no more is read; protocol 2 may take 62 and 370 MB
ARRAY_GLOBALS = {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct")}  # in pickles
REPLACE = "replace it by a good copy, or delete it"


def find(data_dir: str, tfds_directory: Path) -> Path | None:
    """Return the first copy of CIFAR-10's files in TFDS's directory, Keras's cache or `./data`; None without any.

    If a `data_dir` is given, it is TFDS's directory, and the only place.
    """
    keras = os.path.expanduser(os.environ.get("KERAS_HOME") or "~/.keras")
    places = (tfds_directory,) if data_dir else (tfds_directory, Path(keras, "datasets"), Path("data"))
    return next((path for place in places for path in (place, *map(place.joinpath, NAMES)) if is_copy(path)), None)


def is_copy(path: Path) -> bool:
    """Return whether a path is an archive, or a folder with at least one of CIFAR-10's files."""
    if path.is_file():
        return path.name.endswith((".tar.gz", "_archive"))
    return any((path / file).is_file() for name in BATCHES for file in _file_names(name))


def read_split(copy: Path, name: str) -> Split:
    """Return `train` or `test` of a copy, not verified, in the order in which TFDS stores the split.

    Raises:
      DataError: a file is missing or damaged, or it is a pickle that would execute code.
    """
    path, batches = copy, []
    try:
        files = dict(_read_files(copy, _file_names(name)))
        for batch in BATCHES[name]:
            path = copy / (f"{batch}.bin" if f"{batch}.bin" in files else batch)
            if path.name not in files:
                raise FileNotFoundError("no such file")
            batches.append((_parse_binary if path.suffix else _parse_pickle)(files[path.name]))
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
