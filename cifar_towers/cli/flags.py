"""Command-line flags made from a config's settings, and its help text."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from absl import flags

from cifar_towers.config.settings import REST
from cifar_towers.errors import UsageError

Config = TypeVar("Config")


def parse_command_line(config_class: type[Config], argv: Sequence[str], description: str) -> Config:
    """Makes a config of flags and flagfiles; later ones win. Prints help and leaves if asked to.

    Raises:
      UsageError: stray arguments, unknown flags, values of a wrong type, out of range or at odds with each other.
    """
    if any(argument in ("-h", "-help", "--help", "--helpfull") for argument in argv[1:]):
        print(help_text(config_class, description))
        sys.exit(0)
    values = _flags_of(config_class)
    try:
        stray = values(argv)[1:]
    except (flags.Error, UnicodeDecodeError) as error:
        told = " ".join(str(error).split()).removeprefix("ERROR:: ")
        listed = "configs/ has the recipes" if "flagfile" in told else "--help lists the flags"
        raise UsageError(f"{told}; {listed}") from None
    rest = [field.name for field in dataclasses.fields(config_class) if field.metadata["group"] == REST]
    if stray and not rest:
        raise UsageError(f"{stray[0]!r} is not a flag; settings are given as --name=value, and --help lists them")
    given = {field.name: getattr(values, field.name) for field in _flagged(config_class)}
    given |= {name: tuple(stray) for name in rest}
    if "recipe" in given and not given["recipe"]:
        given["recipe"] = Path(_last_flagfile(argv)).stem
    return config_class(**given)


def help_text(config_class: type, description: str) -> str:
    """All flags under the names of their groups, with their defaults."""
    groups: dict[str, list[str]] = {}
    for field in _flagged(config_class):
        name = f"--[no]{field.name}" if field.type is bool else f"--{field.name}"
        choices = f" ({'|'.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        default = "" if field.default == "" else f" [{field.default}]"
        groups.setdefault(field.metadata["group"], []).append(
            f"  {name}{choices}\n      {field.metadata['help']}{default}"
        )
    body = [f"{group}:\n" + "\n".join(lines) for group, lines in groups.items()]
    files = "Files:\n  --flagfile\n      take flags from a file, one a line; flags after it win"
    return "\n\n".join([description, *body, files, f"Exit codes: {config_class.exit_codes}."])


def _flagged(config_class: type) -> list[dataclasses.Field]:
    """The settings that have a flag."""
    return [field for field in dataclasses.fields(config_class) if field.metadata["group"] != REST]


def _flags_of(config_class: type) -> flags.FlagValues:
    values = flags.FlagValues()
    define = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    for field in _flagged(config_class):
        define[field.type](field.name, field.default, field.metadata["help"], flag_values=values)
    flags.DEFINE_string("flagfile", "", "take flags from a file", flag_values=values)
    flags.DEFINE_string("undefok", "", "unknown flags to pass over", flag_values=values)
    return values


def _last_flagfile(argv: Sequence[str]) -> str:
    found = ""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "flagfile":
            found = value if equals else following
    return found
