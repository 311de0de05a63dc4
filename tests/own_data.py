"""Data sets of the user's own, written from splits."""

import numpy as np
from PIL import Image


def write_folder(root, **splits):
    """Write the pictures of splits, each below the name of its class; return the value of `--dataset`."""
    for name, split in splits.items():
        for index, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
            place = root / name / split.info.class_names[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{index}.png")
    return f"folder:{root}"


def write_arrays(root, **splits):
    """Write splits as arrays, with the names of the classes as labels; return the value of `--dataset`."""
    root.mkdir(exist_ok=True)
    for name, split in splits.items():
        np.save(root / f"x_{name}.npy", split.images)
        np.save(root / f"y_{name}.npy", np.array(split.info.class_names)[split.labels])
    return f"npy:{root}"
