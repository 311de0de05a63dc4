"""Recipes: the flagfiles in `configs/`, and the settings that decide what is trained."""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar_towers.config.settings import names_with
from cifar_towers.config.train_config import TrainConfig
from cifar_towers.errors import UsageError, did_you_mean
from cifar_towers.registry import OPTIMIZERS_BY_LENGTH

DEFAULT_RECIPE = "speed94"
PACKAGE = Path(__file__).resolve().parents[1]
# An installed copy has the recipes inside the package, a checkout beside it.
DIRECTORY = next((place for place in (PACKAGE / "configs", PACKAGE.parent / "configs") if place.is_dir()), PACKAGE)


def recipe_names() -> list[str]:
    """Return the names that `--recipe` takes."""
    return sorted(path.stem for path in DIRECTORY.glob("*.cfg"))


def recipe_flagfile(name: str) -> Path:
    known = recipe_names()
    if name in known:
        return DIRECTORY / f"{name}.cfg"
    if Path(name).is_file():
        raise UsageError(f"recipe={name} is a file, and no name of a recipe; write {shlex.quote(f'--flagfile={name}')}")
    raise UsageError(f"there is no recipe {name}; {did_you_mean(name, known)}the recipes are {', '.join(known)}")


def claimed_accuracy(name: str) -> str:
    """Return the accuracy that the header of a recipe's file states; empty if it was not measured."""
    measured = re.search(r"^# Measured: (.*)$", recipe_flagfile(name).read_text(), re.M)
    return measured[1] if measured else ""


def recipe_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that decide what is trained: a resumed run and all workers of a cluster have them in common.

    `max_steps` belongs to the recipe if a schedule depends on the length of the run.
    """
    by_length = "%" in config.learning_rate_schedule + config.image_size_schedule or config.lookahead
    by_length |= config.optimizer in OPTIMIZERS_BY_LENGTH or config.freeze_first_group > 0
    left_out = set(names_with(TrainConfig, on_resume="allow"))
    if config.epochs == 0 and by_length:
        left_out -= {"max_steps"}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out}


def differing_settings(config: TrainConfig, saved: Mapping[str, Any], has_batch_norm: bool) -> list[str]:
    """Return the settings because of which a run may not be resumed, each as `name saved value -> value now`.

    Args:
      saved: `recipe_fields` of the run so far. A setting that is missing there had its default value.
      has_batch_norm: whether the net has batch normalization; some settings change what is trained only there.
    """
    conditional = names_with(TrainConfig, on_resume="allow_without_batch_norm")
    defaults = {name: value for name, value in recipe_fields(TrainConfig()).items() if name not in conditional}
    unknown = [f"{name} {value} -> no longer a setting" for name, value in saved.items() if not hasattr(config, name)]
    saved, current = {**defaults, **saved}, recipe_fields(config)
    compared = [name for name in current if name in saved and (has_batch_norm or name not in conditional)]
    return unknown + [f"{name} {saved[name]} -> {current[name]}" for name in compared if saved[name] != current[name]]


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must be the same on all workers of a cluster."""
    return {name: getattr(config, name) for name in names_with(TrainConfig, per_worker=False)}
