"""A data set of the user's own: NumPy arrays of images and labels, in a folder of .npy files or in one .npz file."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.data.dataset import DatasetInfo, Split, moments
from cifar_towers.data.folder import hold_out
from cifar_towers.errors import DataError, error_line, listed

ALL = "all"  # the arrays of data without splits: a fifth of each class becomes the test split
NAMES = {  # split -> usual names of its images and labels
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "validation": (("x_val", "y_val"), ("val_images", "val_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
    ALL: (("images", "labels"),),
}
CLASSES_FILE = "classes.txt"  # beside the arrays, with the name of a class in each line
Arrays: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]  # split -> images [n, H, W, 1 or 3] uint8 and labels [n]


def scan(path: Path) -> tuple[tuple[str, ...], Arrays]:
    """Return the names of the classes, and the images and int64 labels of each split.

    Raises:
      DataError: arrays are missing, cannot be read, or have a type, shape or label that cannot be used.
    """
    try:
        arrays = _read_arrays(path)
        pairs = {split: pair for split, names in NAMES.items() for pair in names if {*pair} <= {*arrays}}
        if not pairs:
            wanted = " or ".join(" and ".join(names[0]) for names in NAMES.values())
            raise ValueError(f"its arrays are {', '.join(arrays) or 'none'}; call images and labels {wanted}")
        splits = {
            split: (_check_images(images, arrays[images]), _check_labels(labels, arrays[labels], len(arrays[images])))
            for split, (images, labels) in pairs.items()
        }
        class_names = _number_classes(path if path.is_dir() else path.parent, splits)
    except (OSError, ValueError) as error:
        raise DataError(f"dataset=npy:{path}: {error}") from error
    return class_names, splits


def load(class_names: tuple[str, ...], arrays: Arrays, image_size: int) -> dict[str, Split]:
    """Return the splits, with the central square of each image resized to `image_size` and grey as three channels.

    Examples are sorted by the hashes of their images, as some uses take the first ones.
    """
    splits = {}
    for name, (images, labels) in (_divide(*arrays[ALL]) if ALL in arrays else arrays).items():
        order = sorted(range(len(labels)), key=_hashes(images).__getitem__)
        colored = np.broadcast_to(images, (*images.shape[:3], 3))[order]
        splits[name] = image_files.resize_all(colored, image_size), labels[order]
    info = DatasetInfo(class_names, image_size, *moments(next(iter(splits.values()))[0]))
    return {name: Split(*split, info) for name, split in splits.items()}


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of usual names in a file or in the files of a folder. Those of .npy files are memory-mapped."""
    known = {name for pairs in NAMES.values() for pair in pairs for name in pair}
    arrays: dict[str, np.ndarray] = {}
    for file in sorted([*path.glob("*.npy"), *path.glob("*.npz")]) if path.is_dir() else [path]:
        try:
            if file.suffix == ".npz":
                with np.load(file, allow_pickle=False) as archive:
                    arrays |= {name: archive[name] for name in archive.files if name in known}
            elif file.stem in known:
                arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # NumPy raises any on a damaged file
            raise ValueError(f"{file.name} cannot be read ({error_line(error)}); save it again by np.save") from error
    return arrays


def _check_images(name: str, images: np.ndarray) -> np.ndarray:
    """Return images as [n, H, W, 1 or 3]."""
    if not images.size:
        raise ValueError(f"{name} is empty; save some images")
    if images.dtype != np.uint8:
        levels = f"(255 * {name}).round()" if images.dtype.kind == "f" else name
        raise ValueError(f"{name} is {images.dtype}, and must be uint8, 0 to 255; save {levels}.astype('uint8')")
    if images.ndim == 3:
        return images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        hint = f"; save {name}.transpose(0, 2, 3, 1)" if images.ndim == 4 and images.shape[1] in (1, 3) else ""
        raise ValueError(f"{name} has the shape {images.shape}, and must have (n, size, size, 3), 1 for grey{hint}")
    return images


def _check_labels(name: str, labels: np.ndarray, count: int) -> np.ndarray:
    """Return labels as [n], whole numbers or text."""
    if labels.shape not in ((count,), (count, 1)):
        hint = f"; save {name}.argmax(1)" if labels.ndim == 2 and len(labels) == count else ""
        raise ValueError(f"{name} has the shape {labels.shape}, and must have ({count},), a label for each image{hint}")
    if labels.dtype.kind not in "iuU":
        raise ValueError(f"{name} is {labels.dtype}, and must be whole numbers or text; save {name}.astype('int64')")
    return labels.reshape(count)


def _number_classes(directory: Path, splits: Arrays) -> tuple[str, ...]:
    """Return the names of the classes. Replace the labels by the numbers of their classes."""
    first = next(iter(splits))
    values = np.unique(splits[first][1]).tolist()
    class_names = [str(value) for value in values]
    if (directory / CLASSES_FILE).is_file():
        lines = (directory / CLASSES_FILE).read_text("utf-8-sig").splitlines()
        class_names = [line.strip() for line in lines if line.strip()]
        is_text = splits[first][1].dtype.kind == "U"
        first, values = CLASSES_FILE, class_names if is_text else [*range(len(class_names))]
    numbers = {value: number for number, value in enumerate(values)}
    for split, (images, labels) in splits.items():
        counts = Counter(labels.tolist())
        if unknown := sorted(counts.keys() - numbers.keys()):
            raise ValueError(f"labels of {split} that {first} has not: {listed([*map(str, unknown)])}")
        if split in ("train", ALL):
            if len(values) < 2:
                raise ValueError(f"at least two classes with images are needed; there is {listed(class_names)}")
            needed = 2 if split == ALL else 1  # the first one is tested on
            if few := [name for name, value in zip(class_names, values, strict=True) if counts[value] < needed]:
                raise ValueError(f"no images of {listed(few)} to train on")
        splits[split] = images, np.array([numbers[label] for label in labels.tolist()], np.int64)
    return tuple(class_names)


def _divide(images: np.ndarray, labels: np.ndarray) -> Arrays:
    """Return train and test: a fifth of each class, by the hashes of the images."""
    hashes = _hashes(images)
    halves = [hold_out(np.flatnonzero(labels == label).tolist(), hashes.__getitem__) for label in np.unique(labels)]
    parts = {"train": [half[0] for half in halves], "test": [half[1] for half in halves]}
    chosen = {split: np.concatenate(indices).astype(int) for split, indices in parts.items()}
    return {split: (images[indices], labels[indices]) for split, indices in chosen.items()}


def _hashes(images: np.ndarray) -> list[bytes]:
    return [hashlib.sha256(image.tobytes()).digest() for image in images]
