"""A data set of the user's own: a folder with a subfolder of images for each class."""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar
from unicodedata import normalize

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.errors import DataError, did_you_mean, listed, printable

log = logging.getLogger(__name__)
Item = TypeVar("Item", Path, int)

SPLIT_NAMES = {  # of folders, in upper or lower case
    "train": ("train", "training", "training_set"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "test_set"),
}
LIKE_A_SPLIT = re.compile(r"(train|test|val|dev)(ing|id|idation)?[\W_]*(set|data|images)?[\W\d_]*", re.IGNORECASE)
CLUTTER = ("@eadir", "__macosx", "thumbs.db", "desktop.ini", "$recycle.bin", "#recycle", "lost+found")
TEST_FRACTION = 0.2  # of each class, if the folder has no test
LAYOUT = "it needs a subfolder of images for each class, or train/ and test/ with these"


class Folder(NamedTuple):
    """The image files of a folder by class, in an order that does not depend on the machine."""

    root: Path
    train: dict[str, list[Path]]  # empty if there is only a test
    test: dict[str, list[Path]]
    class_roots: tuple[Path, ...]  # the folders whose subfolders are classes
    validation: Mapping[str, list[Path]] = {}

    @property
    def is_undivided(self) -> bool:
        """Whether there are no splits, so that a fifth of each class is the test split."""
        return self.class_roots == (self.root,)

    def contains(self, path: Path) -> bool:
        """Return whether files written to `path` would be among the pictures or taken for a class."""
        path = path.expanduser().resolve()
        return path == self.root.resolve() or any(path.is_relative_to(root.resolve()) for root in self.class_roots)


def scan(root: Path) -> Folder:
    """List the images of a folder that has a folder for each split with a subfolder per class, or only such subfolders.

    In the second case a fifth of each class becomes the test split, chosen by the hashes of the files' names.

    Raises:
      DataError: the folder is missing, has fewer than two classes, has a class without images to train or test on, or
        has splits in the place of classes.
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
    """Return the folder's splits, with each image read by `image_files.read`.

    Raises:
      DataError: some images cannot be read; the message names them.
    """
    class_names = tuple(folder.train or folder.test)
    files = {name: getattr(folder, name) for name in SPLIT_NAMES}
    arrays = {name: _read(classes, class_names, image_size) for name, classes in files.items() if any(classes.values())}
    if errors := [error for _, _, split_errors in arrays.values() for error in split_errors]:
        count = sum(len(images) for images, _, _ in arrays.values())
        raise DataError(f"{len(errors)} of {count} images cannot be read: {listed(errors)}; repair or remove them")
    info = DatasetInfo(class_names, image_size, *moments(next(iter(arrays.values()))[0]))
    trained_on = {hash(image.tobytes()) for image in arrays["train"][0]} if "train" in arrays else set()
    if copies := sum(hash(image.tobytes()) in trained_on for image in arrays["test"][0]):
        share = f"{copies} of {len(arrays['test'][0])} test images"
        log.info("%s", printable(f"{folder.root}: {share} are copies of training images"))
    return {name: Split(images, labels, info) for name, (images, labels, _) in arrays.items()}


def hold_out(images: Sequence[Item], hash_of: Callable[[Item], bytes]) -> tuple[list[Item], list[Item]]:
    """Divide a class's images into (train, test), by their hashes alone."""
    by_hash = sorted(images, key=hash_of)
    count = max(1, round(TEST_FRACTION * len(images)))
    return sorted(by_hash[count:]), sorted(by_hash[:count])


def holds_pictures(root: Path) -> bool:
    """Return whether a folder has pictures, at most two folders deep, and nothing that TFDS downloads or prepares."""
    if (root / "downloads").exists() or any(root.glob("*/*/dataset_info.json")):
        return False
    return any(image_files.is_picture(path) for depth in ("*", "*/*", "*/*/*") for path in root.glob(depth))


def _scan(root: Path) -> Folder:
    names = [folder.name for folder in _subfolders(root)]
    split_of = {name: split for split, known in SPLIT_NAMES.items() for name in names if name.lower() in known}
    splits = {split: root / name for name, split in split_of.items()}
    others = [name for name in names if name not in split_of]
    if {*splits} - {"train"} and ("train" in splits or not others):
        if len(splits) < len(split_of):
            raise DataError(
                f"dataset=folder:{root}: of {listed([*split_of])}, two are the same split; leave one of them"
            )
        _log_left_out(root, others, f"not in {listed([*split_of])}")
        if "test" not in splits:
            splits["test"] = splits.pop("validation")
            log.info("%s", printable(f"dataset=folder:{root}: {splits['test'].name} is used as the test split"))
        train, validation, test = (_list_classes(splits[s]) if s in splits else {} for s in SPLIT_NAMES)
        spelled = {normalize("NFC", name): name for name in train}  # systems encode accents in different ways
        test, validation = (
            {spelled.get(normalize("NFC", name), name): files for name, files in classes.items()}
            for classes in (test, validation)
        )
        return Folder(root, train, test, tuple(splits.values()), validation)
    classes = _list_classes(root)
    _check_not_splits(root, classes)
    halves = {name: hold_out(files, hash_name) for name, files in classes.items()}
    train, test = ({name: half[index] for name, half in halves.items()} for index in (0, 1))
    return Folder(root, train, test, (root,))


def _check_not_splits(root: Path, classes: Mapping[str, list[Path]]) -> None:
    """Raise if the classes of a folder without splits are named as splits, as `test1`, `seg_train` or `Testing`."""
    nested = {name for name, files in classes.items() if all(path.parent != root / name for path in files)}
    names = [name for name in classes if LIKE_A_SPLIT.fullmatch(name)]
    is_split = any(name in nested or name.lower().startswith("test") for name in names)
    names += [name for name in nested if LIKE_A_SPLIT.fullmatch(name.partition("_")[2])]
    if is_split or len(names) > 1:
        names.sort(key=lambda name: ("train" not in name.lower(), name))
        also = f" (as {listed(names[1:])})" if names[1:] else ""
        split, other = ("train", "test") if "train" in names[0].lower() else ("test", "train")
        raise DataError(
            f"dataset=folder:{root}: {names[0]} is no class, but named as a split{also}; call it {split} and put "
            f"{other} beside it, both with a subfolder of images for each class, or rename it, or give "
            f"--dataset=folder:{root / names[0]}, of which a fifth is used for the test"
        )


def _subfolders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not _is_clutter(path.name))


def _is_clutter(name: str) -> bool:
    """Return whether a name is one of those that file managers, notebooks and archives leave among pictures."""
    return name.startswith(".") or name.lower() in CLUTTER


def _list_classes(root: Path) -> dict[str, list[Path]]:
    """Return the images in and below each subfolder, by its name, sorted. Links are followed, clutter is left out."""
    classes: dict[str, list[Path]] = {folder.name: [] for folder in _subfolders(root)}
    errors: list[OSError] = []
    clutter = [path.name for path in root.iterdir() if _is_clutter(path.name)]
    loose = [p.name for p in root.iterdir() if image_files.is_picture(p) and p.name not in {*clutter, *classes}]
    seen = {os.fspath(folder) for folder in (root.resolve(), *root.resolve().parents)}
    num_ignored, repeated, pending = 0, [], [(name, root / name) for name in classes]
    while pending:  # links come after all other folders: a picture's class is that of the folder where it is
        links = []
        for name, top in pending:
            for parent, folders, files in os.walk(top, onerror=errors.append):
                if (place := os.path.realpath(parent)) in seen:
                    repeated.append(os.path.relpath(parent, root))
                    folders.clear()
                    continue
                seen.add(place)
                clutter += filter(_is_clutter, (*folders, *files))
                folders[:] = (folder for folder in folders if not _is_clutter(folder))
                links += [(name, Path(parent, folder)) for folder in folders if os.path.islink(Path(parent, folder))]
                paths = [Path(parent, file) for file in files if not _is_clutter(file)]
                classes[name] += (pictures := list(filter(image_files.is_picture, paths)))
                num_ignored += len(paths) - len(pictures)
        pending = links
    if errors:
        places = listed([f"{error.filename} ({error.strerror})" for error in errors])
        raise DataError(f"dataset=folder:{root}: cannot be read: {places}; make these folders readable or remove them")
    if num_ignored:
        log.info("%s", printable(f"dataset=folder:{root}: {image_files.describe_ignored(num_ignored)}"))
    _log_left_out(root, loose, "in no class's folder")
    _log_left_out(root, clutter, "hidden, or of file managers, notebooks or archives")
    _log_left_out(root, repeated, "links to folders that are read anyway")
    return {name: sorted(files) for name, files in classes.items()}


def _log_left_out(root: Path, names: Iterable[str], reason: str) -> None:
    if names := sorted(set(names)):
        log.info("%s", printable(f"dataset=folder:{root}: left out, as {reason}: {listed(names)}"))


def hash_name(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}")).digest()


def _check(folder: Folder) -> None:
    prefix = f"dataset=folder:{folder.root}"
    classes = folder.train or folder.test
    if len(classes) < (2 if folder.train else 1):
        inside = folder.class_roots[0] / next(iter(classes), "")
        found, hint = f"only {inside.name}" if classes else "none", LAYOUT
        if classes and _subfolders(inside):
            hint = f"give --dataset=folder:{inside}, or move the folders in it one up"
        raise DataError(f"{prefix}: at least two classes are needed, and there is {found}; {hint}")
    for split, files in (("validation", folder.validation), ("test", folder.test)):
        if unknown := [name for name in files if name not in classes]:
            hint = did_you_mean(unknown[0], classes) + LAYOUT
            raise DataError(f"{prefix}: {listed(unknown)} in {split}, and not in train; {hint}")
    names = (*classes, os.fspath(folder.root))
    if not_utf8 := [name for name in names if name != name.encode(errors="ignore").decode()]:
        raise DataError(f"{prefix}: {listed(not_utf8)} is not valid UTF-8, which config.json needs; rename it")
    for split, files in (("train", folder.train or folder.test), ("test", folder.test)):
        if empty := [name for name in classes if not files.get(name)]:
            needs = f"every class needs some ({', '.join(image_files.SUFFIXES)})"
            raise DataError(f"{prefix}: no images of {listed(empty)} to {split} on; {needs}")


def _read(
    classes: Mapping[str, list[Path]], names: Sequence[str], size: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images, labels in the order of `names`, and a message for each file that cannot be read."""
    examples = [(path, label) for label, name in enumerate(names) for path in classes.get(name, ())]
    examples.sort(key=lambda example: hash_name(example[0]))  # mixed, as some uses take the first examples
    paths, labels = zip(*examples, strict=True)
    levels, errors = image_files.read_all(paths, size)
    return levels, np.array(labels, np.int64), [f"{paths[index]} {error}" for index, error in errors.items()]
