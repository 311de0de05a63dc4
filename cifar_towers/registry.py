"""The names that settings take: models, data sets and optimizers of the project, and functions of
the user's own.

A function is named as `path/to/file.py:function` or `package.module:function`. A file is executed
each time one of its functions is loaded. A module is imported once, as Python does. This module
does not import TensorFlow.
"""

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cifar_towers.errors import UsageError

# Speednets are built for no image size, with whitening filters, and their variables have roles by
# the layers' names.
SPEEDNETS = ("speednet93", "speednet94", "speednet95", "speednet96", "speednet_proxy")
MODELS = ("cifarnet", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110", *SPEEDNETS)
OPTIMIZERS = (
    "momentum",
    "muon",
    "adamw",
)  # `training.optimizers.make_optimizer` has the update rules of each
BUILT_IN = ("cifar10", "synthetic", "auto")
PREFIXES = FOLDER, CSV, NPZ = "folder:", "csv:", "npz:"  # of the names of data sets at a path


def check_model(model: str) -> None:
    """Raise UsageError if the name is neither that of a built-in model nor that of a user's
    function.
    """
    if model not in MODELS and not split_function(model):
        raise UsageError(
            f"model={model} is not one of {', '.join(MODELS)}; give a model of your own as "
            "package.module:function or path/to/file.py:function"
        )


def split_path(dataset: str) -> tuple[str, str]:
    """Split the name of a data set at a path: `"csv:a.csv"` -> ("csv:", "a.csv"). Return ("", name)
    for other names.
    """
    prefix = next((prefix for prefix in PREFIXES if dataset.startswith(prefix)), "")
    return prefix, dataset.removeprefix(prefix)


def check_dataset(dataset: str) -> None:
    """Raise UsageError if the name cannot be that of a data set."""
    prefix, path = split_path(dataset)
    named = f"{dataset}:" not in PREFIXES and re.fullmatch(
        r"[a-z]\w*(/[\w.+-]+)?(:\d+\.\d+\.\d+)?", dataset
    )
    if not ((prefix and path) or named):
        raise UsageError(
            f"dataset={dataset} is not {', '.join(BUILT_IN)}, {FOLDER}<folder>, {CSV}<table>, "
            f"{NPZ}<file> or the name of a TensorFlow Datasets builder, e.g. svhn_cropped"
        )


# Functions of the user's own ----------------------------------------------------------------------


def split_function(name: str) -> tuple[str, str] | None:
    """Split the name of a function: `"nets.py:make"` -> ("nets.py", "make"). Return None for other
    names.
    """
    module, _, function = name.rpartition(":")
    return (module, function) if module and function.isidentifier() else None


def check_function_name(setting: str, name: str) -> None:
    """Raise UsageError if the name is neither empty nor that of a function."""
    if name and not split_function(name):
        raise UsageError(
            f"{setting}={name} is no function; write path/to/file.py:function or "
            "package.module:function"
        )


def find_source(setting: str, name: str) -> Path | None:
    """Return the file of the function that a setting names, without executing it.

    Names that `split_function` does not split have no file. Of a module, Python imports the
    packages that contain it.

    Raises:
      UsageError: there is no such file or module.
    """
    if not (names := split_function(name)):
        return None
    source, _ = names
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"{setting}={name}: there is no file {path}")
        return path
    try:
        with _searched_first(""):
            spec = importlib.util.find_spec(source)
    except ModuleNotFoundError as error:
        if not f"{source}.".startswith(f"{error.name}."):
            raise
        spec = None
    if not spec:
        raise UsageError(
            f"{setting}={name}: there is no module {source}; or write path/to/file.py:function"
        )
    return Path(spec.origin) if spec.has_location and spec.origin else None


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """Import the function that a setting names. What its file or module raises is not caught.

    Raises:
      UsageError: there is no such file, module or function.
    """
    path, (source, function) = find_source(setting, name), split_function(name) or ("", "")
    if path and source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(
            str(path), path
        )  # files of one name are different modules
        assert spec and spec.loader, "a file that ends in .py has both"
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        with _searched_first(str(path.parent)):
            spec.loader.exec_module(module)
    else:
        with _searched_first(""):
            module = importlib.import_module(source)
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{setting}={name}: {source} has no function {function}")
    return getattr(module, function)


@contextlib.contextmanager
def _searched_first(directory: str) -> Iterator[None]:
    """Search a directory first for imported modules, as Python does with the directory of a script
    that it runs.
    """
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
