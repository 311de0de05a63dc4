"""A data set of one's own: a folder with a subfolder of pictures for each class."""

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

TRAIN_NAMES = ("train", "training")  # of what is no class, unless it has pictures of its own
TEST_NAMES = ("test", "val", "valid", "validation")  # of the folder beside `train`
TEST_SHARE = 0.2  # of each class, where the folder is not split
MOST_NAMED = 5  # of the files that an error is about


class Folder(NamedTuple):
    """What stands in a folder: for each class the pictures to train on and to test on, in an order that is the same
    everywhere."""

    root: Path
    train: dict[str, list[Path]]
    test: dict[str, list[Path]]
    classes_in: tuple[Path, ...]  # the folders whose subfolders are classes

    def contains(self, path: Path) -> bool:
        """Whether what is put there would be taken for a class or its pictures, or mixed with them."""
        path = path.expanduser().resolve()
        return path == self.root.resolve() or any(path.is_relative_to(place.resolve()) for place in self.classes_in)


def find(root: Path) -> Folder:
    """Looks through a folder: `train/` and `test/` with a subfolder a class each, or subfolders of classes alone, of
    which each then gives a fifth of its pictures to the test, by the hashes of their names.

    Raises:
      DataError: no such folder, fewer than two classes, or a class with no pictures to train or to test on.
    """
    try:
        root = root.expanduser().absolute()
        folder = _look_through(root)
    except (OSError, RuntimeError) as error:  # the second where a user has no home
        where, reason = (getattr(error, name, None) for name in ("filename", "strerror"))
        told = f"dataset=folder:{root}: {where or root} cannot be read: {reason or error}"
        raise DataError(f"{told}; if it has moved, say where it is with --dataset=folder:<path>") from error
    _check(folder)
    return folder


def load(folder: Folder, side: int) -> tuple[Split, Split]:
    """Train and test as arrays of side x side pixels; see `images.read` for what is done to a picture.

    Raises:
      DataError: naming pictures that cannot be read.
    """
    names = tuple(folder.train)
    (train, train_labels, wrong), (test, test_labels, wrong_too) = (
        _read(part, names, side) for part in (folder.train, folder.test)
    )
    if wrong := [*wrong, *wrong_too]:
        count = len(train) + len(test)
        raise DataError(f"{len(wrong)} of {count} pictures cannot be read: {_named(wrong)}; mend or remove them")
    info = DatasetInfo(names, side, *moments(train))
    return Split(train, train_labels, info), Split(test, test_labels, info)


def _look_through(root: Path) -> Folder:
    test = next((root / name for name in TEST_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test:
        return Folder(root, _classes(root / "train"), _classes(test), (root / "train", test))
    classes = _classes(root)
    for name in classes:
        if name.lower() in TRAIN_NAMES and not any(path.parent == root / name for path in classes[name]):
            raise DataError(
                f"dataset=folder:{root}: {name} has no pictures of its own, so is no class; call it train and put test "
                f"beside it, or give --dataset=folder:{root / name}, of which a fifth is kept for the test"
            )
    parts = {name: _split(paths) for name, paths in classes.items()}
    return Folder(root, *({name: part[at] for name, part in parts.items()} for at in (0, 1)), (root,))


def _classes(root: Path) -> dict[str, list[Path]]:
    """The subfolders' names and the pictures in and below each, sorted; what begins with a dot is passed over.

    Raises:
      DataError: naming folders that cannot be read.
    """
    found, closed, others = {}, [], 0
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        paths = [
            Path(where, name)
            for where, _, names in os.walk(folder, onerror=closed.append)
            for name in names
            if not name.startswith(".")
        ]
        found[folder.name] = sorted(path for path in paths if image_files.is_picture(path))
        others += len(paths) - len(found[folder.name])
    if closed:
        told = _named([f"{error.filename} ({error.strerror})" for error in closed])
        raise DataError(f"dataset=folder:{root}: folders in it cannot be read: {told}; open or remove them")
    if others:
        log.info("%s", printable(f"dataset=folder:{root}: {image_files.left_out(others)}"))
    return found


def _split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(train, test) of a class's pictures: which is which follows from the names alone."""
    by_hash = sorted(paths, key=_hash)
    count = max(1, round(TEST_SHARE * len(paths)))
    return sorted(by_hash[count:]), sorted(by_hash[:count])


def _hash(path: Path) -> bytes:
    """Of a picture's name and its class's."""
    return hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}")).digest()


def _check(folder: Folder) -> None:
    told = f"dataset=folder:{folder.root}"
    shape = "it needs a subfolder of pictures for each class, or train/ and test/ with these"
    if len(folder.train) < 2:
        named = f"only {next(iter(folder.train))}" if folder.train else "none"
        raise DataError(f"{told}: two classes are the fewest, and there is {named}; {shape}")
    strange = [name for name in folder.test if name not in folder.train]
    if strange:
        raise DataError(f"{told}: {_named(strange)} in test, and not in train; {shape}")
    odd = [name for name in (*folder.train, os.fspath(folder.root)) if name != name.encode(errors="ignore").decode()]
    if odd:
        raise DataError(f"{told}: {_named(odd)} cannot be written down, as it is not in UTF-8; rename it")
    for part, classes in (("train", folder.train), ("test", folder.test)):
        empty = [name for name in folder.train if not classes.get(name)]
        if empty:
            kinds = ", ".join(image_files.SUFFIXES)
            raise DataError(f"{told}: no pictures of {_named(empty)} to {part} on; each class needs some ({kinds})")


def _read(part: dict[str, list[Path]], names: Sequence[str], side: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Pictures, labels, and what is wrong with those that cannot be read."""
    paths = [(path, label) for label, name in enumerate(names) for path in part[name]]
    paths.sort(key=lambda pair: _hash(pair[0]))  # whatever takes the first examples shall meet all classes
    levels, wrong = image_files.read_all([path for path, _ in paths], side)
    told = [f"{paths[index][0]} {told}" for index, told in wrong.items()]
    return levels, np.array([label for _, label in paths], np.int64), told


def _named(things: Sequence[str]) -> str:
    more = f" and {len(things) - MOST_NAMED} more" if len(things) > MOST_NAMED else ""
    return ", ".join(things[:MOST_NAMED]) + more
