"""A data set of the user's own: a folder with a subfolder of images for each class."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import DataError, printable

log = logging.getLogger(__name__)

TRAIN_NAMES = ("train", "training")  # such a folder is a class only if images lie directly in it
TEST_NAMES = ("test", "val", "valid", "validation")  # names of the test folder beside `train`
TEST_FRACTION = 0.2  # of each class, if the folder has no test
MAX_LISTED = 5  # names in one error message
LAYOUT = "it needs a subfolder of images for each class, or train/ and test/ with these"


class Folder(NamedTuple):
    """The image files of a folder by class, in an order that does not depend on the machine."""

    root: Path
    train: dict[str, list[Path]]
    test: dict[str, list[Path]]
    class_roots: tuple[Path, ...]  # the folders whose subfolders are classes

    def contains(self, path: Path) -> bool:
        """Return whether files written to `path` would be among the pictures or taken for a class."""
        path = path.expanduser().resolve()
        return path == self.root.resolve() or any(path.is_relative_to(root.resolve()) for root in self.class_roots)


def scan(root: Path) -> Folder:
    """List the images of a folder that has `train/` and `test/` with a subfolder per class, or only such subfolders.

    In the second case a fifth of each class becomes the test split, chosen by the hashes of the files' names.

    Raises:
      DataError: the folder is missing, has fewer than two classes, or has a class without images to train or test on.
    """
    try:
        root = root.expanduser().absolute()
        folder = _scan(root)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        path, reason = getattr(error, "filename", None) or root, getattr(error, "strerror", None) or error
        raise DataError(
            f"dataset=folder:{root}: {path} cannot be read: {reason}; if it was moved, give its place by "
            "--dataset=folder:<path>"
        ) from error
    _check(folder)
    return folder


def load(folder: Folder, image_size: int) -> dict[str, Split]:
    """Return train and test, with each image read by `image_files.read`.

    Raises:
      DataError: some images cannot be read; the message names them.
    """
    class_names = tuple(folder.train)
    train, train_labels, train_errors = _read(folder.train, class_names, image_size)
    test, test_labels, test_errors = _read(folder.test, class_names, image_size)
    if errors := [*train_errors, *test_errors]:
        count = len(train) + len(test)
        raise DataError(f"{len(errors)} of {count} images cannot be read: {_listed(errors)}; repair or remove them")
    info = DatasetInfo(class_names, image_size, *moments(train))
    return {"train": Split(train, train_labels, info), "test": Split(test, test_labels, info)}


def holds_pictures(root: Path) -> bool:
    """Return whether a folder has pictures, at most two folders deep, and nothing that TFDS downloads or prepares."""
    if (root / "downloads").exists() or any(root.glob("*/*/dataset_info.json")):
        return False
    return any(image_files.is_picture(path) for depth in ("*", "*/*", "*/*/*") for path in root.glob(depth))


def _scan(root: Path) -> Folder:
    test_root = next((root / name for name in TEST_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test_root:
        train_root = root / "train"
        return Folder(root, _list_classes(train_root), _list_classes(test_root), (train_root, test_root))
    classes = _list_classes(root)
    for name, files in classes.items():
        if name.lower() in TRAIN_NAMES and not any(path.parent == root / name for path in files):
            raise DataError(
                f"dataset=folder:{root}: {name} is no class, as no images lie directly in it; call it train and put "
                f"test beside it, or give --dataset=folder:{root / name}, of which a fifth is used for the test"
            )
    splits = {name: _split(files) for name, files in classes.items()}
    train, test = ({name: split[index] for name, split in splits.items()} for index in (0, 1))
    return Folder(root, train, test, (root,))


def _list_classes(root: Path) -> dict[str, list[Path]]:
    """Return the images in and below each subfolder, by its name, sorted. Hidden files and folders are ignored."""
    classes: dict[str, list[Path]] = {}
    errors: list[OSError] = []
    num_ignored = 0
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        files = [
            Path(parent, name)
            for parent, _, names in os.walk(folder, onerror=errors.append)
            for name in names
            if not name.startswith(".")
        ]
        classes[folder.name] = sorted(filter(image_files.is_picture, files))
        num_ignored += len(files) - len(classes[folder.name])
    if errors:
        folders = _listed([f"{error.filename} ({error.strerror})" for error in errors])
        raise DataError(f"dataset=folder:{root}: cannot be read: {folders}; make these folders readable or remove them")
    if num_ignored:
        log.info("%s", printable(f"dataset=folder:{root}: {image_files.describe_ignored(num_ignored)}"))
    return classes


def _split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Divide a class's images into (train, test), by the hashes of their names alone."""
    by_hash = sorted(files, key=_hash)
    count = max(1, round(TEST_FRACTION * len(files)))
    return sorted(by_hash[count:]), sorted(by_hash[:count])


def _hash(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}")).digest()


def _check(folder: Folder) -> None:
    prefix = f"dataset=folder:{folder.root}"
    if len(folder.train) < 2:
        classes = f"only {next(iter(folder.train))}" if folder.train else "none"
        raise DataError(f"{prefix}: at least two classes are needed, and there is {classes}; {LAYOUT}")
    if unknown := [name for name in folder.test if name not in folder.train]:
        raise DataError(f"{prefix}: {_listed(unknown)} in test, and not in train; {LAYOUT}")
    names = (*folder.train, os.fspath(folder.root))
    if not_utf8 := [name for name in names if name != name.encode(errors="ignore").decode()]:
        raise DataError(f"{prefix}: {_listed(not_utf8)} is not valid UTF-8, which config.json needs; rename it")
    for split, files in (("train", folder.train), ("test", folder.test)):
        if empty := [name for name in folder.train if not files.get(name)]:
            needs = f"every class needs some ({', '.join(image_files.SUFFIXES)})"
            raise DataError(f"{prefix}: no images of {_listed(empty)} to {split} on; {needs}")


def _read(classes: dict[str, list[Path]], names: Sequence[str], size: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images, labels in the order of `names`, and a message for each file that cannot be read."""
    examples = [(path, label) for label, name in enumerate(names) for path in classes[name]]
    examples.sort(key=lambda example: _hash(example[0]))  # mixed, as some uses take the first examples
    paths, labels = zip(*examples, strict=True)
    levels, errors = image_files.read_all(paths, size)
    return levels, np.array(labels, np.int64), [f"{paths[index]} {error}" for index, error in errors.items()]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
