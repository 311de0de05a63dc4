"""The recipes in `configs/`: flagfiles by name. An installed copy has them inside the package, a checkout beside it."""

import re
from pathlib import Path

from cifar_towers.errors import UsageError, did_you_mean

DEFAULT = "speed94"
PACKAGE = Path(__file__).resolve().parents[1]
DIRECTORY = next((place for place in (PACKAGE / "configs", PACKAGE.parent / "configs") if place.is_dir()), PACKAGE)


def names() -> list[str]:
    """The names that `--recipe` takes."""
    return sorted(path.stem for path in DIRECTORY.glob("*.cfg"))


def flagfile(name: str) -> Path:
    """The file of a recipe.

    Raises:
      UsageError: there is no recipe of this name.
    """
    if name in names():
        return DIRECTORY / f"{name}.cfg"
    if Path(name).is_file():
        raise UsageError(f"recipe={name} is a file, and no name of a recipe; write --flagfile={name}")
    raise UsageError(f"there is no recipe {name}; {did_you_mean(name, names())}the recipes are {', '.join(names())}")


def measured_accuracy(name: str) -> str:
    """What a recipe was measured to reach, by the header of its file; empty if it was not."""
    measured = re.search(r"^# Measured: (.*)$", flagfile(name).read_text(), re.M)
    return measured[1] if measured else ""
