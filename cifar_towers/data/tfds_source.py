"""Image classification data sets of TensorFlow Datasets (TFDS)."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from cifar_towers import files
from cifar_towers.data import image_files
from cifar_towers.data.connectivity import reachable
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import DataError, RunError, UsageError, did_you_mean, error_line
from cifar_towers.registry import BUILT_IN, FOLDER

log = logging.getLogger(__name__)

REPAIR = "replace it by a good copy, or delete it, and it is prepared again"


def locate(name: str, data_dir: str = "") -> Path:
    """TFDS's directory, once it is known within seconds and without TensorFlow that TFDS or the directory has the data
    set.

    Raises:
      UsageError: neither has a data set of this name.
    """
    directory = tfds_directory(data_dir)
    builder = re.split("[/:]", name)[0]
    if (directory / builder).exists():
        return directory
    names = import_tfds().list_builders(with_community_datasets=False)
    if builder not in names:
        built_in = ", ".join((*BUILT_IN, f"{FOLDER}<path>"))
        folder = f"did you mean {FOLDER}{name}? " if Path(name).is_dir() else ""
        raise UsageError(
            f"dataset={name}: {folder or did_you_mean(builder, [*BUILT_IN, *names])}neither TensorFlow Datasets nor "
            f"{directory} has it; built in are {built_in}"
        )
    return directory


def load(name: str, directory: Path, side: int) -> tuple[Split, Split]:
    """Train and test as arrays of side x side pixels, from the central square of each image.

    Tests on `test`, or on `validation` if there is no test or its images have no labels, or else on the last fifth of
    `train`.

    Raises:
      UsageError: it is none of images with one of several classes each.
      DataError: it cannot be downloaded or read.
    """
    tfds = import_tfds()
    builder = _make_builder(tfds, name, directory)
    image, label = (_find_feature(builder.info, kind) for kind in (tfds.features.Image, tfds.features.ClassLabel))
    if not image or not label:
        features = ", ".join(builder.info.features)
        raise UsageError(f"dataset={name} has no images with one class each; its features are {features}")
    if builder.info.features[label].num_classes == 1:
        raise UsageError(f"dataset={name} has one class; at least two are needed")
    try:
        if not builder.is_prepared():
            _check_reachable(name, directory, builder)
            builder = prepare(lambda: _make_builder(tfds, name, directory), name, directory)
        names = _split_names(name, builder, lambda split: next(iter(in_stored_order(tfds, builder, split)))[label] >= 0)
        # test first: it is small, and more likely to lack labels
        test, train = (_read(tfds, builder, split, image, label, side) for split in reversed(names))
    except RunError:
        raise
    except Exception as error:
        raise DataError(f"{name} in {directory} cannot be read ({error_line(error)}); {REPAIR}") from error
    info = DatasetInfo(tuple(builder.info.features[label].names), side, *moments(train[0]))
    return Split(*train, info), Split(*test, info)


def tfds_directory(data_dir: str = "") -> Path:
    """Directory of TFDS's data sets: `data_dir`, `TFDS_DATA_DIR` or `~/tensorflow_datasets`.

    Raises:
      DataError: it begins with the home directory of a user who has none.
    """
    directory = Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    try:
        return directory.expanduser()
    except RuntimeError as error:
        raise DataError(f"{directory}: that user has no home directory; give --data_dir=<a directory>") from error


def import_tfds() -> ModuleType:
    """Import TFDS, which takes seconds and reads TFDS_DATA_DIR, without its progress bars and log lines."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    logging.getLogger("absl").setLevel(logging.ERROR)
    return tfds


def prepare(make_builder: Callable, name: str, directory: Path):
    """Return the builder of a prepared data set; download and prepare it first unless another process does."""
    builder = make_builder()
    if not builder.is_prepared():
        with _prepare_lock(directory):
            builder = make_builder()
            if not builder.is_prepared():  # by another process, in the meantime
                log.info("preparing %s in %s", name, directory)
                builder.download_and_prepare()
    return builder


def in_stored_order(tfds: ModuleType, builder, split: str, batch_size: int | None = None) -> Iterable[dict]:
    """The examples of a split of a prepared data set as arrays, file by file; in batches if `batch_size` is given."""
    config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    dataset = builder.as_dataset(split=split, shuffle_files=False, batch_size=batch_size, read_config=config)
    return tfds.as_numpy(dataset)


@contextlib.contextmanager
def _prepare_lock(directory: Path) -> Iterator[None]:
    """Lets one process at a time prepare a data set in a directory, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(files.locked(directory / ".preparing")):
                log.info("waiting for another process that prepares a data set in %s", directory)
                stack.enter_context(files.locked(directory / ".preparing", wait=True))
        yield


def _make_builder(tfds: ModuleType, name: str, directory: Path):
    """TFDS's builder of a data set; made from the description in the prepared copy, if there is one."""
    copy = directory / re.split("[/:]", name)[0]
    try:
        return tfds.builder(name, data_dir=str(directory))
    except Exception as error:
        if copy.exists():
            unknown = isinstance(error, tfds.core.DatasetNotFoundError)
            reason = "dataset_info.json or features.json is missing" if unknown else error_line(error)
            raise DataError(
                f"dataset={name} cannot be read from {copy} ({reason}); if the name is right, {REPAIR}"
            ) from error
        raise UsageError(f"dataset={name}: {error_line(error)}") from error


def _find_feature(info, kind: type) -> str | None:
    """The name of the supervised feature of this kind, or of the only one of this kind."""
    names = [name for name, feature in info.features.items() if isinstance(feature, kind)]
    supervised = [name for name in info.supervised_keys or () if name in names]
    return next(iter(supervised or names), None) if supervised or len(names) == 1 else None


def _split_names(name: str, builder, is_labeled: Callable[[str], bool]) -> tuple[str, str]:
    """The splits to train and to test on; `validation` where the first image of `test` has no label."""
    splits = builder.info.splits
    if "train" not in splits:
        raise UsageError(f"dataset={name} has no split to train on; its splits are {', '.join(splits)}")
    test = next((split for split in ("test", "validation") if split in splits), None)
    if test == "test" and "validation" in splits and not is_labeled("test"):
        test = "validation"
    return ("train", test) if test else ("train[:80%]", "train[80%:]")


def _check_reachable(name: str, directory: Path, builder) -> None:
    hosts = {urlsplit(url)[:2] for url in builder.url_infos or ()}  # some builders do not list their URLs
    unreachable = sorted({host for scheme, host in hosts if host and not reachable(f"{scheme}://{host}")})
    if unreachable:
        raise DataError(
            f"no {name} in {directory} and {', '.join(unreachable)} does not answer; put a prepared copy there, "
            f"or give --data_dir=<a directory that holds {builder.name}/{builder.version}>"
        )


def _read(tfds: ModuleType, builder, split: str, image: str, label: str, side: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = [], []
    for example in in_stored_order(tfds, builder, split):
        levels = example[image]
        if example[label] < 0:
            raise UsageError(
                f"dataset={builder.name}: its split {split} has images without a class (label {example[label]}), which "
                "can be neither trained on nor scored; give another --dataset"
            )
        gray = levels.shape[-1] == 1
        images.append(image_files.resize_square(Image.fromarray(levels.squeeze(-1) if gray else levels), side))
        labels.append(example[label])
    return np.stack(images), np.array(labels, np.int64)
