"""Flags, made from the settings of a program, and the one parser of command lines, flagfiles,
recipes and keywords.
"""

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from cifar_towers.config.settings import Config, Settings, title_of
from cifar_towers.config.train_config import DeviceSettings, TrainConfig
from cifar_towers.errors import UsageError
from cifar_towers.registry import FUNCTIONS, find_source

DEFAULT_RECIPE = "speed94"
PACKAGE = Path(__file__).resolve().parents[1]
# An installed copy has the recipes inside the package, a checkout beside it.
RECIPES = next(
    (place for place in (PACKAGE / "configs", PACKAGE.parent / "configs") if place.is_dir()),
    PACKAGE,
)
BASIC = (  # settings of a training that --help lists; --helpfull has all
    "recipe",
    "num_gpus",
    "dataset",
    "model",
    "epochs",
    "batch_size",
    "precision",
    "variable_placement",
    "seed",
    "train_dir",
    "overwrite",
)
HELP = ("-h", "--help", "--helpfull")
PATHS = ("train_dir", "init_from", "out", "runs_dir")  # a shell leaves the ~ after `--train_dir=`
DEFINE = {
    bool: absl_flags.DEFINE_boolean,
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    str: absl_flags.DEFINE_string,
}


def parse_command_line(
    config_class: type[Config], arguments: Sequence[str], description: str = ""
) -> Config:
    """Make the config of a program from flags and flagfiles, of which later ones override earlier
    ones.

    The settings of a training override those of its recipe, which is speed94 unless they name
    another or a model. Print the help and exit if the command line asks for it.

    Raises:
      UsageError: stray arguments, unknown flags, values of a wrong type, out of range or in
        conflict, or a file of the user's does not exist.
    """
    if not set(HELP).isdisjoint(arguments):
        print(help_text(config_class, description, is_full="--helpfull" in arguments))
        sys.exit(0)

    flags = _define(config_class, flag_settings(config_class))
    try:
        # Flagfiles are read once, as one may be a pipe.
        given = flags.read_flags_from_files(list(arguments), force_gnu=False)
        _, *rest = flags(["", *given])
        if issubclass(config_class, TrainConfig):
            flags(["", *_recipe_arguments(flags), *given])
    except (absl_flags.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{' '.join(str(error).split())}; --helpfull lists the flags") from None

    without_flag = [
        field.name for field in dataclasses.fields(config_class) if not _has_flag(field)
    ]
    if rest and not without_flag:
        raise UsageError(
            f"{rest[0]!r} is not a flag; write settings as --name=value; --help lists them"
        )
    settings = flags.flag_values_dict() | {name: tuple(rest) for name in without_flag}
    for name in PATHS:
        if name in settings:
            settings[name] = os.path.expanduser(settings[name])
    for name in FUNCTIONS:
        find_source(name, settings.get(name, ""))
    return config_class(**settings)


def make_config(config_class: type[Config], settings: Mapping[str, Any]) -> Config:
    """Make the config of a program from settings by name, as a call from Python gives them.

    They are parsed as flags. None stands for the default.

    Raises:
      UsageError: see `parse_command_line`.
      TypeError: there is no such setting.
    """
    names = [field.name for field in flag_settings(config_class)]
    arguments = []
    for name, value in settings.items():
        if name not in names:
            raise TypeError(f"there is no setting {name!r}")
        if value is not None:
            arguments.append(f"--{name}={value}")
    return parse_command_line(config_class, arguments)


def help_text(config_class: type[Settings], description: str, is_full: bool) -> str:
    """Return the description of a program and the help of its flags.

    Unless `is_full`, the help of a training shows only the `BASIC` settings. The help of another
    program leaves out the settings of the devices that are not `BASIC`. A training's defaults are
    those of the default recipe.
    """
    fields = flag_settings(config_class)
    shortened = TrainConfig if issubclass(config_class, TrainConfig) else DeviceSettings
    hidden = {field.name for field in dataclasses.fields(shortened)}.difference(BASIC)
    shown = [field for field in fields if is_full or field.name not in hidden]

    is_training = issubclass(config_class, TrainConfig)
    defaults = vars(parse_command_line(config_class, [])) if is_training else {}
    flags = _define(config_class, shown, defaults)
    parts = [description, flags.get_help(include_special_flags=False).strip()]
    if len(shown) < len(fields):
        parts.append(f"{len(fields) - len(shown)} more flags: --helpfull lists all.")
    if is_training:
        recipes = ", ".join(recipe_names())
        parts.append(
            f"These defaults are those of {DEFAULT_RECIPE}. Other recipes, and --model without "
            f"--recipe, have others. Recipes: {recipes}."
        )
    parts.append("--flagfile=FILE reads flags from a file, one a line; later flags override them.")
    return "\n\n".join(parts)


def flag_settings(config_class: type[Settings]) -> list[dataclasses.Field]:
    """Return the settings of a program that have a flag."""
    return [field for field in dataclasses.fields(config_class) if _has_flag(field)]


def _has_flag(field: dataclasses.Field) -> bool:
    """Return whether a setting has a flag: a tuple takes the arguments that are no flags."""
    return typing.get_origin(field.type) is not tuple


def _define(
    config_class: type[Settings],
    fields: Sequence[dataclasses.Field],
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> absl_flags.FlagValues:
    """Define a flag for each setting; the help lists it under the title of its section. Settings
    have their own defaults unless `defaults` has another.
    """
    flags = absl_flags.FlagValues()
    field: Any
    for field in fields:
        text = field.metadata["help"]
        if field.metadata["choices"]:
            text += f" ({'|'.join(field.metadata['choices'])})"
        title = title_of(config_class, field.name)
        default = defaults.get(field.name, field.default)
        DEFINE[field.type](field.name, default, text, flag_values=flags, module_name=title)
    return flags


# Recipes: the flagfiles in `configs/` -------------------------------------------------------------


def recipe_names() -> list[str]:
    """Return the names that `--recipe` takes."""
    return sorted(path.stem for path in RECIPES.glob("*.cfg"))


def recipe_flagfile(name: str) -> Path:
    if name not in recipe_names():
        raise UsageError(f"recipe={name} is not one of {', '.join(recipe_names())}")
    return RECIPES / f"{name}.cfg"


def _recipe_arguments(flags: absl_flags.FlagValues) -> list[str]:
    """Return the flags that stand for the recipe of a training whose own flags are these."""
    recipe = flags["recipe"].value
    if not flags["recipe"].present and not flags["model"].present:
        recipe = DEFAULT_RECIPE
    if not recipe:
        return []
    return [f"--flagfile={recipe_flagfile(recipe)}", f"--recipe={recipe}"]
