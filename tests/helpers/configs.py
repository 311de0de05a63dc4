"""Configurations for tests: the project's recipes with some settings replaced."""

import dataclasses
from pathlib import Path

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import make_config


def net(name):
    """Return the value of `--model` for a function of tests/helpers/nets.py."""
    return f"{Path(__file__).with_name('nets.py')}:{name}"


TINY_NET = net("tiny")


def recipe(name, **settings):
    return dataclasses.replace(make_config(TrainConfig, {"recipe": name}), recipe="", **settings)
