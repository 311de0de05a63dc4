"""Towers and micro-batches that share a batch."""

import dataclasses

import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.training import tuning


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"batch_size": 1024}, "--micro_batches=2"),
        ({"batch_size": 1000, "micro_batches": 2}, "--micro_batches=5"),  # 250 a tower
        ({"batch_size": 1024, "batch_statistics": "synchronized"}, "--micro_batches=2 --batch_statistics=mean"),
        ({"batch_size": 20, "hard_example_pool": 60}, "--micro_batches=5"),
        ({"batch_size": 1024, "micro_batches": 256}, ""),
        ({"batch_size": 4 * 1031}, ""),  # a prime number of parts, and more than there may be
    ],
)
def test_suggested_micro_batches_are_valid(settings, flags):
    config = TrainConfig(**settings)
    assert tuning.suggest_more_micro_batches(config, 4) == flags
    given = dict(flag.removeprefix("--").split("=") for flag in flags.split())
    given |= {"micro_batches": int(given["micro_batches"])} if given else {}
    smaller = dataclasses.replace(config, num_gpus=4, **given)
    assert smaller.micro_batches >= 2 * config.micro_batches or not flags
