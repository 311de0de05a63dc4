"""Settings as fields of a dataclass: the flags, the help and the limits of a program are made from them."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from cifar_towers.errors import UsageError

REST = "the rest"  # the group of a setting that is not a flag: it takes what else stands on the command line
Config = TypeVar("Config")


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    low=None,
    high=None,
    choices: Sequence[str] | None = None,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """A dataclass field with all that its flag and its validation need; `check` is for values beside the default."""
    metadata = {"group": group, "help": help, "low": low, "high": high, "choices": choices, "check": check}
    return dataclasses.field(default=default, metadata=metadata)


def check_limits(config: Any) -> None:
    """Holds every field of a config against its `low`, `high`, `choices` and `check`."""
    for field in dataclasses.fields(config):
        value, limits = getattr(config, field.name), field.metadata
        if limits["check"] and value != field.default:
            limits["check"](value)
        if limits["choices"] and value not in limits["choices"]:
            raise UsageError(f"{field.name}={value} is not one of {', '.join(limits['choices'])}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{field.name}={value} is not a finite number")
        if limits["low"] is not None and value < limits["low"]:
            raise UsageError(f"{field.name}={value} is too small; the least is {limits['low']}")
        if limits["high"] is not None and value > limits["high"]:
            raise UsageError(f"{field.name}={value} is too large; the most is {limits['high']}")


def split_names(text: str) -> list[str]:
    """`"one,other,one"` -> its names, each once."""
    return list(dict.fromkeys(filter(None, text.split(","))))


def parse_names(setting: str, text: str, known: Sequence[str]) -> list[str]:
    """`"one,other"` -> its names, each once."""
    names = split_names(text)
    for name in names:
        if name not in known:
            raise UsageError(f"{setting}={text}: {name!r} is not one of {', '.join(known)}")
    return names


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
