"""Whole recipes: minutes each, `make test-long`."""

import os
from pathlib import Path

import pytest

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.data import cifar10
from tests.runs.short_runs import run

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).parents[1] / "configs"


def accuracies(recipe, train_dir, *flags):
    arguments = ["train.py", f"--flagfile={CONFIGS / recipe}.cfg", f"--train_dir={train_dir}", *flags]
    result = run(parse_command_line(TrainConfig, arguments, ""))
    return {(score["weights"], score["tta"]): score["accuracy"] for score in result["evaluations"]}


def test_smoke_recipe_accuracy(tmp_path):
    assert accuracies("smoke", tmp_path)["raw", 2] > 0.97


@pytest.mark.skipif(
    not cifar10.is_prepared(Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()),
    reason="no prepared CIFAR-10 on this machine",
)
def test_cifarnet_accuracy_after_2000_steps_matches_the_tutorial(tmp_path):
    scores = accuracies("cifarnet", tmp_path, "--max_steps=2000", "--batch_size=256", "--num_gpus=2")
    assert 0.68 < scores["ema", 0] < 0.78
