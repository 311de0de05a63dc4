"""A data set of the user's own: NumPy arrays of images and labels, in a folder of .npy files or in one .npz file."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.corruptions import CORRUPTIONS
from cifar_towers.data.dataset import CLASSES
from cifar_towers.data.own_data import ALL, OwnData, number_classes
from cifar_towers.errors import error_line, listed, printable

NOT_COMPUTED = ("elastic_transform", "fog", "frost", "glass_blur", "motion_blur", "snow", "spatter", "zoom_blur")
CIFAR10_C = sorted((*CORRUPTIONS, *NOT_COMPUTED))  # files of the corruptions, beside labels.npy
CIFAR10_1 = tuple((f"cifar10.1_{version}_data", f"cifar10.1_{version}_labels") for version in ("v4", "v6"))
NAMES = {  # split -> usual names of its images and labels
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "validation": (("x_val", "y_val"), ("val_images", "val_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels"), *CIFAR10_1),
    ALL: (("images", "labels"),),
}
CLASSES_FILE = "classes.txt"  # beside the arrays, with the name of a class in each line


def scan(path: Path) -> OwnData:
    """List the images and labels in a folder or file of arrays.

    An image is cut to its central square, and a grey one gets three channels. Names of other arrays are logged.

    Raises:
      OSError, ValueError: arrays are missing, cannot be read, or have a type, shape or label that cannot be used.
    """
    path.stat()  # raises an OSError if the path is missing
    arrays = _read_arrays(path)
    if path.is_file() and path.suffix == ".npy" and len(arrays) == 1:
        raise ValueError(f"it is one array; give the folder of images and labels, as --dataset=npy:{path.parent}")
    found = [(split, pair) for split, names in NAMES.items() for pair in names if {*pair} <= {*arrays}]
    corrupted = [] if found else [name for name in CIFAR10_C if name in arrays]
    if corrupted and "labels" not in arrays:
        raise ValueError(f"it has no labels.npy; put CIFAR-10-C's beside {corrupted[0]}.npy")
    pairs = dict(found) | {name: (name, "labels") for name in corrupted}
    wanted = " or ".join(" and ".join(names[0]) for names in NAMES.values())
    if not pairs:
        raise ValueError(f"its arrays are {listed([*arrays]) or 'none'}; call images and labels {wanted}")
    if len(pairs) < len(found):
        raise ValueError(f"its images are {', '.join(pair[0] for _, pair in found)}; keep one array of a split")
    if left_out := sorted({*arrays}.difference(*pairs.values())):
        line = f"dataset=npy:{path}: left out: {listed(left_out)}; images and labels are called {wanted}"
        logging.getLogger(__name__).info("%s", printable(line))
    splits = {
        split: (_check_images(images, arrays[images]), _check_labels(labels, arrays[labels], len(arrays[images])))
        for split, (images, labels) in pairs.items()
    }
    for name in corrupted:
        images, labels = splits.pop(name)
        size, rest = divmod(len(labels), 5)
        if rest:
            raise ValueError(f"{name} has {len(labels)} images, and must have equally many of five severities")
        parts = [slice(start, start + size) for start in range(0, len(labels), size)]
        splits |= {f"{name}_{number}": (images[part], labels[part]) for number, part in enumerate(parts, 1)}
    values = sorted({*next(iter(splits.values()))[1]})
    classes = {value: str(value) for value in values}
    if (corrupted or {*pairs.values()} & {*CIFAR10_1}) and {*values} <= {*range(len(CLASSES))}:
        classes = dict(enumerate(CLASSES))
    file = (path if path.is_dir() else path.parent) / CLASSES_FILE
    if file.is_file():
        names = [line.strip() for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
        if values[0] == 1 and values[-1] == len(names):
            numbers = f"labels are 1 to {values[-1]}, and the first line of {CLASSES_FILE} names class 0"
            raise ValueError(f"{numbers}; save labels - 1")
        classes = dict(zip(names, names, strict=True) if isinstance(values[0], str) else enumerate(names))
    return OwnData(tuple(classes.values()), number_classes(splits, classes, complete=["train"]), _hash, _read)


def _read_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays in a file or in the files of a folder, by names in lower case; None for names that are unusual.

    Those of .npy files are memory-mapped.
    """
    known = {name for pairs in NAMES.values() for pair in pairs for name in pair} | {*CIFAR10_C}
    arrays: dict[str, Any] = {}
    beside = path.with_name(path.name.replace("_data.npy", "_labels.npy"))  # of one version of CIFAR-10.1
    for file in sorted(path.glob("*.np[yz]")) if path.is_dir() else {path, beside}:
        try:
            if file.suffix == ".npz":
                with np.load(file, allow_pickle=False) as archive:
                    names = {name.lower(): name for name in archive.files}
                    found = {name: archive[names[name]] if name in known else None for name in names}
            else:
                name = file.stem.lower()
                found = {name: np.load(file, mmap_mode="r", allow_pickle=False) if name in known else None}
        except Exception as error:  # NumPy raises any on a damaged file
            how = ", text by .astype('str') and images in one size" if "object" in str(error).lower() else " by np.save"
            raise ValueError(f"{file.name} cannot be read ({error_line(error)}); save it again{how}") from error
        if twice := found.keys() & arrays.keys() & known:
            raise ValueError(f"{min(twice)} is in {file.name} and in another file; give one file, as npy:{file}")
        arrays |= found
    return arrays


def _check_images(name: str, images: np.ndarray) -> np.ndarray:
    """Return images as [n, H, W, 1 or 3]."""
    if not images.size:
        raise ValueError(f"{name} is empty; save some images")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        hint = f"; save {name}.transpose(0, 2, 3, 1)" if images.ndim == 4 and images.shape[1] in (1, 3) else ""
        raise ValueError(f"{name} has the shape {images.shape}, and must have (n, size, size, 3), 1 for grey{hint}")
    if images.dtype != np.uint8:
        raise ValueError(f"{name} is {images.dtype}, and must be uint8, 0 to 255; {_describe_levels(name, images)}")
    return images


def _describe_levels(name: str, images: np.ndarray) -> str:
    """Return how to make levels of images of another type, by their values."""
    if images.dtype.kind not in "fiub":
        return "save numbers"
    low, high = images.min(), images.max()
    if not np.isfinite([low, high]).all():
        return f"replace its values that are not finite first, as by np.nan_to_num({name}, posinf=0, neginf=0)"
    if low < 0 or high > 255:
        return f"scale its {low:.4g} to {high:.4g} to 0 to 255 first"
    levels = f"(255 * {name})" if images.dtype.kind in "fb" and high <= 1 else name
    return f"save {levels}{'.round()' if images.dtype.kind == 'f' else ''}.astype('uint8')"


def _check_labels(name: str, labels: np.ndarray, count: int) -> list[int | str]:
    """Return labels as a list."""
    if labels.shape not in ((count,), (count, 1)):
        hint = f"; save {name}.argmax(1)" if labels.ndim == 2 and len(labels) == count else ""
        raise ValueError(f"{name} has the shape {labels.shape}, and must have ({count},), a label for each image{hint}")
    if labels.dtype.kind not in "iuU":
        kind = "str" if labels.dtype.kind == "S" else "int64"
        raise ValueError(f"{name} is {labels.dtype}, and must be whole numbers or text; save {name}.astype('{kind}')")
    if labels.dtype.kind == "i" and labels.min() < 0:
        advice = "number the classes from 0, and leave out images without a class"
        raise ValueError(f"{name} has the label {labels.min()}; {advice}")
    if labels.dtype.kind == "U" and (empty := int((np.char.strip(labels) == "").sum())):
        raise ValueError(f"{empty} of {count} in {name} are empty; leave out images without a class")
    return labels.reshape(count).tolist()


def _hash(image: np.ndarray) -> bytes:
    return hashlib.sha256(image.tobytes()).digest()


def _read(images: Sequence[np.ndarray], image_size: int) -> tuple[np.ndarray, dict[int, str]]:
    colored = (np.broadcast_to(image, (1, *image.shape[:2], 3)) for image in images)
    return np.concatenate([image_files.resize_all(image, image_size) for image in colored]), {}
