"""Command-line flags made from a config's settings, and their help text."""

import dataclasses
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import (
    DEFAULT_RECIPE,
    RECIPE,
    REST,
    names_with,
    recipe_flagfile,
    recipe_names,
)
from cifar_towers.errors import UsageError

BASIC = (  # settings of a training that --help lists, in this order; --helpfull has all
    *("recipe", "num_gpus", "dataset", "model", "epochs", "batch_size", "precision", "variable_placement"),
    *("seed", "train_dir", "overwrite"),
)
PATHS = ("train_dir", "init_from", "out", "runs_dir")  # after `--train_dir=` the shell leaves a ~ as it is
HELP_COLUMNS = 100
Config = TypeVar("Config")


def parse_command_line(config_class: type[Config], argv: Sequence[str], description: str) -> Config:
    """Make a config from a recipe, flags and flagfiles, of which later ones override earlier ones.

    Print the help and exit if the command line asks for it: --help or --helpfull.

    Raises:
      UsageError: stray arguments, unknown flags, or values of a wrong type, out of range or in conflict.
    """
    if asked := {"-h", "--help", "--helpfull"}.intersection(argv[1:]):
        print(help_text(config_class, description, is_full="--helpfull" in asked))
        sys.exit(0)
    values, stray = _parse_flags(config_class, argv)
    if recipe := _choose_recipe(values, argv):  # it stands first, so that every flag overrides it
        values, stray = _parse_flags(config_class, [argv[0], f"--flagfile={recipe_flagfile(recipe)}", *argv[1:]])
    rest = names_with(config_class, group=REST)
    if stray and not rest:
        raise UsageError(f"{stray[0]!r} is not a flag; settings are given as --name=value; --help lists them")
    settings: dict[str, Any] = {field.name: getattr(values, field.name) for field in flag_settings(config_class)}
    settings |= {name: os.path.expanduser(settings[name]) for name in PATHS if name in settings}
    settings |= {name: tuple(stray) for name in rest}
    if "recipe" in settings:
        settings["recipe"] = recipe or Path(_last_flagfile(argv)).stem
    if of_recipe := _recipe_settings(config_class):
        settings["recipe"] = TrainConfig(**{field.name: settings.pop(field.name) for field in of_recipe})
    return config_class(**settings)


def help_text(config_class: type[Any], description: str, is_full: bool = True) -> str:
    """Return the help of all flags by group, or of a program's own flags and the `BASIC` ones of a training."""
    settings, of_training = flag_settings(config_class), dataclasses.fields(TrainConfig)
    groups: dict[str, list[dataclasses.Field]] = {}
    if is_full:
        for field in settings:
            groups.setdefault(field.metadata["group"], []).append(field)
        return _join_help(config_class, description, groups)
    basic = [field for name in BASIC for field in settings if field.name == name and field in of_training]
    groups["Flags"] = [*(field for field in settings if field not in of_training), *basic]
    left = len(settings) - len(groups["Flags"])
    return _join_help(config_class, description, groups, f"{left} more flags: --helpfull lists all" if left else "")


def flag_settings(config_class: type) -> list[dataclasses.Field]:
    """Return the settings that have a flag: a config's own, and those of the recipe that it may hold."""
    own = [field for field in dataclasses.fields(config_class) if field.metadata["group"] not in (REST, RECIPE)]
    return own + _recipe_settings(config_class)


def _parse_flags(config_class: type, argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Return the flags of a config's settings, and the arguments that are none."""
    values = flags.FlagValues()
    parsers: dict[Any, Any] = {int: flags.IntegerParser(), float: flags.FloatParser(), str: flags.ArgumentParser()}
    for field in flag_settings(config_class):
        name, default, help = field.name, field.default, field.metadata["help"]
        if field.type is bool:
            flags.DEFINE_boolean(name, default, help, values)
        else:
            flags.DEFINE(parsers[field.type], name, default, help, values, flags.ArgumentSerializer())
    flags.DEFINE_string("flagfile", "", "file with flags", flag_values=values)
    flags.DEFINE_string("undefok", "", "unknown flags to ignore", flag_values=values)
    try:
        return values, values(argv)[1:]
    except (flags.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{' '.join(str(error).split())}; --helpfull lists the flags") from None


def _choose_recipe(values: flags.FlagValues, argv: Sequence[str]) -> str:
    """Return the recipe to train; empty for none, as with a flagfile or a model and no --recipe."""
    if "recipe" not in values:
        return ""
    flagfile = _last_flagfile(argv)
    if values.recipe and flagfile:
        raise UsageError(
            f"recipe={values.recipe} and flagfile={flagfile} both say what to train; give one, and the rest as flags"
        )
    if values["recipe"].present or flagfile or values["model"].present:
        return values.recipe
    return DEFAULT_RECIPE


def _last_flagfile(argv: Sequence[str]) -> str:
    last = ""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "flagfile":
            last = value if equals else following
    return last


def _recipe_settings(config_class: type) -> list[dataclasses.Field]:
    """Return the settings of the recipe that a config holds, except those that it has itself or refuses."""
    if not names_with(config_class, group=RECIPE):
        return []
    left_out = {field.name for field in dataclasses.fields(config_class) if field.metadata["group"] != RECIPE}
    left_out |= {*getattr(config_class, "refused", ())}
    return [field for field in dataclasses.fields(TrainConfig) if field.name not in left_out]


def _join_help(
    config_class: type[Any], description: str, groups: Mapping[str, Sequence[dataclasses.Field]], more: str = ""
) -> str:
    has_recipe = "recipe" in (field.name for field in flag_settings(config_class))
    default_recipe = [f"--flagfile={recipe_flagfile(DEFAULT_RECIPE)}"] if has_recipe else []
    of_recipe = _parse_flags(config_class, ["", *default_recipe])[0].flag_values_dict()
    blocks = [
        f"{group}:\n" + "\n".join(_describe_flag(field, of_recipe[field.name]) for field in fields)
        for group, fields in groups.items()
        if fields
    ]
    blocks.append("Files:\n  --flagfile\n      file with flags, one a line; later flags override them")
    if has_recipe:
        blocks.append(_wrap(f"Recipes: {', '.join(recipe_names())}."))
    exit_codes = f"Exit codes: {config_class.exit_codes}."
    return "\n\n".join(filter(None, [description, *blocks, more, exit_codes]))


def _describe_flag(field: dataclasses.Field, of_recipe: Any) -> str:
    name = f"--[no]{field.name}" if field.type is bool else f"--{field.name}"
    choices = f" ({'|'.join(filter(None, field.metadata['choices']))})" if field.metadata["choices"] else ""
    if field.metadata["high"] is not None:
        choices = f" ({field.metadata['low']:,g} to {field.metadata['high']:,g})"
    value = f"{DEFAULT_RECIPE}: {of_recipe}" if of_recipe != field.default else ""
    value = "; ".join(filter(None, [str(field.default), value]))
    return f"  {name}{choices}\n{_wrap(field.metadata['help'] + (f' [{value}]' if value else ''), indent=6)}"


def _wrap(text: str, indent: int = 0) -> str:
    return textwrap.indent(textwrap.fill(text, HELP_COLUMNS - indent, break_on_hyphens=False), " " * indent)
