"""Configurations for tests: the project's recipes with some settings replaced."""

import dataclasses
from pathlib import Path

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig

CONFIGS = Path(__file__).parents[1] / "configs"


def net(name):
    """Return the value of `--model` for a function of tests/nets.py."""
    return f"{Path(__file__).with_name('nets.py')}:{name}"


TINY_NET = net("tiny")


def recipe(name, **settings):
    config = parse_command_line(TrainConfig, ["train.py", f"--flagfile={CONFIGS / name}.cfg"], "")
    return dataclasses.replace(config, recipe="", **settings)
