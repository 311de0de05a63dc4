"""Configurations for tests: the project's recipes with some settings replaced."""

import dataclasses
from pathlib import Path

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig

CONFIGS = Path(__file__).parents[1] / "configs"
TINY_NET = f"{Path(__file__).parent / 'nets.py'}:tiny"


def recipe(name, **settings):
    config = parse_command_line(TrainConfig, ["train.py", f"--flagfile={CONFIGS / name}.cfg"], "")
    return dataclasses.replace(config, recipe="", **settings)
