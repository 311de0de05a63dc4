"""Data sets of the user's own, written from splits."""

import numpy as np
from PIL import Image


def write_folder(root, **splits):
    """Write the pictures of splits, each below the name of its class; return the value of
    `--dataset`.
    """
    for name, split in splits.items():
        for index, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
            place = root / name / split.info.class_names[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{index}.png")
    return f"folder:{root}"


def write_table(root, **splits):
    """Write a table of the pictures of splits, and the pictures beside it; return the value of
    `--dataset`.
    """
    write_folder(root / "pictures", **splits)
    paths = [path.relative_to(root) for path in sorted(root.glob("pictures/*/*/*.png"))]
    rows = [f"{path},{path.parent.name},{path.parts[1]}" for path in paths]
    (root / "labels.csv").write_text("\n".join(["file,label,split", *rows]))
    return f"csv:{root / 'labels.csv'}"


def write_arrays(root, **splits):
    """Write splits as the arrays of one file, with the names of the classes; return the value of
    `--dataset`.
    """
    root.mkdir(parents=True, exist_ok=True)
    arrays = {f"x_{name}": split.images for name, split in splits.items()}
    arrays |= {f"y_{name}": split.labels for name, split in splits.items()}
    class_names = next(iter(splits.values())).info.class_names
    np.savez(root / "arrays.npz", class_names=class_names, **arrays)
    return f"npz:{root / 'arrays.npz'}"
