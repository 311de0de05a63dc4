"""Whole recipes: minutes each, `make test-long`."""

import os
from pathlib import Path

import pytest

from cifar_towers import api
from cifar_towers.data import cifar10
from cifar_towers.signals import StopSignals
from tests.configs import recipe

pytestmark = pytest.mark.slow


def accuracies(name, train_dir, **settings):
    source, config = api.locate_data(recipe(name, train_dir=str(train_dir), **settings))
    result = api.train_run(config, source, StopSignals())
    return {(score["weights"], score["tta"]): score["accuracy"] for score in result["evaluations"]}


def test_smoke_recipe_accuracy(tmp_path):
    assert accuracies("smoke", tmp_path)["raw", 2] > 0.97


@pytest.mark.skipif(
    not cifar10.is_prepared(Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()),
    reason="no prepared CIFAR-10 on this machine",
)
def test_cifarnet_accuracy_after_2000_steps_matches_the_tutorial(tmp_path):
    scores = accuracies("cifarnet", tmp_path, max_steps=2000, batch_size=256, num_gpus=2)
    assert 0.68 < scores["ema", 0] < 0.78
