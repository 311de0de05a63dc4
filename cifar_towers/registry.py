"""What nets, data sets and levels of test-time augmentation are called; without TensorFlow, so that a wrong name is
refused at once."""

import re
from typing import NamedTuple

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


class TtaView(NamedTuple):
    """One view of an image in test-time augmentation, and the weight of its logits."""

    weight: float
    mirrored: bool = False
    shift: int = 0  # pixels, along rows and columns; the border is reflected


TTA_LEVELS = {  # `--tta`: views whose weights sum to 1, the image itself first. Source: K. Jordan, arXiv 2404.00498
    0: (TtaView(1.0),),
    1: (TtaView(0.5), TtaView(0.5, mirrored=True)),
    2: (
        TtaView(0.25),
        TtaView(0.25, mirrored=True),
        TtaView(0.125, shift=-1),
        TtaView(0.125, mirrored=True, shift=-1),
        TtaView(0.125, shift=1),
        TtaView(0.125, mirrored=True, shift=1),
    ),
}


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
            f"dataset={dataset} is not {', '.join(BUILT_IN)}, {FOLDER}<path> or the name of one of "
            "TensorFlow Datasets, as svhn_cropped"
        )


def describe_tta_levels() -> str:
    """The levels and what each adds, as help texts list them."""
    return ", ".join(f"{level} ({_describe_views(views)})" for level, views in TTA_LEVELS.items())


def _describe_views(views: tuple[TtaView, ...]) -> str:
    added = {"mirror": any(view.mirrored for view in views), "shifts": any(view.shift for view in views)}
    return " and ".join(name for name, used in added.items() if used) or "none"
