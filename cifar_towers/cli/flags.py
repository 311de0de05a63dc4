"""Command-line flags made from a config's settings. absl parses them, flagfiles too, and writes their help."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import RECIPE, REST, Config, make_config, names_with, recipe_names
from cifar_towers.errors import UsageError

BASIC = (  # settings of a training that --help lists; --helpfull has all
    *("recipe", "num_gpus", "dataset", "model", "epochs", "batch_size", "precision", "variable_placement"),
    *("seed", "train_dir", "overwrite"),
)


def parse_command_line(config_class: type[Config], arguments: Sequence[str], description: str = "") -> Config:
    """Make a config from flags and flagfiles, of which later ones override earlier ones.

    Print the help and exit if the command line asks for it: --help or --helpfull.

    Raises:
      UsageError: stray arguments, unknown flags, or values of a wrong type, out of range or in conflict.
    """
    fields = flag_settings(config_class)
    if asked := {"-h", "--help", "--helpfull"}.intersection(arguments):
        print(help_text(fields, description, is_full="--helpfull" in asked))
        sys.exit(0)
    values = _define(fields)
    try:
        _, *stray = values(["", *arguments])
    except (flags.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{' '.join(str(error).split())}; --helpfull lists the flags") from None
    rest = names_with(config_class, group=REST)
    if stray and not rest:
        raise UsageError(f"{stray[0]!r} is not a flag; settings are given as --name=value; --help lists them")
    settings = {field.name: values[field.name].value for field in fields if values[field.name].present}
    return make_config(config_class, settings | {name: tuple(stray) for name in rest})


def help_text(fields: Sequence[dataclasses.Field], description: str, is_full: bool) -> str:
    """Return the description of a program and the help of its flags; by default of a training's `BASIC` ones only."""
    of_training = {field.name for field in dataclasses.fields(TrainConfig)}
    shown = [field for field in fields if is_full or field.name in BASIC or field.name not in of_training]
    parts = [description, _define(shown).get_help(include_special_flags=False).strip()]
    if len(shown) < len(fields):
        parts.append(f"{len(fields) - len(shown)} more flags: --helpfull lists all")
    if "recipe" in {field.name for field in fields}:
        parts.append(f"Recipes, which set other defaults: {', '.join(recipe_names())}.")
    parts.append("--flagfile=FILE reads flags from a file, one a line; later flags override them.")
    return "\n\n".join(parts)


def flag_settings(config_class: type) -> list[dataclasses.Field]:
    """Return the settings that have a flag: a config's own, and those of the recipe that it may hold."""
    own = [field for field in dataclasses.fields(config_class) if field.metadata["group"] not in (REST, RECIPE)]
    if not names_with(config_class, group=RECIPE):
        return own
    left_out = {field.name for field in own} | {*getattr(config_class, "refused", ())}
    return own + [field for field in dataclasses.fields(TrainConfig) if field.name not in left_out]


def _define(fields: Sequence[dataclasses.Field]) -> flags.FlagValues:
    """Define a flag for each setting, in the help section of its group."""
    values = flags.FlagValues()
    parsers: dict[Any, flags.ArgumentParser] = {
        int: flags.IntegerParser(),
        float: flags.FloatParser(),
        str: flags.ArgumentParser(),
    }
    for field in fields:
        text, group = field.metadata["help"], field.metadata["group"]
        choices = f" ({'|'.join(filter(None, field.metadata['choices']))})" if field.metadata["choices"] else ""
        if field.type is bool:
            flags.DEFINE_boolean(field.name, field.default, text, values, module_name=group)
            continue
        parser, serializer = parsers[field.type], flags.ArgumentSerializer()
        flags.DEFINE(parser, field.name, field.default, text + choices, values, serializer, module_name=group)
    return values
