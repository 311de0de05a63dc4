"""Names of models, data sets, optimizers and levels of test-time augmentation, and the properties of each.

This module does not import TensorFlow, so that a wrong name is refused at once.
"""

import re
from typing import NamedTuple

from cifar_towers.errors import UsageError
from cifar_towers.user_code import split_function


class ModelSpec(NamedTuple):
    """The properties of a model that settings depend on."""

    is_speednet: bool = False  # built for no image size, with whitening filters, and roles by the names of its layers


class OptimizerSpec(NamedTuple):
    """The properties of an optimizer that settings depend on."""

    by_length: bool = False  # the update depends on the number of steps in the run


MODELS = {
    "cifarnet": ModelSpec(),
    **dict.fromkeys(("resnet20", "resnet32", "resnet44", "resnet56", "resnet110"), ModelSpec()),
    **dict.fromkeys(
        ("speednet93", "speednet94", "speednet95", "speednet96", "speednet_proxy"), ModelSpec(is_speednet=True)
    ),
}

OPTIMIZERS = {  # `training.optimizers.make_optimizer` has the update rules of each
    "momentum": OptimizerSpec(),
    "muon": OptimizerSpec(by_length=True),
    "adamw": OptimizerSpec(),
}
BUILT_IN = ("cifar10", "synthetic", "auto")  # the directories of runs on them carry no data set's name
PREFIXES = FOLDER, CSV, NPZ = "folder:", "csv:", "npz:"  # of the names of data sets at a path


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
TTA_HELP = "0 (none), 1 (mirror), 2 (mirror and shifts)"  # the levels, for help texts and errors


def model_spec(model: str) -> ModelSpec:
    """Return the properties of a model by name; every model of a user's has the same."""
    return MODELS.get(model, ModelSpec())


def check_model(model: str) -> None:
    """Raise UsageError if the name is neither that of a built-in model nor that of a user's function."""
    if model not in MODELS and not split_function(model):
        raise UsageError(
            f"model={model} is not one of {', '.join(MODELS)}; give a model of your own as package.module:function or "
            "path/to/file.py:function"
        )


def split_path(dataset: str) -> tuple[str, str]:
    """Split the name of a data set at a path: `"csv:a.csv"` -> ("csv:", "a.csv"). Return ("", name) for other names."""
    prefix = next((prefix for prefix in PREFIXES if dataset.startswith(prefix)), "")
    return prefix, dataset.removeprefix(prefix)


def check_dataset(dataset: str) -> None:
    """Raise UsageError if the name cannot be that of a data set."""
    prefix, path = split_path(dataset)
    named = f"{dataset}:" not in PREFIXES and re.fullmatch(r"[a-z]\w*(/[\w.+*-]+)?(:\d+\.\d+\.\d+)?", dataset)
    if not ((prefix and path) or named):
        raise UsageError(
            f"dataset={dataset} is not {', '.join(BUILT_IN)}, {FOLDER}<folder>, {CSV}<table>, {NPZ}<file> or the name "
            "of a TensorFlow Datasets builder, e.g. svhn_cropped"
        )
