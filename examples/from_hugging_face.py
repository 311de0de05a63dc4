"""Pictures of a Hugging Face data set as arrays that `--dataset=npz:` reads.

pip install datasets
python examples/from_hugging_face.py uoft-cs/cifar100 img fine_label cifar100.npz
cifar-towers train --dataset=npz:cifar100.npz
"""

import sys

import datasets
import numpy as np


def save(name, image, label, path):
    """Save train and test of a data set. `image` and `label` are its columns; the pictures have one
    size.
    """
    arrays = {}
    for split in ("train", "test"):
        rows = datasets.load_dataset(name, split=split)
        arrays[f"x_{split}"] = np.stack(
            [np.asarray(picture.convert("RGB")) for picture in rows[image]]
        )
        arrays[f"y_{split}"] = np.array(rows[label])
    np.savez(path, class_names=rows.features[label].names, **arrays)


if __name__ == "__main__":
    save(*sys.argv[1:])
