"""What nets and data sets are called; without TensorFlow, as a flag that names none answers at once."""

import re

from cifar_towers.errors import UsageError

MODELS = (
    "cifarnet",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "speednet93",
    "speednet94",
    "speednet95",
    "speednet96",
    "speednet_proxy",
)
BUILT_IN = ("cifar10", "synthetic", "auto")
FOLDER = "folder:"  # what the name of a data set in a folder begins with


def split_own_model(model: str) -> tuple[str, str] | None:
    """(module or file, function) of a net that is not the project's; None for what does not name one."""
    where, _, function = model.rpartition(":")
    return (where, function) if where and function.isidentifier() else None


def check_model(model: str) -> None:
    """Refuses what names no net, with a UsageError."""
    if model not in MODELS and not split_own_model(model):
        raise UsageError(
            f"model={model} is not one of {', '.join(MODELS)}; a net of your own is given as "
            "package.module:function or path/to/file.py:function"
        )


def check_dataset(dataset: str) -> None:
    """Refuses what names no data set, with a UsageError."""
    known = dataset.startswith(FOLDER) and dataset != FOLDER
    named = dataset != FOLDER.rstrip(":") and re.fullmatch(r"[a-z]\w*(/[\w.+-]+)?(:\d+\.\d+\.\d+)?", dataset)
    if not (known or named):
        raise UsageError(
            f"dataset={dataset} is not cifar10, synthetic, auto, {FOLDER}<path> or the name of one of "
            "TensorFlow Datasets, as svhn_cropped"
        )
