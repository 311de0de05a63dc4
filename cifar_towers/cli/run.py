"""Settings of a program by name, for the functions of Python."""

from collections.abc import Sequence
from typing import Any

from cifar_towers.cli.flags import Config, parse_command_line
from cifar_towers.cli.program import check_functions


def parse_settings(config_class: type[Config], settings: dict[str, Any], arguments: Sequence[str] = ()) -> Config:
    """Make a config of settings by name, checked as the flags of a program; None means the default."""
    given = {name: value for name, value in settings.items() if value is not None}
    config = parse_command_line(
        config_class, ["", *(f"--{name}={value}" for name, value in given.items()), *arguments], ""
    )
    check_functions(config)
    return config
