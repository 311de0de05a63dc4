"""Command-line flags made from a config's settings, and their help text."""

import dataclasses
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from cifar_towers.config import TrainConfig
from cifar_towers.config.recipe import DEFAULT_RECIPE, recipe_flagfile, recipe_names
from cifar_towers.config.settings import RECIPE, REST, names_with
from cifar_towers.errors import UsageError

BASIC = (  # settings of a training that --help lists, in this order; --helpfull has all
    *("recipe", "num_gpus", "dataset", "model", "epochs", "batch_size", "precision", "variable_placement"),
    *("seed", "train_dir", "overwrite"),
)
HELP_COLUMNS = 100
Config = TypeVar("Config")


def parse_command_line(config_class: type[Config], argv: Sequence[str], description: str) -> Config:
    """A config from a recipe, flags and flagfiles, of which later ones override earlier ones. Prints help and exits if
    asked to.

    Raises:
      UsageError: stray arguments, unknown flags, or values of a wrong type, out of range or in conflict.
    """
    if {"-h", "-help", "--help", "-helpfull", "--helpfull"}.intersection(argv[1:]):
        full = {"-helpfull", "--helpfull"}.intersection(argv[1:])
        print((help_text if full else short_help)(config_class, description))
        sys.exit(0)
    values, stray = _parse_flags(config_class, argv)
    if recipe := _choose_recipe(values, argv):  # it stands first, so that every flag overrides it
        values, stray = _parse_flags(config_class, [argv[0], f"--flagfile={recipe_flagfile(recipe)}", *argv[1:]])
    rest = names_with(config_class, group=REST)
    if stray and not rest:
        raise UsageError(f"{stray[0]!r} is not a flag; settings are given as --name=value, and --help lists them")
    settings = {field.name: getattr(values, field.name) for field in flag_settings(config_class)}
    settings |= {name: tuple(stray) for name in rest}
    if "recipe" in settings:
        settings["recipe"] = recipe or Path(_last_flagfile(argv)).stem
    if of_recipe := _recipe_settings(config_class):
        settings["recipe"] = TrainConfig(**{field.name: settings.pop(field.name) for field in of_recipe})
    return config_class(**settings)


def short_help(config_class: type, description: str) -> str:
    """The help of the flags that people need: of a training's settings the `BASIC` ones, and a program's own."""
    settings, of_training = flag_settings(config_class), dataclasses.fields(TrainConfig)
    basic = [field for name in BASIC for field in settings if field.name == name and field in of_training]
    shown = [*(field for field in settings if field not in of_training), *basic]
    more = len(settings) - len(shown)
    return _join_help(config_class, description, {"Flags": shown}, f"{more} more flags: --helpfull" if more else "")


def help_text(config_class: type, description: str) -> str:
    """The help of all flags, by group."""
    groups: dict[str, list[dataclasses.Field]] = {}
    for field in flag_settings(config_class):
        groups.setdefault(field.metadata["group"], []).append(field)
    return _join_help(config_class, description, groups)


def flag_settings(config_class: type) -> list[dataclasses.Field]:
    """The settings that have a flag: a config's own, and those of the recipe it may hold."""
    own = [field for field in dataclasses.fields(config_class) if field.metadata["group"] not in (REST, RECIPE)]
    return own + _recipe_settings(config_class)


def _parse_flags(config_class: type, argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Flags, and the arguments that are none."""
    values = _define_flags(config_class)
    try:
        return values, values(argv)[1:]
    except (flags.Error, UnicodeDecodeError) as error:
        raise UsageError(_describe_flag_error(error, config_class)) from None


def _choose_recipe(values: flags.FlagValues, argv: Sequence[str]) -> str:
    """The recipe to train; empty for none, as with a flagfile or a model and no --recipe."""
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


def _define_flags(config_class: type) -> flags.FlagValues:
    values = flags.FlagValues()
    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    for field in flag_settings(config_class):
        if words := field.metadata["words"]:
            parser, serializer = _IntegerOrWord(words), flags.ArgumentSerializer()
            flags.DEFINE(parser, field.name, field.default, field.metadata["help"], values, serializer)
        else:
            define[field.type](field.name, field.default, field.metadata["help"], flag_values=values)
    flags.DEFINE_string("flagfile", "", "read flags from a file", flag_values=values)
    flags.DEFINE_string("undefok", "", "unknown flags to ignore", flag_values=values)
    return values


class _IntegerOrWord(flags.IntegerParser):
    """Numbers, and words that stand for some."""

    def __init__(self, words: Mapping[str, int]):
        super().__init__()
        self.words = words

    def parse(self, argument: str | int) -> int:
        """The number that is written, or that the word stands for."""
        return self.words[argument] if argument in self.words else super().parse(argument)


def _describe_flag_error(error: Exception, config_class: type) -> str:
    flag = getattr(error, "flagname", "")
    refused = getattr(config_class, "refused", {})
    name = flag if flag in refused else flag.removeprefix("no")
    if name in refused:
        return f"{name} is not a flag of this program: {refused[name]}; leave it out"
    message = " ".join(str(error).split()).removeprefix("ERROR:: ")
    return f"{message}; {'configs/ has the recipes' if 'flagfile' in message else '--helpfull lists the flags'}"


def _recipe_settings(config_class: type) -> list[dataclasses.Field]:
    """The settings of the recipe that a config holds, without those that it has itself or refuses."""
    if not names_with(config_class, group=RECIPE):
        return []
    left_out = {field.name for field in dataclasses.fields(config_class) if field.metadata["group"] != RECIPE}
    return [field for field in dataclasses.fields(TrainConfig) if field.name not in left_out | {*config_class.refused}]


def _join_help(
    config_class: type, description: str, groups: Mapping[str, Sequence[dataclasses.Field]], more: str = ""
) -> str:
    has_recipe = "recipe" in (field.name for field in flag_settings(config_class))
    of_recipe = _recipe_values(config_class) if has_recipe else {}
    blocks = [
        f"{group}:\n" + "\n".join(_describe_flag(field, of_recipe.get(field.name, field.default)) for field in fields)
        for group, fields in groups.items()
    ]
    blocks.append("Files:\n  --flagfile\n      read flags from a file, one a line; later flags override them")
    if has_recipe:
        blocks.append(_wrap(f"Recipes: {', '.join(recipe_names())}."))
    return "\n\n".join(filter(None, [description, *blocks, more, f"Exit codes: {config_class.exit_codes}."]))


def _recipe_values(config_class: type) -> Mapping[str, Any]:
    """The values of all flags under the recipe that is trained if none is named."""
    values, _ = _parse_flags(config_class, ["", f"--flagfile={recipe_flagfile(DEFAULT_RECIPE)}"])
    return values.flag_values_dict()


def _describe_flag(field: dataclasses.Field, of_recipe: Any) -> str:
    name = f"--[no]{field.name}" if field.type is bool else f"--{field.name}"
    choices = f" ({'|'.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
    value = f"{DEFAULT_RECIPE}: {of_recipe}" if of_recipe != field.default else ""
    value = "; ".join(filter(None, [str(field.default), value]))
    return f"  {name}{choices}\n{_wrap(field.metadata['help'] + (f' [{value}]' if value else ''), indent=6)}"


def _wrap(text: str, indent: int = 0) -> str:
    return textwrap.indent(textwrap.fill(text, HELP_COLUMNS - indent, break_on_hyphens=False), " " * indent)
