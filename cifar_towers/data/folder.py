"""A data set of the user's own: a folder with a subfolder of images for each class."""

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
        if "test" not in roots:
            log.info("%s", printable(f"dataset=folder:{root}: {roots['validation'].name} is used as the test split"))
    else:
        roots = {ALL: root}
    found = {split: _list_classes(roots[split]) for split in (*SPLITS, ALL) if split in roots}
    if ALL in found:
        _check_not_splits(root, found[ALL])
    main = next(split for split in ("train", ALL, "test", "validation") if split in found)
    spelled = {normalize("NFC", name): name for name in found[main]}  # systems encode accents in different ways
    examples = {
        split: {path: spelled.get(normalize("NFC", name), name) for name, paths in classes.items() for path in paths}
        for split, classes in found.items()
    }
    hint = LAYOUT
    if len(found[main]) == 1 and _subfolders(inside := roots[main] / next(iter(found[main]))):
        hint = f"give --dataset=folder:{inside}, or move the folders in it one up"
    return of_files(examples, [*found[main]], hint)._replace(class_roots=tuple(roots.values()))


def of_files(
    examples: Mapping[str, Mapping[Path, str]], class_names: Sequence[str], hint: str = "add another"
) -> OwnData:
    """Return the data set of image files: split -> file -> name of its class."""
    rank = {name: number for number, name in enumerate(class_names)}
    splits = {}
    for split in filter(examples.__contains__, (*SPLITS, ALL)):
        files = sorted(examples[split].items(), key=lambda file: (rank.get(file[1], -1), file[0]))
        splits[split] = [path for path, _ in files], [name for _, name in files]
    numbered = number_classes(splits, dict(zip(class_names, class_names, strict=True)), hint=hint)
    return OwnData(tuple(class_names), numbered, _hash_name, image_files.read_all)


def holds_pictures(root: Path) -> bool:
    """Return whether a folder has pictures, at most two folders deep, and nothing that TFDS downloads or prepares."""
    if (root / "downloads").exists() or any(root.glob("*/*/dataset_info.json")):
        return False
    return any(image_files.is_picture(path) for depth in ("*", "*/*", "*/*/*") for path in root.glob(depth))


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
        raise ValueError(
            f"{names[0]} is no class, but named as a split{also}; call it {split} and put "
            f"{other} beside it, both with a subfolder of images for each class, or rename it, or give "
            f"--dataset=folder:{root / names[0]}, of which a fifth is used for the test"
        )


def _subfolders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not _is_clutter(path.name))


def _is_clutter(name: str) -> bool:
    """Return whether a name is one of those that file managers, notebooks and archives leave among pictures."""
    return name.startswith(".") or name.lower() in CLUTTER


def _list_classes(root: Path) -> dict[str, list[Path]]:
    """Return the images in and below each subfolder, by its name. Links are followed, clutter is left out."""
    classes: dict[str, list[Path]] = {folder.name: [] for folder in _subfolders(root)}
    clutter = [path.name for path in root.iterdir() if _is_clutter(path.name)]
    loose = [p.name for p in root.iterdir() if image_files.is_picture(p) and p.name not in {*clutter, *classes}]
    seen = {os.fspath(folder) for folder in (root.resolve(), *root.resolve().parents)}
    num_ignored, repeated, unreadable = 0, [], []
    pending = [(name, os.path.join(root, name)) for name in reversed(classes)]
    links: deque[tuple[str, str]] = deque()
    while pending or links:  # links come last: a picture's class is that of the folder where it is
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
            if _is_clutter(entry.name):
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


def _hash_name(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}")).digest()
