"""Functions of the user's own, named as `path/to/file.py:function` or `package.module:function`.

Names are checked without executing anything, and without TensorFlow; loading a function executes its module.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from cifar_towers.errors import UsageError, did_you_mean

log_once = functools.cache(logging.getLogger(__name__).info)  # some runs build and check their model several times
_modules: dict[tuple[Path, int], tuple[ModuleType, set[str]]] = {}  # of files, with the settings that name them
_helpers: set[str] = set()  # modules beside these files, which the files imported
_first_used: dict[str, tuple[ModuleSpec | None, bytes]] = {}  # spec and code of modules when a setting named them


def split_function(name: str) -> tuple[str, str] | None:
    """Split the name of a function: `"nets.py:make"` -> ("nets.py", "make"). Return None for other names."""
    module, _, function = name.rpartition(":")
    return (module, function) if module and function.isidentifier() else None


def check_function_name(setting: str, name: str) -> None:
    """Raise UsageError if the name is neither empty nor that of a function."""
    if name and not split_function(name):
        raise UsageError(f"{setting}={name} is no function; write path/to/file.py:function or package.module:function")


def check_function(setting: str, name: str) -> Path | None:
    """Check, without executing any code, that the file or module of a function exists and has it; return its path.

    Args:
      setting: the setting that names the function, for the error. Names that `split_function` does not split are not
        checked.

    Raises:
      UsageError: the file, the module or the function does not exist.
    """
    if not (names := split_function(name)):
        return None
    source, function = names
    path = Path(source).expanduser()
    if not source.endswith(".py"):
        spec = _find_module(source)
        if not spec:
            raise UsageError(f"{setting}={name}: there is no module {source}; or write path/to/file.py:function")
        path = Path(spec.origin or "")
    elif not path.is_file():
        raise UsageError(f"{setting}={name}: there is no file {path}")
    if path.suffix != ".py":
        return path
    try:
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    except (OSError, ValueError, SyntaxError):  # importing it will tell where
        return path
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    if not {function, "*", "__getattr__"} & (defined | bound):
        has = f"it has {', '.join(sorted(defined)) or 'none'}"
        raise UsageError(
            f"{setting}={name}: {source} has no function {function}; {did_you_mean(function, defined)}{has}"
        )
    return path


def load_function(setting: str, name: str, shared: bool = True) -> Callable[..., Any]:
    """Import the function that a setting names.

    Raises:
      UsageError: as `load_object` does; or the object cannot be called.
    """
    function = load_object(setting, name, shared)
    if not callable(function):
        raise UsageError(f"{setting}={name} is no function")
    return function


def load_object(setting: str, name: str, shared: bool = True) -> Any:
    """Import the object that a setting names, as `path/to/file.py:name` or `package.module:name`.

    Args:
      shared: settings that name the same unchanged file share its module. It is executed again for a second model.

    Raises:
      UsageError: there is no such file, module or name, or importing it fails.
    """
    source, _, attribute = name.rpartition(":")
    with of_setting(setting, name):
        with as_usage_errors(f"{source} cannot be imported"):
            module = _import(setting, source, shared)
        if not hasattr(module, attribute):
            functions = ", ".join(each for each, value in vars(module).items() if inspect.isfunction(value))
            raise UsageError(f"{source} has no function {attribute}; it has {functions or 'none'}")
    return getattr(module, attribute)


@contextlib.contextmanager
def of_setting(setting: str, name: str) -> Iterator[None]:
    """Put the setting that names the user's code before the message of a UsageError in the context."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{setting}={name}: {error}") from error


@contextlib.contextmanager
def as_usage_errors(message: str) -> Iterator[None]:
    """Turn an error or `sys.exit` in the context into a one-line UsageError, with its place in the user's code."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{message}: {_error_line(error)}") from error


def _find_module(name: str) -> ModuleSpec | None:
    """Find a module as an import would. Only a package's parents' search paths are read; nothing is executed."""
    top, *inner = name.split(".")
    sys.path.insert(0, "")  # as for an import of the user's code
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, as __main__
        return None
    finally:
        sys.path.remove("")
    for part in inner:
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, spec.submodule_search_locations) if spec else None
    return spec


def forget_files() -> None:
    """Let the next import of each file execute it again, as each run has its own global variables and its own log.

    Modules that a file imports from its own directory are executed again too. Packages are not.
    """
    _modules.clear()
    for name in _helpers:
        sys.modules.pop(name, None)
    _helpers.clear()
    log_once.cache_clear()


def _import(setting: str, source: str, shared: bool) -> ModuleType:
    path = Path(source).expanduser()
    is_file = source.endswith(".py")
    if is_file and not path.is_file():
        raise UsageError(f"there is no file {path}")
    directory = str(path.parent) if is_file else ""
    sys.path.insert(0, directory)  # as Python does for the directory of the script it runs
    try:
        if not is_file:
            module = importlib.import_module(source)
            _warn_of_change(source, module)
            return module
        key = path.resolve(), path.stat().st_mtime_ns
        spec = importlib.util.spec_from_file_location(f"own_{key[0].stem}", path)
        assert spec and spec.loader, "a file that ends in .py has both"
        modules = _modules if shared else {}
        module, settings = modules.setdefault(key, (importlib.util.module_from_spec(spec), set()))
        if not settings or (setting == "model" and setting in settings):
            sys.modules[spec.name] = module
            before = {*sys.modules}
            try:
                spec.loader.exec_module(module)
            finally:
                files = {name: getattr(sys.modules[name], "__file__", None) for name in sys.modules.keys() - before}
                beside = {name for name, file in files.items() if file and Path(file).parent.resolve() == key[0].parent}
                _helpers.update(beside)
        settings.add(setting)
        return module
    finally:
        sys.path.remove(directory)


def _warn_of_change(name: str, module: ModuleType) -> None:
    """Warn if the file of a module has changed since a setting first named it, and the module was not reloaded."""
    path = Path(getattr(module, "__file__", None) or "")
    if not path.is_file():
        return
    spec, code = module.__spec__, path.read_bytes()
    imported, before = _first_used.setdefault(name, (spec, code))
    if spec is not imported:
        _first_used[name] = spec, code
    elif code != before:
        logging.getLogger(__name__).warning(
            f"{path} has changed since a run first used it, and its old code runs unless it was reloaded; "
            f"{path.name}:function is read anew in each run"
        )


def _error_line(error: BaseException) -> str:
    """Return an error as one line, with the last place in the user's code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("<", f"{Path(__file__).parent}/", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    users = [frame for frame in frames if not frame.filename.startswith(others)]
    path = Path(users[-1].filename if users else "")
    name = "notebook cell" if path.parent.name.startswith("ipykernel_") else path.name
    place = f"{name}, line {users[-1].lineno}: " if users else ""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Keras writes in bold
    hint = ""
    missing = path.parent / f"{error.name}.py" if isinstance(error, ModuleNotFoundError) else None
    if missing and missing.is_file() and users and users[-1].name != "<module>":
        hint = "; import it at the top of the file, not in a function"
    return f"{place}{type(error).__name__}: {' '.join(text.split())[:200]}{hint}"
