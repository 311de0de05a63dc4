"""CIFAR-10 through TensorFlow Datasets: located or downloaded, decoded to arrays, verified and cached.

Source of the images: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import logging
from pathlib import Path

import numpy as np

from cifar_towers.data import cache, tfds_source
from cifar_towers.data.connectivity import reachable
from cifar_towers.data.dataset import CLASSES, Split
from cifar_towers.errors import DataError, UsageError, error_line

log = logging.getLogger(__name__)

BUILDER = "cifar10/3.0.2"
ARCHIVE = "cifar-10-binary.tar.gz"
SOURCE_HOST = "www.cs.toronto.edu"
SIZES = {"train": 50_000, "test": 10_000}
DIGESTS = {  # `Split.digest` of the decoded splits
    "train": "c50e2d9aebe4fd88c438994f8eb0f97707faa404b3760eb30bd3ede49611335a",
    "test": "4b43d2e153a74d4688cbf861a0a06235f0f42c0171aceaf852242dd01a54fc6d",
}
PREPARE_AGAIN = "delete the copy, and it is prepared again"


def locate(data_dir: str = "") -> Path:
    """TFDS's directory, once it is known within seconds that CIFAR-10 is there, is cached or can be downloaded.

    Raises:
      DataError: there is no copy, decoded or prepared, no archive to prepare one from, and no way to download it.
      UsageError: a `data_dir` is given that has no copy and would not get one, as one is cached.
    """
    directory = tfds_source.tfds_directory(data_dir)
    if data_dir and _is_cached() and not (is_prepared(directory) or _archive(directory).exists()):
        problem = f"has no {BUILDER}" if directory.exists() else "does not exist"
        raise UsageError(
            f"data_dir={data_dir} {problem}, and would not be used: CIFAR-10 is read from {cache.directory()}; leave "
            f"data_dir out, or give one that holds {BUILDER}"
        )
    return _check_available(directory)


def is_prepared(directory: Path) -> bool:
    """Whether a TFDS directory has a prepared copy."""
    return (directory / BUILDER / "dataset_info.json").exists()


def load(directory: Path) -> tuple[Split, Split]:
    """Train and test as arrays, verified: from the cache, or else from the prepared copy.

    Raises:
      DataError: the copy cannot be prepared or read, or is not CIFAR-10 to the last bit.
    """
    return read_split(directory, "train"), read_split(directory, "test")


def read_split(directory: Path, name: str) -> Split:
    """`train` or `test` as by `load`."""
    split = cache.load(_cache_name(name), DIGESTS[name])
    if split:
        directory = cache.directory()
    else:
        split = _from_tfds(_check_available(directory), name)
        verify(name, split)
        cache.save(_cache_name(name), split)
    count, per_class, digest = len(split.labels), split.class_counts()[0], split.digest
    log.info("CIFAR-10 %s: %d images, %d per class, sha256 %s, from %s", name, count, per_class, digest[:16], directory)
    return split


def verify(name: str, split: Split) -> None:
    """Raises a DataError if a split differs from the published counts or the known digest."""
    counts, per_class = split.class_counts(), SIZES[name] // len(CLASSES)
    if len(split.labels) != SIZES[name] or (counts != per_class).any():
        raise DataError(
            f"CIFAR-10's {name} split has {len(split.labels)} examples, per class {counts.tolist()}; it must have "
            f"{SIZES[name]}, {per_class} per class: {PREPARE_AGAIN}"
        )
    if split.digest != DIGESTS[name]:
        raise DataError(
            f"CIFAR-10's {name} split is damaged: its digest is {split.digest}, it must be {DIGESTS[name]}; "
            f"{PREPARE_AGAIN}"
        )


def _check_available(directory: Path) -> Path:
    """Returns a TFDS directory, or raises a DataError if CIFAR-10 can be had neither there nor elsewhere."""
    archive = _archive(directory)
    if _is_cached() or is_prepared(directory) or archive.exists() or reachable(f"https://{SOURCE_HOST}"):
        return directory
    raise DataError(
        f"no CIFAR-10 in {directory} and {SOURCE_HOST} does not answer; put {ARCHIVE} into {archive.parent}, "
        "or give --data_dir=<a directory that holds cifar10/3.0.2>, or train on --dataset=synthetic"
    )


def _is_cached() -> bool:
    return all(cache.contains(_cache_name(name)) for name in SIZES)


def _archive(directory: Path) -> Path:
    return directory / "downloads" / "manual" / ARCHIVE  # where TFDS expects a manually downloaded one


def _cache_name(name: str) -> str:
    return f"cifar10-{name}-{DIGESTS[name][:16]}.npy"


def _from_tfds(directory: Path, name: str) -> Split:
    """A split of the prepared copy, which is prepared first if necessary, in the order that the digests are of."""
    tfds = tfds_source.import_tfds()

    def make_builder():
        return tfds.builder(BUILDER.replace("/", ":"), data_dir=str(directory))

    try:
        builder = tfds_source.prepare(make_builder, "CIFAR-10 (170 MB)", directory)
        batches = tfds_source.in_stored_order(tfds, builder, name, batch_size=1000)
        images, labels = zip(*((batch["image"], batch["label"]) for batch in batches), strict=True)
        return Split(np.concatenate(images), np.concatenate(labels).astype(np.int64))
    except Exception as error:
        hint = PREPARE_AGAIN if is_prepared(directory) else f"put {ARCHIVE} into {_archive(directory).parent}"
        raise DataError(
            f"CIFAR-10's {name} split in {directory} cannot be read ({error_line(error)}); {hint}"
        ) from error
