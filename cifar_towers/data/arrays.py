"""A data set of the user's own: one file of NumPy arrays (.npz) with images and labels."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.own_data import SPLITS, OwnData
from cifar_towers.errors import listed

ARRAYS = "the arrays must be x_train, y_train, x_test and y_test, and may be x_validation, y_validation and class_names"
IMAGES = "images must be uint8, (n, size, size, 3) or (n, size, size), with levels from 0 to 255"
LABELS = "labels must be whole numbers, (n,), from 0 to the number of classes - 1"


def scan(path: Path) -> OwnData:
    """Read the arrays of a file.

    Raises:
      OSError, ValueError: the file cannot be read, or its arrays have other names, types, shapes or labels.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    names = arrays.pop("class_names", None)
    present = [split for split in SPLITS if f"x_{split}" in arrays]
    if not present or {*arrays} != {f"{kind}_{split}" for kind in "xy" for split in present}:
        raise ValueError(f"its arrays are {listed([*arrays], 10)}; {ARRAYS}")
    splits = {split: (list(arrays[f"x_{split}"]), arrays[f"y_{split}"]) for split in present}
    for split, (_, labels) in splits.items():
        _check_images(f"x_{split}", arrays[f"x_{split}"])
        if labels.dtype.kind not in "iu" or labels.shape != arrays[f"x_{split}"].shape[:1]:
            raise ValueError(f"y_{split} is {labels.dtype} {labels.shape}; {LABELS}")
    class_names = tuple(map(str, range(int(splits[present[0]][1].max()) + 1) if names is None else names.tolist()))
    for split, (_, labels) in splits.items():
        if labels.min() < 0 or labels.max() >= len(class_names):
            raise ValueError(f"y_{split} is {labels.min()} to {labels.max()}, of {len(class_names)} classes; {LABELS}")
    if len({*class_names}) < len(class_names):
        raise ValueError("class_names has a name twice")
    numbered = {split: (images, labels.astype(np.int64)) for split, (images, labels) in splits.items()}
    return OwnData(class_names, numbered, _read, lambda image: hashlib.sha256(image.tobytes()).digest())


def _check_images(name: str, images: np.ndarray) -> None:
    is_square = images.ndim in (3, 4) and images.shape[1] == images.shape[2] and images.shape[3:] in ((), (3,))
    if images.dtype != np.uint8 or not is_square or images.max() < 2:
        raise ValueError(f"{name} is {images.dtype} {images.shape}, up to {images.max()}; {IMAGES}")


def _read(images: Sequence[np.ndarray], image_size: int) -> np.ndarray:
    levels = np.stack(images)
    colored = levels if levels.ndim == 4 else np.repeat(levels[..., None], 3, axis=3)
    return image_files.resize_all(colored, image_size)
