"""Towers of unequal speed: their shares of a batch, given or measured, and what is trained with them."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.errors import UsageError
from cifar_towers.towers.sharding import share_out
from cifar_towers.training import tuning
from tests.configs import TINY_NET
from tests.messages import lines_with
from tests.training.runs import Run

LENGTH = RunLength(steps_per_epoch=10, total=100, last=100)


@pytest.mark.parametrize(
    ("examples", "shares", "multiple", "sizes"),
    [
        (1024, [3, 1], 1, [768, 256]),
        (1024, [1000, 1], 1, [1023, 1]),
        (10, [2, 1, 1], 1, [5, 3, 2]),
        (7, [1, 1, 1], 1, [3, 2, 2]),
        (48, [3, 1], 4, [36, 12]),
        (40, [3, 1], 8, [32, 8]),
        (3, [100, 1, 1], 1, [1, 1, 1]),
    ],
)
def test_sizes_are_in_proportion_and_add_up(examples, shares, multiple, sizes):
    assert share_out(examples, shares, multiple) == sizes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tower_shares": "3,0"}, "tower_shares=3,0 .*positive.* auto"),
        ({"tower_shares": "fast"}, "tower_shares=fast .*positive"),
        ({"tower_shares": "3,1", "num_gpus": 3}, "tower_shares=3,1 .*2 towers.* 3"),
        ({"tower_shares": "3,1", "num_gpus": 2, "batch_size": 1}, "tower_shares=3,1: 1 "),
        ({"tower_shares": "3,1", "strategy": "mirrored"}, "tower_shares=3,1 .*strategy="),
        ({"tower_shares": "auto", "deterministic": True}, "tower_shares=auto .*timing"),
    ],
)
def test_usage(settings, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(model=TINY_NET, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["cpu", "round_robin", "least_loaded"])
@pytest.mark.parametrize("shares", ["3,1", "2,1,1"])
def test_unequal_towers_train_as_one_does(towers, examples, placement, shares):
    """Muon, weight averages, lookahead, synchronized norm and hard examples, step by step on one device."""
    settings = {"model": "speednet94", "optimizer": "muon", "learning_rate": 0.01, "momentum": 0.8, "crop": 20}
    settings |= {"shift": 0, "batch_size": 32, "whitening_images": 60, "ema_decay": 0.9, "lookahead": True}
    settings |= {"batch_statistics": "synchronized"}
    count = shares.count(",") + 1
    one = Run(towers(1), examples, TrainConfig(**settings))
    several = Run(towers(count), examples, TrainConfig(variable_placement=placement, tower_shares=shares, **settings))
    for step in range(3):
        expected, metrics = one.step(step), several.step(step)
        assert metrics.loss == pytest.approx(expected.loss, rel=1e-4) and metrics.accuracy == expected.accuracy
    values = several.values()
    for name, value in one.values().items():
        difference = np.max(np.abs(value - values[name]), initial=0) / max(np.max(np.abs(value), initial=0), 1e-6)
        assert difference < 1e-3, (name, difference)


def test_measured_shares_follow_speed_and_are_kept(towers, examples, monkeypatch, caplog):
    caplog.set_level("INFO")
    config = TrainConfig(model=TINY_NET, batch_size=40, tower_shares="auto", num_gpus=2)
    monkeypatch.setattr(tuning, "rates_beside_each_other", lambda works: [30.0, 10.0])
    resolved = tuning.resolve_shares(config, towers(2), "float32", examples, LENGTH)
    assert resolved.tower_shares == "30,10"
    assert lines_with(caplog.text, "tower shares 30, 10", "40 images", "600, 200 images/s")
    again = tuning.resolve_shares(config, towers(2), "float32", examples, LENGTH, previous="20,20")
    assert again.tower_shares == "20,20" and lines_with(caplog.text, "tower shares 20,20")
    monkeypatch.setattr(tuning, "rates_beside_each_other", lambda works: [10.2, 10.0])
    resolved = tuning.resolve_shares(config, towers(2), "float32", examples, LENGTH)
    assert resolved.tower_shares == "20,20"
    alone = dataclasses.replace(config, num_gpus=1)
    assert tuning.resolve_shares(alone, towers(1), "float32", examples, LENGTH).tower_shares == "1"


def test_speeds_are_measured_of_towers_at_work_together(towers, examples):
    config = TrainConfig(model=TINY_NET, batch_size=40, tower_shares="auto", num_gpus=2)
    speeds = tuning.measure_speeds(config, towers(2), "float32", examples, LENGTH)
    assert len(speeds) == 2 and min(speeds) > 0
    at_work = threading.Semaphore(2)
    together = []

    def work(seconds):
        def call():
            with at_work:
                together.append(at_work._value)
                time.sleep(seconds)

        return call

    fast, slow = tuning.rates_beside_each_other([work(0.005), work(0.02)])
    assert 2 < fast / slow < 5 and 0 in together


def test_a_tower_that_fails_in_measuring_ends_it():
    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        tuning.rates_beside_each_other([lambda: time.sleep(0.001), fail])
