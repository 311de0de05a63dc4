"""Image classification data sets of TensorFlow Datasets (TFDS)."""

import contextlib
import dataclasses
import fnmatch
import logging
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
from PIL import Image

from cifar_towers import files
from cifar_towers.data import image_files
from cifar_towers.data.dataset import CLASSES, DatasetInfo, Split, moments
from cifar_towers.errors import DataError, RunError, UsageError, did_you_mean, error_line, listed
from cifar_towers.registry import BUILT_IN, FOLDER, suggest_data

log = logging.getLogger(__name__)

Builder: TypeAlias = Any  # tfds.core.DatasetBuilder; importing TFDS takes seconds
PORTS = {"http": 80, "https": 443, "ftp": 21}
CONNECT_TIMEOUT_SECONDS = 3.0
UNNAMED = ("cifar10_1", "cifar10_corrupted")  # builders that number CIFAR-10's classes and do not name them
REPAIR = "replace it by a good copy, or delete it, and it is prepared again"


def locate(name: str, data_dir: str = "") -> Path:
    """Return TFDS's directory if TFDS or the directory has the data set. This takes seconds and no TensorFlow.

    Raises:
      UsageError: neither has a data set of this name.
    """
    directory = tfds_directory(data_dir)
    builder = re.split("[/:]", name)[0]
    if (directory / builder).exists():
        return directory
    names = import_tfds().list_builders(with_community_datasets=False)
    if builder not in names:
        guess = suggest_data(name) or did_you_mean(builder, [*BUILT_IN, *names])
        raise UsageError(
            f"dataset={name}: {guess}neither TensorFlow Datasets nor {directory} has it; built in are "
            f"{', '.join(BUILT_IN)}, {FOLDER}<path>"
        )
    return directory


def match(name: str, directory: Path) -> tuple[str, ...]:
    """Return the configs that a name with * matches, as fog_1 to fog_5 of `cifar10_corrupted/fog_*`; () without *."""
    if "*" not in name:
        return ()
    builder, _, pattern = name.partition("/")
    configs = sorted(_make_builder(builder, directory).builder_configs)
    found = fnmatch.filter(configs, pattern)
    if not found or not all(re.search("_[1-5]$", config) for config in found):
        known = listed(configs) or "none"
        raise UsageError(f"dataset={name} is no pattern of corruptions, as fog_*; {builder} has {known}")
    return tuple(found)


def load(name: str, directory: Path, image_size: int, wanted: Sequence[str]) -> dict[str, Split]:
    """Return those of train and test that are wanted and exist, each image's central square resized to `image_size`.

    If the name has a *, return the test split of each wanted config instead. The test split is `test`; `validation`, if
    there is no test or its images have no labels; otherwise the last fifth of `train`.

    Raises:
      UsageError: the examples are not images with one of several classes each.
      DataError: the data set cannot be downloaded or read.
    """
    if "*" in name:
        names = {config: f"{name.partition('/')[0]}/{config}" for config in match(name, directory) if config in wanted}
        return {config: load(names[config], directory, image_size, ["test"])["test"] for config in names}
    tfds = import_tfds()
    builder = _make_builder(name, directory)
    image, label = (_find_feature(builder.info, kind) for kind in (tfds.features.Image, tfds.features.ClassLabel))
    if not image or not label:
        features = ", ".join(builder.info.features)
        raise UsageError(f"dataset={name} has no images with one class each; its features are {features}")
    if builder.info.features[label].num_classes == 1:
        raise UsageError(f"dataset={name} has one class; at least two are needed")
    try:
        if not builder.is_prepared():
            _check_reachable(name, directory, builder)
            builder = prepare(name, directory)
        names = {part: split for part, split in _split_names(name, builder, label).items() if part in wanted}
        if names.get("test", "test") != "test":
            log.info("dataset=%s: its %s is used as the test split", name, names["test"])
        elif "train" in names and "validation" in builder.info.splits:
            log.info("dataset=%s: its validation is not used; validation_examples holds out some of train", name)
        # Test first: it is small, and more likely to lack labels.
        splits = {part: _read(builder, split, image, label, image_size) for part, split in reversed(names.items())}
    except RunError:
        raise
    except Exception as error:
        raise DataError(f"{name} in {directory} cannot be read ({error_line(error)}); {REPAIR}") from error
    class_names = CLASSES if builder.name in UNNAMED else tuple(builder.info.features[label].names)
    info = DatasetInfo(class_names, image_size, *moments(splits[next(iter(names))].images))
    return {part: dataclasses.replace(splits[part], info=info) for part in names}


def tfds_directory(data_dir: str = "") -> Path:
    """Return the directory of TFDS's data sets: `data_dir`, `TFDS_DATA_DIR` or `~/tensorflow_datasets`.

    Raises:
      DataError: the path begins with the home directory of a user who has none.
    """
    directory = Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")
    try:
        return directory.expanduser()
    except RuntimeError as error:
        raise DataError(f"{directory}: that user has no home directory; give --data_dir=<a directory>") from error


def import_tfds() -> ModuleType:
    """Import TFDS, which takes seconds and reads TFDS_DATA_DIR. Switch its progress bars and log lines off."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    logging.getLogger("absl").setLevel(logging.ERROR)
    return tfds


def prepare(name: str, directory: Path, title: str = "") -> Builder:
    """Return the builder of a prepared data set. Download and prepare it first, unless another process does."""
    builder = _make_builder(name, directory)
    if not builder.is_prepared():
        with _prepare_lock(directory):
            builder = _make_builder(name, directory)
            if not builder.is_prepared():  # by another process, in the meantime
                log.info("preparing %s in %s", title or name, directory)
                builder.download_and_prepare()
    return builder


def in_stored_order(builder: Builder, split: str, batch_size: int | None = None) -> Iterable[dict[str, Any]]:
    """Return the examples of a prepared data set's split as arrays, file by file; in batches if a size is given."""
    tfds = import_tfds()
    config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    dataset = builder.as_dataset(split=split, shuffle_files=False, batch_size=batch_size, read_config=config)
    return tfds.as_numpy(dataset)


def reachable(url: str) -> bool:
    """Return whether a download can succeed: whether the URL's host, or its proxy, accepts a connection in time.

    The time includes name resolution. Addresses with an unknown port count as reachable.
    """
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.netloc):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = parts.hostname, parts.port or PORTS.get(parts.scheme)
    if not address[1]:
        return True
    connected = threading.Event()

    def connect():
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=CONNECT_TIMEOUT_SECONDS):
            connected.set()

    thread = threading.Thread(target=connect, daemon=True)  # name resolution has no timeout of its own
    thread.start()
    thread.join(CONNECT_TIMEOUT_SECONDS)
    return connected.is_set()


@contextlib.contextmanager
def _prepare_lock(directory: Path) -> Iterator[None]:
    """Let one process at a time prepare a data set in a directory, if the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(files.locked(directory / ".preparing")):
                log.info("waiting for another process that prepares a data set in %s", directory)
                stack.enter_context(files.locked(directory / ".preparing", wait=True))
        yield


def _make_builder(name: str, directory: Path) -> Builder:
    """Make TFDS's builder of a data set, from the description in the prepared copy if there is one."""
    tfds = import_tfds()
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


def _find_feature(info: Any, kind: type) -> str | None:
    """Return the name of the supervised feature of this kind, or else of the only feature of this kind."""
    names = [name for name, feature in info.features.items() if isinstance(feature, kind)]
    supervised = [name for name in info.supervised_keys or () if name in names]
    return next(iter(supervised or names), None) if supervised or len(names) == 1 else None


def _split_names(name: str, builder: Builder, label: str) -> dict[str, str]:
    """Return the names of TFDS's splits for `train` and `test`, or for `test` alone, as `load` chooses them."""
    splits = builder.info.splits
    test = next((split for split in ("test", "validation") if split in splits), None)
    if test == "test" and "validation" in splits and next(iter(in_stored_order(builder, "test")))[label] < 0:
        test = "validation"
    if "train" in splits:
        return {"train": "train", "test": test} if test else {"train": "train[:80%]", "test": "train[80%:]"}
    if not test:
        raise UsageError(f"dataset={name} has no split train, test or validation; its splits are {', '.join(splits)}")
    return {"test": test}


def _check_reachable(name: str, directory: Path, builder: Builder) -> None:
    hosts = {urlsplit(url)[:2] for url in builder.url_infos or ()}  # some builders do not list their URLs
    unreachable = sorted({host for scheme, host in hosts if host and not reachable(f"{scheme}://{host}")})
    if unreachable:
        raise DataError(
            f"no {name} in {directory} and {', '.join(unreachable)} does not answer; put a prepared copy there, "
            f"or give --data_dir=<a directory that holds {os.path.relpath(builder.data_dir, directory)}>"
        )


def _read(builder: Builder, split: str, image: str, label: str, image_size: int) -> Split:
    """Return a split, with people's votes if there is a `soft_label`, as in CIFAR-10H."""
    images, labels, votes = [], [], []
    for example in in_stored_order(builder, split):
        levels = example[image]
        if example[label] < 0:
            raise UsageError(
                f"dataset={builder.name}: its split {split} has images without a class (label {example[label]}), which "
                "can be neither trained on nor scored; give another --dataset"
            )
        gray = levels.shape[-1] == 1
        if levels.dtype != np.uint8 and not (gray and levels.dtype == np.uint16):
            kind = f"are {levels.dtype}, and must be uint8, or uint16 if they are grey"
            raise UsageError(f"dataset={builder.name}: its images {kind}; give another --dataset")
        images.append(image_files.to_levels(Image.fromarray(levels.squeeze(-1) if gray else levels), image_size))
        labels.append(example[label])
        votes += [example["soft_label"]] if "soft_label" in example else []
    return Split(np.stack(images), np.array(labels, np.int64), votes=np.stack(votes) if votes else None)
