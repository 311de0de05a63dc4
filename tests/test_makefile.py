"""The Makefile: the commands behind its targets."""

import shlex

import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line
from tests.helpers.programs import make


@pytest.mark.parametrize(("target", "recipe"), [("train", "speed94"), ("bench", "smoke")])
def test_targets_take_their_recipe_from_config(target, recipe):
    command = make("-n", target, f"CONFIG={recipe}", "ARGS=--epochs=3").splitlines()[-1]
    flags = [word for word in shlex.split(command) if word.startswith("--")]
    trained = parse_command_line(TrainConfig, flags)
    assert (trained.recipe, trained.epochs) == (recipe, 3)
    assert trained.dataset == ("synthetic" if recipe == "smoke" else "auto")
