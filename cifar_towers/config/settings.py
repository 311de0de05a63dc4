"""A setting is a field of a dataclass, with its help, its limits and its scope as data.

Related settings are a section: a small frozen dataclass, which the part that needs them takes as it
is. The config of a program inherits its sections, so its flags and keywords are flat.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from cifar_towers.errors import UsageError

# The scope of a setting of a training says where it may have another value than in the first run:
#
#              resumed run   repetition   other worker
# RECIPE       no            no           no
# SEED         no            yes          no
# EXPERIMENT   yes           no           no
# RUN          yes           yes          no
# PROCESS      yes           yes          yes
#
# Repetitions are runs that are averaged, as they differ only in their seed.
RECIPE = "recipe"
SEED = "seed"
EXPERIMENT = "experiment"
RUN = "run"
PROCESS = "process"


def setting(
    default: Any,
    help: str,
    *,
    scope: str = RECIPE,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    check: Callable[[Any], object] | None = None,
    required: str = "",
) -> Any:
    """Return a dataclass field with everything that its flag, its validation and its readers need.

    Args:
      scope: where the setting of a training may have another value; other programs ignore it.
      check: validates values other than the default.
      required: error message if the value is empty; none if the setting may be empty.
    """
    metadata = {
        "help": help,
        "scope": scope,
        "low": low,
        "high": high,
        "choices": choices,
        "check": check,
        "required": required,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The base of every section and config, whose values are checked when it is made."""

    title: ClassVar[str]  # of the section in the help text

    def __post_init__(self):
        check_limits(self)


Config = TypeVar("Config", bound=Settings)


def title_of(config_class: type[Settings], name: str) -> str:
    """Return the title of the section that declares a setting."""
    classes: list[Any] = config_class.mro()
    return next(section.title for section in classes if name in inspect.get_annotations(section))


def check_limits(config: Settings) -> None:
    """Check every value of a section or config against its setting's limits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        limits = field.metadata
        given = f"{field.name}={value}"

        if limits["required"] and not value:
            raise UsageError(limits["required"])
        if value == field.default:
            continue
        if limits["check"]:
            limits["check"](value)
        if limits["choices"] and value not in limits["choices"]:
            raise UsageError(f"{given} is not one of {', '.join(limits['choices'])}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{given} is not a finite number")
        if limits["low"] is not None and value < limits["low"]:
            raise UsageError(f"{given} is too small; the minimum is {limits['low']}")
        if limits["high"] is not None and value > limits["high"]:
            raise UsageError(f"{given} is too large; the maximum is {limits['high']}")
