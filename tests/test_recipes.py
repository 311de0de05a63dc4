"""A whole recipe: minutes, `make test-long`."""

import pytest

from cifar_towers import api
from cifar_towers.signals import StopSignals
from tests.helpers.configs import recipe


@pytest.mark.slow
def test_smoke_recipe_accuracy(tmp_path):
    source, config = api.locate_data(recipe("smoke", train_dir=str(tmp_path)))
    scores = api.train_run(config, source, StopSignals())["evaluations"]
    assert {score["tta"]: score["accuracy"] for score in scores}[True] > 0.97
