"""CIFAR-10 through TensorFlow Datasets: found or downloaded, decoded to arrays, verified, and kept decoded.

Source of the images: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import logging
import os
from pathlib import Path

import numpy as np

from cifar_towers.data import cache, tfds_source
from cifar_towers.data.connectivity import reachable
from cifar_towers.data.dataset import CLASSES, Split
from cifar_towers.errors import DataError, error_text

log = logging.getLogger(__name__)

BUILDER = "cifar10/3.0.2"
ARCHIVE = "cifar-10-binary.tar.gz"
SOURCE_HOST = "www.cs.toronto.edu"
SIZES = {"train": 50_000, "test": 10_000}
DIGESTS = {  # of the decoded splits, as `Split.digest` says them
    "train": "c50e2d9aebe4fd88c438994f8eb0f97707faa404b3760eb30bd3ede49611335a",
    "test": "4b43d2e153a74d4688cbf861a0a06235f0f42c0171aceaf852242dd01a54fc6d",
}


def locate(data_dir: str = "", timeout_seconds: float = 3.0) -> Path:
    """Where CIFAR-10 is prepared, or can be, or need not be: checked in seconds, without TensorFlow.

    Args:
      data_dir: TFDS's directory; by default `TFDS_DATA_DIR` or `~/tensorflow_datasets`.
      timeout_seconds: how long to wait for the download's host.

    Raises:
      DataError: no copy, decoded or prepared, no archive to prepare it from, and no way to download one.
    """
    directory = tfds_directory(data_dir)
    archive = _archive(directory)
    decoded = all(cache.holds(_decoded(name), count) for name, count in SIZES.items())
    if decoded or is_prepared(directory) or archive.exists() or reachable(f"https://{SOURCE_HOST}", timeout_seconds):
        return directory
    raise DataError(
        f"no CIFAR-10 in {directory} and {SOURCE_HOST} does not answer; put {ARCHIVE} into {archive.parent}, "
        "or give --data_dir=<a directory that holds cifar10/3.0.2>, or train on --dataset=synthetic"
    )


def tfds_directory(data_dir: str = "") -> Path:
    """Where TFDS keeps its data sets: `data_dir`, `TFDS_DATA_DIR` or `~/tensorflow_datasets`.

    Raises:
      DataError: it begins with a `~` that stands for no directory.
    """
    directory = Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    try:
        return directory.expanduser()
    except RuntimeError as error:
        raise DataError(f"{directory}: that user has no home directory; give --data_dir=<a directory>") from error


def _archive(directory: Path) -> Path:
    """Where TFDS takes what somebody has downloaded for it."""
    return directory / "downloads" / "manual" / ARCHIVE


def is_prepared(directory: Path) -> bool:
    """Whether a prepared copy stands in a TFDS directory."""
    return (directory / BUILDER / "dataset_info.json").exists()


def load(directory: Path) -> tuple[Split, Split]:
    """Train and test as arrays, verified.

    Raises:
      DataError: the copy cannot be prepared or read, or is not CIFAR-10 to the last bit.
    """
    return read_split(directory, "train"), read_split(directory, "test")


def read_split(directory: Path, name: str) -> Split:
    """`train` or `test` as arrays, verified: as an earlier start has decoded it, or else from the prepared copy.

    Raises:
      DataError: as `load`.
    """
    split = cache.load(_decoded(name), DIGESTS[name])
    if split:
        directory = cache.directory()
    else:
        split = _from_tfds(locate(str(directory)), name)
        verify(name, split)
        cache.save(_decoded(name), split)
    count, each, digest = len(split.labels), split.class_counts()[0], split.digest
    log.info("CIFAR-10 %s: %d images, %d a class, sha256 %s, from %s", name, count, each, digest[:16], directory)
    return split


def verify(name: str, split: Split) -> None:
    """Holds a split against the published counts and the known digest.

    Raises:
      DataError: naming the split and what differs.
    """
    counts = split.class_counts()
    if len(split.labels) != SIZES[name] or (counts != SIZES[name] // len(CLASSES)).any():
        raise DataError(
            f"CIFAR-10's {name} split has {len(split.labels)} examples, {counts.tolist()} a class; it must have "
            f"{SIZES[name]}, {SIZES[name] // len(CLASSES)} a class: delete the copy and let it be prepared again"
        )
    if split.digest != DIGESTS[name]:
        raise DataError(
            f"CIFAR-10's {name} split is damaged: its digest is {split.digest}, it must be {DIGESTS[name]}; "
            "delete the copy and let it be prepared again"
        )


def _decoded(name: str) -> str:
    """What a decoded split is called in the cache."""
    return f"cifar10-{name}-{DIGESTS[name][:16]}"


def _from_tfds(directory: Path, name: str) -> Split:
    """A split of the prepared copy, prepared before if need be."""
    tfds = tfds_source.import_tfds()

    def make_builder():
        return tfds.builder(BUILDER.replace("/", ":"), data_dir=str(directory))

    try:
        builder = tfds_source.whole(make_builder, "CIFAR-10 (170 MB)", directory)
        # the stored order is the one the digests are of
        return _to_split(tfds_source.in_stored_order(tfds, builder, name, batch_size=1000))
    except Exception as error:
        mend = "delete the copy and let it be prepared again"
        if not is_prepared(directory):
            mend = f"put {ARCHIVE} into {_archive(directory).parent}"
        raise DataError(
            f"CIFAR-10's {name} split in {directory} cannot be read "
            f"({type(error).__name__}: {error_text(error, 300)}); {mend}"
        ) from error


def _to_split(batches) -> Split:
    images, labels = zip(*((batch["image"], batch["label"]) for batch in batches), strict=True)
    return Split(np.concatenate(images), np.concatenate(labels).astype(np.int64))
