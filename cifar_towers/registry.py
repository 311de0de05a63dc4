"""Names of models, data sets, optimizers and levels of test-time augmentation, and the properties of each.

This module does not import TensorFlow, so that a wrong name is refused at once.
"""

import re

from cifar_towers.errors import UsageError
from cifar_towers.user_code import split_function

# Speednets are built for no image size, with whitening filters, and their variables have roles by the layers' names.
SPEEDNETS = ("speednet93", "speednet94", "speednet95", "speednet96", "speednet_proxy")
MODELS = ("cifarnet", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110", *SPEEDNETS)
OPTIMIZERS = ("momentum", "muon", "adamw")  # `training.optimizers.make_optimizer` has the update rules of each
OPTIMIZERS_BY_LENGTH = ("muon",)  # the update depends on the number of steps in the run
BUILT_IN = ("cifar10", "synthetic", "auto")  # the directories of runs on them carry no data set's name
PREFIXES = FOLDER, CSV, NPZ = "folder:", "csv:", "npz:"  # of the names of data sets at a path
TTA_LEVELS = (0, 1, 2)  # `data.augment.tta_views` has the views of each
TTA_HELP = "0 (none), 1 (mirror), 2 (mirror and shifts)"


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
