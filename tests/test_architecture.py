"""Imports inside the package point down and form no circle."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "cifar_towers"

# The folders, and the modules at the package's root, bottom first. Each may import those of the
# layers below it.
LAYERS = (
    ("config", "registry", "errors", "files", "hardware", "signals"),
    ("xla",),
    ("towers",),
    ("models", "data"),
    ("multi_worker",),
    ("training", "runs", "evaluation", "reporting"),
    ("callbacks",),
    ("trainer", "inference"),
    ("api",),
    ("cli",),
    ("__main__",),
)
LEVELS: dict[str, int] = {}
for level, folders in enumerate(LAYERS):
    LEVELS |= dict.fromkeys(folders, level)
SAME_LAYER = {  # (folder, imported module or folder of the same layer): the reason
    ("config", "registry"): "the defaults and choices of settings are registry entries",
    ("config", "errors"): "a wrong value raises UsageError",
    ("registry", "errors"): "an unknown name raises UsageError",
    ("files", "errors"): "the text of an error in one line",
    ("hardware", "errors"): "another backend of Keras raises UsageError",
    ("reporting", "training.diagnostics"): "plain result types cross folders",
    ("reporting", "training.losses"): "the name of a loss term in reports",
    ("reporting", "training.optimizers"): "which learning rate stands for all",
    ("reporting", "training.runner"): "plain result types cross folders",
    ("reporting", "training.setup"): "plain result types cross folders",
    ("runs", "reporting.records"): "a run reads its records",
    ("runs", "evaluation.score"): "the names of scores, and which one a run reports",
    ("reporting", "training.step"): "plain result types cross folders",
    ("reporting", "evaluation.score"): "plain result types cross folders",
}
LATE = {  # module whose functions import others when they are called: the reason
    "runs.run": "a run is quick to import, and four of its methods need TensorFlow",
}


def read_modules():
    """Return module name -> source for every module of the package but its own `__init__`."""
    modules = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        *parents, name = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        modules[".".join(parents if name == "__init__" else [*parents, name])] = path.read_text()
    modules.pop("")
    return modules


MODULES = read_modules()
TREES = {name: ast.parse(source) for name, source in MODULES.items()}


def imported_modules(node):
    """Return the modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.level:
        raise ValueError(f"a relative import in line {node.lineno}")
    else:  # `from folder import module` names a module, `from module import function` does not
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name.partition(".")[2] in MODULES else node.module for name in names]
    inside = (name.partition(".")[2] for name in names if name.partition(".")[0] == PACKAGE)
    return sorted({name for name in inside if name})


def read_imports():
    """Return (importer, imported module, line, whether in a function) of each import; names as
    `training.step`.
    """
    imports = []
    for name, tree in TREES.items():
        functions = [
            node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))
        ]
        late: set[int] = set()
        for function in functions:
            late |= {id(node) for node in ast.walk(function)}

        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports += [
                    (name, target, node.lineno, id(node) in late)
                    for target in imported_modules(node)
                ]
    return imports


IMPORTS = read_imports()


def folder(module):
    return module.partition(".")[0]


def points_up(importer, imported):
    """Return whether an import points to a higher layer, or to the same one without a reason."""
    here = LEVELS[folder(importer)]
    there = LEVELS[folder(imported)]
    if here != there:
        return here < there
    if folder(importer) == folder(imported):
        return False
    names = {(folder(importer), imported), (folder(importer), folder(imported))}
    return names.isdisjoint(SAME_LAYER)


def test_every_folder_is_in_a_layer():
    assert {folder(module) for module in MODULES} == set(LEVELS)


def test_no_import_points_up():
    """Except when the methods of a run are called."""
    up = [
        (importer, line, imported)
        for importer, imported, line, in_function in IMPORTS
        if points_up(importer, imported) and not (in_function and importer in LATE)
    ]
    assert up == []


def test_exceptions_are_needed():
    used = set()
    for importer, module, *_ in IMPORTS:
        used |= {(folder(importer), module), (folder(importer), folder(module))}

    assert set(SAME_LAYER) - used == set()


@pytest.mark.parametrize("name", [folder, str], ids=["folders", "modules"])
def test_imports_form_no_circle(name):
    graph = {name(module): set() for module in MODULES}
    for importer, imported, _, in_function in IMPORTS:
        if not (in_function and importer in LATE):
            graph[name(importer)] |= {name(imported)} - {name(importer)}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]), pytrace=False)


def test_no_import_of_the_package_is_inside_a_function():
    """Except in `cli` and `api`, which load what they run after the settings are checked, and in
    `LATE`.
    """
    late = []
    for importer, imported, line, in_function in IMPORTS:
        may_be_late = folder(importer) in ("cli", "api") or importer in LATE
        if in_function and not may_be_late:
            late.append((importer, line, imported))

    assert late == []
