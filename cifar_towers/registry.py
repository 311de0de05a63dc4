"""The names that settings take: models, data sets and optimizers of the project, and functions of
the user's own.

A function is named as `path/to/file.py:function` or `package.module:function`. A file is executed
each time one of its functions is loaded. A module, and what a file imports, is imported once, as
Python does. This module does not import TensorFlow.
"""

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from cifar_towers.errors import UsageError

# Speednets are built for no image size, with whitening filters.
SPEEDNETS = ("speednet93", "speednet94", "speednet95")
MODELS = ("cifarnet", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110", *SPEEDNETS)
# `training.optimizers.make_optimizer` has the update rules of each
OPTIMIZERS = ("momentum", "muon", "adamw")
FUNCTIONS = ("model", "augment", "loss")  # settings that may name a function of the user's
BUILT_IN = ("cifar10", "synthetic", "auto")
PREFIXES = FOLDER, CSV, NPZ = "folder:", "csv:", "npz:"  # of the names of data sets at a path


def check_model(model: str) -> None:
    """Raise UsageError if the name is neither that of a built-in model nor that of a user's
    function.
    """
    if model not in MODELS and not split_function(model):
        raise UsageError(
            f"model={model} is not one of {', '.join(MODELS)}; give your own model as "
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


# Functions of the user's ----------------------------------------------------------------------


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
            f"{setting}={name} must be path/to/file.py:function or package.module:function"
        )


def find_source(setting: str, name: str) -> Path | None:
    """Return the file of the function that a setting names, without executing it.

    Names that `split_function` does not split have no file. Of a module, Python imports the
    packages that contain it.

    Raises:
      UsageError: there is no such file or module.
    """
    names = split_function(name)
    if not names:
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
            f"{setting}={name}: there is no module {source}; for a file, write "
            "path/to/file.py:function"
        )
    return Path(spec.origin) if spec.has_location and spec.origin else None


class _UncachedLoader(importlib.machinery.SourceFileLoader):
    """Executes what a file contains now. Python's cached byte code may be of an earlier edit in the
    same second.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """Import the function that a setting names. What its file or module raises is not caught.

    Raises:
      UsageError: there is no such file, module or function; or Python has imported another version
        of a module from its folder, or another module by that name.
    """
    path = find_source(setting, name)
    source, function = split_function(name) or ("", "")
    if path:
        _check_imported(f"{setting}={name}", path, source)
    if path and source.endswith(".py"):
        # files of one name are different modules
        loader = _UncachedLoader(str(path), str(path))
        spec = importlib.util.spec_from_file_location(str(path), path, loader=loader)
        assert spec is not None  # as there is a loader
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        with _searched_first(str(path.parent)):
            loader.exec_module(module)
    else:
        with _searched_first(""):
            module = importlib.import_module(source)
    for imported in _imported_beside(path, source):
        _digests_at_import.setdefault(imported, _sha256(imported))
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{setting}={name}: {source} has no function {function}")
    return getattr(module, function)


def code_digests(setting: str, name: str) -> dict[str, str]:
    """Return the SHA-256 of the code behind a function, by file: its own, and those that were
    imported from its folder, or from its package if it is in one. Load the function first.

    Its own file is called "", others by their path in that folder. Names without a file have no
    digests.
    """
    path = find_source(setting, name)
    if not path:
        return {}
    source, _ = split_function(name) or ("", "")
    folder = _folder(path, source)
    digests = {"": _sha256(path)}
    for imported in _imported_beside(path, source):
        if imported != path:
            digests[str(imported.relative_to(folder))] = _sha256(imported)
    return digests


def is_unchanged(setting: str, name: str, digests: Mapping[str, str]) -> bool:
    """Return whether the files of earlier `code_digests` have these contents now. Nothing is
    loaded.
    """
    path = find_source(setting, name)
    if not path:
        return not digests
    source, _ = split_function(name) or ("", "")
    folder = _folder(path, source)
    for name_in_folder, digest in digests.items():
        file = folder / name_in_folder if name_in_folder else path
        if not file.is_file() or _sha256(file) != digest:
            return False
    return bool(digests)


# SHA-256 of each file of the user's that Python imported, when it was seen first
_digests_at_import: dict[Path, str] = {}


def _check_imported(asked: str, path: Path, source: str) -> None:
    """Raise UsageError if Python would not import what is in a function's folder now."""
    for imported in _imported_beside(path, source):
        known = _digests_at_import.get(imported)
        if known and known != _sha256(imported):
            raise UsageError(f"{asked}: {imported} was edited after its import; restart Python")

    folder = _folder(path, source)
    for module_name, file in _imported_files():
        is_other = file in _digests_at_import and folder not in file.parents
        beside = folder.joinpath(*module_name.split("."))
        if is_other and (beside.with_suffix(".py").exists() or beside.is_dir()):
            raise UsageError(
                f"{asked}: Python has already imported {file} as {module_name}, and {folder} has "
                "that name too; restart Python"
            )


def _imported_beside(path: Path | None, source: str) -> list[Path]:
    """Return the files of imported modules that are in the folder or the package of a function."""
    if not path:
        return []
    folder = _folder(path, source)
    is_in_package = "." in source and not source.endswith(".py")
    package = source.partition(".")[0]

    beside = []
    for name, file in _imported_files():
        top_level, *parts = name.split(".")
        depth = len(parts) + (1 if file.name == "__init__.py" else 0)
        is_in_folder = len(file.parents) > depth and file.parents[depth] == folder
        if is_in_folder and (top_level == package or not is_in_package):
            beside.append(file)
    return beside


def _imported_files() -> list[tuple[str, Path]]:
    """Return (name, file) of the imported modules, but for the main program and this package."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        # multiprocessing calls the main program __mp_main__, too
        is_apart = name.partition(".")[0] in ("__main__", "__mp_main__", "cifar_towers")
        if file.endswith(".py") and "/" not in name and not is_apart:
            found.append((name, Path(file)))
    return found


def _folder(path: Path, source: str) -> Path:
    """Return the folder that a function's file imports from: its own, or that of its package."""
    if source.endswith(".py"):
        return path.parent
    depth = source.count(".") + (1 if path.name == "__init__.py" else 0)
    return path.parents[depth]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
