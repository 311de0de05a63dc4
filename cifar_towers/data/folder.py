"""A data set of the user's own: a folder with a subfolder of images for each class."""

import functools
import hashlib
import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from unicodedata import normalize

from cifar_towers.data import image_files
from cifar_towers.data.own_data import ALL, SPLITS, OwnData, number_classes
from cifar_towers.errors import listed, printable
from cifar_towers.registry import SPLIT_NAMES

log = logging.getLogger(__name__)

LIKE_A_SPLIT = re.compile(r"(train|test|val|dev)(ing|id|idation)?[\W_]*(set|data|images)?[\W\d_]*", re.IGNORECASE)
CLUTTER = ("@eadir", "__macosx", "thumbs.db", "desktop.ini", "$recycle.bin", "#recycle", "lost+found")
LAYOUT = "it needs a subfolder of images for each class, or train/ and test/ with these"


def scan(root: Path) -> OwnData:
    """List the images of a folder that has a folder for each split with a subfolder per class, or only such subfolders.

    Raises:
      OSError, ValueError: the folder is missing, has fewer than two classes, has a class without images to train or
        test on, or has splits in the place of classes.
    """
    names = [folder.name for folder in _subfolders(root)]
    split_of = {name: split for split, known in SPLIT_NAMES.items() for name in names if name.lower() in known}
    others = [name for name in names if name not in split_of]
    roots = {split: root / name for name, split in split_of.items()}
    if roots.keys() - {"train"} and ("train" in roots or not others):
        if len(roots) < len(split_of):
            raise ValueError(f"of {listed([*split_of])}, two are the same split; leave one of them")
        _log_left_out(root, others, f"not in {listed([*split_of])}")
    else:
        roots = {ALL: root}
    found = {split: _list_classes(roots[split]) for split in (*SPLITS, ALL) if split in roots}
    if ALL in found:
        _check_classes(root, found[ALL])
    main = next(split for split in ("train", ALL, "test", "validation") if split in found)
    spelled = {normalize("NFC", name): name for name in found[main]}  # systems encode accents in different ways
    examples = {
        split: {path: spelled.get(normalize("NFC", name), name) for name, paths in classes.items() for path in paths}
        for split, classes in found.items()
    }
    hint = LAYOUT
    if len(found[main]) == 1 and _subfolders(inside := roots[main] / next(iter(found[main]))):
        hint = f"give --dataset=folder:{inside}, or move the folders in it one up"
    return of_files(root, examples, [*found[main]], hint)._replace(class_roots=tuple(roots.values()))


def of_files(root: Path, examples: Mapping[str, Mapping[Path, str]], class_names: Sequence[str], hint: str) -> OwnData:
    """Return the data set of image files in and below `root`: split -> file -> name of its class."""
    rank = {name: number for number, name in enumerate(class_names)}
    splits = {}
    for split in filter(examples.__contains__, (*SPLITS, ALL)):
        files = sorted(examples[split].items(), key=lambda file: (rank.get(file[1], -1), file[0]))
        splits[split] = [path for path, _ in files], [name for _, name in files]
    numbered = number_classes(splits, dict(zip(class_names, class_names, strict=True)), hint=hint)
    return OwnData(tuple(class_names), numbered, functools.partial(_hash_name, root), image_files.read_all)


def holds_pictures(root: Path) -> bool:
    """Return whether a folder has pictures, at most two folders deep, and nothing that TFDS downloads or prepares."""
    if (root / "downloads").exists() or any(root.glob("*/*/dataset_info.json")):
        return False
    return any(image_files.is_picture(path) for depth in ("*", "*/*", "*/*/*") for path in root.glob(depth))


def _check_classes(root: Path, classes: Mapping[str, list[Path]]) -> None:
    """Raise if classes of a folder without splits, or several folders in them, are named as splits, as `Testing`."""
    folders = {name: {path.parent for path in files} for name, files in classes.items()}
    inside = {
        name: sorted({part for folder in of_class for part in folder.relative_to(root / name).parts[:1]})
        for name, of_class in folders.items()
    }
    nested = {name for name, of_class in folders.items() if root / name not in of_class}
    names = [name for name in classes if LIKE_A_SPLIT.fullmatch(name)]
    is_split = any(name in nested or name.lower().startswith("test") for name in names)
    names += [name for name in nested if LIKE_A_SPLIT.fullmatch(name.partition("_")[2])]
    if is_split or len(names) > 1:
        names.sort(key=lambda name: ("train" not in name.lower(), name))
        also = f" (as {listed(names[1:])})" if names[1:] else ""
        split, other = ("train", "test") if "train" in names[0].lower() else ("test", "train")
        raise ValueError(
            f"{names[0]} is no class, but named as a split{also}; call it {split} and put "
            f"{other} beside it, both with a subfolder of images for each class, or rename it, or give "
            f"--dataset=folder:{root / names[0]}, of which a fifth is used for the test"
        )
    splits = [f"{name}/{part}" for name in classes for part in inside[name] if LIKE_A_SPLIT.fullmatch(part)]
    if len(classes) > 1 and len(splits) > 1:
        name, _, split = splits[0].partition("/")
        raise ValueError(
            f"{listed(splits)} are named as splits, but are inside the folders of classes; put splits outside, as "
            f"{split}/{name}, or rename these folders"
        )
    same = next(iter(inside.values()), [])
    if same and len(classes) > 1 and all(names == same for names in inside.values()):
        parts = f"the classes are {listed([*classes])}, and not the folders in each of them, {listed(same)}"
        log.info("%s", printable(f"dataset=folder:{root}: {parts}"))


def _subfolders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not is_clutter(path.name))


def is_clutter(name: str) -> bool:
    """Return whether a name is one of those that file managers, notebooks and archives leave among pictures."""
    return name.startswith(".") or name.lower() in CLUTTER


def _list_classes(root: Path) -> dict[str, list[Path]]:
    """Return the images in and below each subfolder, by its name. Links are followed, clutter is left out."""
    classes: dict[str, list[Path]] = {folder.name: [] for folder in _subfolders(root)}
    clutter = [path.name for path in root.iterdir() if is_clutter(path.name)]
    loose = [p.name for p in root.iterdir() if image_files.is_picture(p) and p.name not in {*clutter, *classes}]
    seen = {os.fspath(folder) for folder in (root.resolve(), *root.resolve().parents)}
    num_ignored, repeated, unreadable = 0, [], []
    pending = [(name, os.path.join(root, name)) for name in reversed(classes)]
    links: deque[tuple[str, str]] = deque()
    while pending or links:  # links are read last, so that a picture gets the class of its real folder
        name, folder = pending.pop() if pending else links.popleft()
        if (place := os.path.realpath(folder)) in seen:
            repeated.append(os.path.relpath(folder, root))
            continue
        seen.add(place)
        try:
            entries = [*os.scandir(folder)]
        except OSError as error:
            unreadable.append(f"{error.filename} ({error.strerror})")
            continue
        for entry in entries:
            if is_clutter(entry.name):
                clutter.append(entry.name)
            elif os.path.isdir(entry) if (is_link := entry.is_symlink()) else entry.is_dir():
                (links if is_link else pending).append((name, entry.path))
            elif image_files.is_picture(path := Path(entry.path)):
                classes[name].append(path)
            else:
                num_ignored += 1
    if unreadable:
        raise ValueError(f"cannot be read: {listed(unreadable)}; make these folders readable or remove them")
    if num_ignored:
        log.info("%s", printable(f"dataset=folder:{root}: {image_files.describe_ignored(num_ignored)}"))
    _log_left_out(root, loose, "in no class's folder")
    _log_left_out(root, clutter, "hidden, or of file managers, notebooks or archives")
    _log_left_out(root, repeated, "links to folders that are read anyway")
    return classes


def _log_left_out(root: Path, names: Iterable[str], reason: str) -> None:
    if names := sorted(set(names)):
        log.info("%s", printable(f"dataset=folder:{root}: left out, as {reason}: {listed(names)}"))


def _hash_name(root: Path, path: Path) -> bytes:
    folder = "" if path.parent == root else path.parent.name  # the name of the root may change
    return hashlib.sha256(os.fsencode(f"{folder}/{path.name}")).digest()
