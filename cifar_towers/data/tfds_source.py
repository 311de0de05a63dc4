"""Any data set of TensorFlow Datasets that has images and their classes."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from cifar_towers.data import image_files
from cifar_towers.data.connectivity import reachable
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import DataError, RunError, UsageError, error_text
from cifar_towers.files import atomic_io

log = logging.getLogger(__name__)

MEND = "put a good copy there, or delete it and let it be prepared again"


def load(name: str, directory: Path, side: int) -> tuple[Split, Split]:
    """Train and test as arrays of side x side pixels, from the central square of each image.

    What tests is `test`, or where there is none or its images have no classes `validation`, or where there is none
    either the last fifth of `train`.

    Raises:
      UsageError: no such data set, or none of images with one of several classes each. DataError: it cannot be had.
    """
    tfds = import_tfds()
    builder = _builder(tfds, name, directory)
    picture, label = (_feature(builder.info, kind) for kind in (tfds.features.Image, tfds.features.ClassLabel))
    if not picture or not label:
        raise UsageError(f"dataset={name} has no images with one class each; it has {', '.join(builder.info.features)}")
    if builder.info.features[label].num_classes == 1:
        raise UsageError(f"dataset={name} has one class; two are the fewest")
    try:
        if not builder.is_prepared():
            _refuse_if_unreachable(name, directory, builder)
            builder = whole(lambda: _builder(tfds, name, directory), name, directory)
        parts = _parts(name, builder, lambda part: next(iter(in_stored_order(tfds, builder, part)))[label] >= 0)
        # the test first: it is small, and the more likely to lack classes
        test, train = (_read(tfds, builder, part, picture, label, side) for part in reversed(parts))
    except RunError:
        raise
    except Exception as error:
        raise DataError(f"{name} in {directory} cannot be read ({_reason(error)}); {MEND}") from error
    info = DatasetInfo(tuple(builder.info.features[label].names), side, *moments(train[0]))
    return Split(*train, info), Split(*test, info)


def import_tfds() -> ModuleType:
    """TensorFlow Datasets without its bars and notes. Importing it takes seconds, and it reads TFDS_DATA_DIR then."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    logging.getLogger("absl").setLevel(logging.ERROR)
    return tfds


def whole(make_builder: Callable, name: str, directory: Path):
    """The builder that `make_builder()` makes of a data set that stands prepared in TFDS's directory: prepared by now,
    by this process or by one that does so already."""
    builder = make_builder()
    if not builder.is_prepared():
        with _prepare_lock(directory):
            builder = make_builder()
            if not builder.is_prepared():  # another process has, in the meantime
                log.info("preparing %s in %s", name, directory)
                builder.download_and_prepare()
    return builder


def in_stored_order(tfds: ModuleType, builder, part: str, batch_size: int | None = None) -> Iterable[dict]:
    """The examples of a part of a prepared set as arrays, file after file; in batches, if so many are given."""
    config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    return tfds.as_numpy(builder.as_dataset(split=part, shuffle_files=False, batch_size=batch_size, read_config=config))


@contextlib.contextmanager
def _prepare_lock(directory: Path) -> Iterator[None]:
    """Waits until no other process prepares a data set there, as two would both do it, and one fail; where locks are
    not to be had, goes on without."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(atomic_io.locked(directory / ".preparing")):
                log.info("waiting for another process to prepare what it needs in %s", directory)
                stack.enter_context(atomic_io.locked(directory / ".preparing", wait=True))
        yield


def _builder(tfds, name: str, directory: Path):
    """TFDS's builder of a data set; if there is a prepared copy, it is made from the description in that."""
    copy = directory / re.split("[/:]", name)[0]
    try:
        return tfds.builder(name, data_dir=str(directory))
    except Exception as error:
        unknown = isinstance(error, tfds.core.DatasetNotFoundError)
        if copy.exists():
            why = "dataset_info.json or features.json is missing" if unknown else _reason(error)
            told = f"dataset={name} cannot be read from {copy} ({why}); if the name is right, {MEND}"
            raise DataError(told) from error
        nowhere = f"TensorFlow Datasets has none of this name, nor has {directory}"
        raise UsageError(f"dataset={name}: {nowhere if unknown else _reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error_text(error, 300)}"


def _feature(info, kind: type) -> str | None:
    """The name of the feature of a kind that is learned from, or of the only one there is."""
    names = [name for name, feature in info.features.items() if isinstance(feature, kind)]
    named = [name for name in info.supervised_keys or () if name in names]
    return next(iter(named or names), None) if named or len(names) == 1 else None


def _parts(name: str, builder, labelled: Callable[[str], bool]) -> tuple[str, str]:
    """What is trained on, and what is tested on: `validation` for a `test` whose first image is not `labelled`."""
    splits = builder.info.splits
    if "train" not in splits:
        raise UsageError(f"dataset={name} has no split to train on; it has {', '.join(splits)}")
    named = next((split for split in ("test", "validation") if split in splits), None)
    if named == "test" and "validation" in splits and not labelled("test"):
        named = "validation"
    return ("train", named) if named else ("train[:80%]", "train[80%:]")


def _refuse_if_unreachable(name: str, directory: Path, builder) -> None:
    hosts = {urlsplit(url)[:2] for url in builder.url_infos or ()}  # some tell nothing of what they will download
    silent = sorted({host for scheme, host in hosts if host and not reachable(f"{scheme}://{host}")})
    if silent:
        raise DataError(
            f"no {name} in {directory} and {', '.join(silent)} does not answer; put a prepared copy there, or give "
            f"--data_dir=<a directory that holds {builder.name}/{builder.version}>"
        )


def _read(tfds, builder, part: str, picture: str, label: str, side: int) -> tuple[np.ndarray, np.ndarray]:
    decoded, labels = [], []
    for example in in_stored_order(tfds, builder, part):
        levels = example[picture]
        if example[label] < 0:
            raise UsageError(
                f"dataset={builder.name}: its split {part} has images without a class (label {example[label]}), which "
                "can be neither learned nor scored; give another --dataset"
            )
        decoded.append(image_files.fit(Image.fromarray(levels.squeeze(-1) if levels.shape[-1] == 1 else levels), side))
        labels.append(example[label])
    return np.stack(decoded), np.array(labels, np.int64)
