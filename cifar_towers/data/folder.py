"""A data set of the user's own: a folder with a subfolder of pictures for each class."""

import logging
from pathlib import Path

from cifar_towers.data import image_files
from cifar_towers.data.own_data import SPLITS, OwnData, of_files
from cifar_towers.errors import listed, printable

log = logging.getLogger(__name__)

LAYOUT = "pictures must be <class>/*, or train/<class>/*, test/<class>/* and, if there are any, validation/<class>/*"


def scan(root: Path) -> OwnData:
    """List the pictures `<root>/<class>/*`, or `<root>/<split>/<class>/*` if a folder has the name of a split.

    Raises:
      OSError, ValueError: a folder cannot be read, or the layout is another one.
    """
    folders, num_left_out = _list_folders(root)
    class_folders = {"train": folders}
    if any(folder.name in SPLITS for folder in folders):
        if others := [folder.name for folder in folders if folder.name not in SPLITS]:
            raise ValueError(f"{listed(others)} is beside the folder of a split; {LAYOUT}")
        class_folders = {}
        for split in folders:
            class_folders[split.name], count = _list_folders(split)
            num_left_out += count
    files: dict[str, dict[Path, str]] = {}
    for split_name, folders in class_folders.items():
        files[split_name] = {}
        for folder in folders:
            deeper, num_files = _list_folders(folder)
            if deeper:
                raise ValueError(f"{deeper[0]} is a folder in the folder of a class; {LAYOUT}")
            pictures = [path for path in folder.iterdir() if image_files.is_picture(path)]
            num_left_out += num_files - len(pictures)
            files[split_name] |= dict.fromkeys(pictures, folder.name)
    if num_left_out:
        line = f"dataset=folder:{root}: {num_left_out} left out: hidden, of another type, or in no folder of a class"
        log.info("%s", printable(line))
    return of_files(root, files, {name: [folder.name for folder in folders] for name, folders in class_folders.items()})


def _list_folders(folder: Path) -> tuple[list[Path], int]:
    """Return the visible subfolders, sorted, and the number of other entries."""
    entries = sorted(folder.iterdir())
    folders = [path for path in entries if path.is_dir() and not path.name.startswith(".")]
    return folders, len(entries) - len(folders)
