"""Command-line flags made from a config's settings, and its help text."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from absl import flags

from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import RECIPE, RENAMED, REST, names_with
from cifar_towers.errors import UsageError

Config = TypeVar("Config")


def parse_command_line(config_class: type[Config], argv: Sequence[str], description: str) -> Config:
    """A config from flags and flagfiles, of which later ones override earlier ones. Prints help and exits if asked to.

    Raises:
      UsageError: stray arguments, unknown flags, or values of a wrong type, out of range or in conflict.
    """
    if any(argument in ("-h", "-help", "--help", "--helpfull") for argument in argv[1:]):
        print(help_text(config_class, description))
        sys.exit(0)
    values = _define_flags(config_class)
    try:
        stray = values(argv)[1:]
    except (flags.Error, UnicodeDecodeError) as error:
        raise UsageError(_describe_flag_error(error, config_class)) from None
    rest = names_with(config_class, group=REST)
    if stray and not rest:
        raise UsageError(f"{stray[0]!r} is not a flag; settings are given as --name=value, and --help lists them")
    settings = {field.name: getattr(values, field.name) for field in flag_settings(config_class)}
    settings |= {name: tuple(stray) for name in rest}
    if "recipe" in settings and not settings["recipe"]:
        settings["recipe"] = Path(_last_flagfile(argv)).stem
    if of_recipe := _recipe_settings(config_class):
        settings["recipe"] = TrainConfig(**{field.name: settings.pop(field.name) for field in of_recipe})
    return config_class(**settings)


def help_text(config_class: type, description: str) -> str:
    """The help of all flags with their defaults, by group."""
    groups: dict[str, list[str]] = {}
    for field in flag_settings(config_class):
        name = f"--[no]{field.name}" if field.type is bool else f"--{field.name}"
        choices = f" ({'|'.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        default = "" if field.default == "" else f" [{field.default}]"
        groups.setdefault(field.metadata["group"], []).append(
            f"  {name}{choices}\n      {field.metadata['help']}{default}"
        )
    body = [f"{group}:\n" + "\n".join(lines) for group, lines in groups.items()]
    files = "Files:\n  --flagfile\n      read flags from a file, one a line; later flags override them"
    return "\n\n".join([description, *body, files, f"Exit codes: {config_class.exit_codes}."])


def flag_settings(config_class: type) -> list[dataclasses.Field]:
    """The settings that have a flag: a config's own, and those of the recipe it may hold."""
    own = [field for field in dataclasses.fields(config_class) if field.metadata["group"] not in (REST, RECIPE)]
    return own + _recipe_settings(config_class)


def _recipe_settings(config_class: type) -> list[dataclasses.Field]:
    """The settings of the recipe that a config holds, without those that it has itself or refuses."""
    if not names_with(config_class, group=RECIPE):
        return []
    left_out = {field.name for field in dataclasses.fields(config_class) if field.metadata["group"] != RECIPE}
    return [field for field in dataclasses.fields(TrainConfig) if field.name not in left_out | {*config_class.refused}]


def _describe_flag_error(error: Exception, config_class: type) -> str:
    flag = getattr(error, "flagname", "")
    refused = getattr(config_class, "refused", {})
    name = flag if flag in refused else flag.removeprefix("no")
    if name in refused:
        return f"{name} is not a flag of this program: {refused[name]}; leave it out"
    if RENAMED.get(name) in (field.name for field in flag_settings(config_class)):
        return f"--{name} has been renamed to --{RENAMED[name]}"
    message = " ".join(str(error).split()).removeprefix("ERROR:: ")
    return f"{message}; {'configs/ has the recipes' if 'flagfile' in message else '--help lists the flags'}"


def _define_flags(config_class: type) -> flags.FlagValues:
    values = flags.FlagValues()
    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    for field in flag_settings(config_class):
        define[field.type](field.name, field.default, field.metadata["help"], flag_values=values)
    flags.DEFINE_string("flagfile", "", "read flags from a file", flag_values=values)
    flags.DEFINE_string("undefok", "", "unknown flags to ignore", flag_values=values)
    return values


def _last_flagfile(argv: Sequence[str]) -> str:
    last = ""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "flagfile":
            last = value if equals else following
    return last
