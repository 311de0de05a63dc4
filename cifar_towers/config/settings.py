"""A setting: a dataclass field that carries its flag's help, limits and choices."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cifar_towers.errors import UsageError

REST = "the rest"  # the group of a setting without a flag: the arguments that are not flags
RECIPE = "the recipe"  # the group of a setting that holds a TrainConfig, whose settings are flags


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    check: Callable[[Any], object] | None = None,
    words: Mapping[str, float] | None = None,
    on_resume: Literal["refuse", "allow", "allow_without_batch_norm"] = "refuse",
    per_worker: bool = False,
    per_run: bool = False,
) -> Any:
    """Return a dataclass field with everything that its flag, its validation and its readers need.

    Args:
      check: validates values other than the default.
      words: words that stand for numbers, as {"auto": 0}.
      on_resume: what happens if a run is resumed with another value. `refuse`: the setting belongs to the recipe.
        `allow_without_batch_norm`: it changes the function that is trained if the model has batch normalization.
      per_worker: workers of one cluster may have different values.
      per_run: runs with different values are still repetitions of one experiment, to be averaged.
    """
    return dataclasses.field(default=default, metadata=locals())


def settings_of(group: str, **common: Any) -> Callable[..., Any]:
    """Return `setting` for one section of the help text, whose settings have these options in common."""
    return lambda default, help, **options: setting(default, group, help, **common | options)


class Section:
    """One section of a training's help text. Each of its settings says whether it belongs to the recipe."""

    def __init__(self, group: str, **common: bool):
        self.recipe = settings_of(group, on_resume="refuse", **common)
        self.free = settings_of(group, on_resume="allow", **common)  # a resumed run may have another value


def names_with(config_class: type, **properties: Any) -> tuple[str, ...]:
    """Return the names of the settings with these properties, as `names_with(TrainConfig, on_resume="allow")`."""
    return tuple(
        field.name
        for field in dataclasses.fields(config_class)
        if all(field.metadata[key] == value for key, value in properties.items())
    )


def check_limits(config: Any) -> None:
    """Check every field of a config against its `low`, `high`, `choices` and `check`."""
    for field in dataclasses.fields(config):
        value, limits = getattr(config, field.name), field.metadata
        if limits["check"] and value != field.default:
            limits["check"](value)
        if limits["choices"] and value not in (*limits["choices"], field.default):
            raise UsageError(f"{field.name}={value} is not one of {', '.join(limits['choices'])}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{field.name}={value} is not a finite number")
        if limits["low"] is not None and value < limits["low"]:
            raise UsageError(f"{field.name}={value} is too small; the minimum is {limits['low']}")
        if limits["high"] is not None and value > limits["high"]:
            raise UsageError(f"{field.name}={value} is too large; the maximum is {limits['high']}")


def split_names(text: str) -> list[str]:
    """Return the names in a text, each once: `"one,other,one"` -> ["one", "other"]."""
    return list(dict.fromkeys(filter(None, text.split(","))))


def parse_names(setting: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a text, each once."""
    names = split_names(text)
    for name in names:
        if name not in known:
            raise UsageError(f"{setting}={text}: {name!r} is not one of {', '.join(known)}")
    return names
