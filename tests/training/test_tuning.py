"""Settings that a run chooses: variable placement and tower shares by measuring, micro-batches by memory."""

import functools
import itertools
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.errors import UsageError
from cifar_towers.towers import Tower
from cifar_towers.towers.placement import PLACEMENTS
from cifar_towers.training import build, tuning
from tests.configs import TINY_NET
from tests.messages import lines_with
from tests.training.runs import Run

LENGTH = RunLength(steps_per_epoch=150, total=300, last=300)


def set_clock(monkeypatch, *seconds):
    """Let the timed steps take these times in turn."""
    clock = itertools.accumulate(itertools.cycle([passed for each in seconds for passed in (0.0, each)]))
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def test_fastest_placement_wins_and_ties_go_to_the_simplest(towers, examples, monkeypatch):
    """By a clock on which a step takes 3 seconds, 1.02 or 1, and with a schedule that the run's own length fits."""
    assert tuple(PLACEMENTS) == ("cpu", "round_robin", "least_loaded")
    set_clock(monkeypatch, 3.0, 1.02, 1.0)
    config = TrainConfig(model=TINY_NET, batch_size=20, learning_rate_schedule="linear:0=0.2,1=1,100%=0")
    placement, _, _ = tuning.recommend_placement(config, towers(2), "float32", examples, LENGTH)
    assert placement == "round_robin"


def test_measurements_hold_only_the_images_that_they_use(towers, examples, monkeypatch):
    held, make = [], build.make_batches
    monkeypatch.setattr(
        build, "make_batches", lambda config, train, **by: held.append(train) or make(config, train, **by)
    )
    monkeypatch.setattr(tuning, "SHARES_SECONDS", 0.01)
    config = TrainConfig(model=TINY_NET, batch_size=20, variable_placement="cpu", data_on="device")
    tuning.recommend_placement(config, towers(2), "float32", examples, LENGTH)
    tuning.measure_speeds(config, towers(2), "float32", examples, LENGTH)
    assert [len(split.labels) for split in held] == [8, 8, 8, 10]


def test_placement_is_measured_on_a_batch_that_equal_shares_divide(towers, examples, monkeypatch):
    measured = []
    set_clock(monkeypatch, 3.0, 1.02, 1.0)
    monkeypatch.setattr(tuning, "make_trial_step", lambda config, *_: measured.append(config.batch_size) or str)
    config = TrainConfig(model=TINY_NET, batch_size=5, tower_shares="3,2", num_gpus=2)
    assert tuning.recommend_placement(config, towers(2), "float32", examples, LENGTH)[0] == "round_robin"
    assert measured == [4, 4, 4]


@pytest.mark.parametrize(
    ("settings", "device", "placement"),
    [
        ({"model": "cifarnet"}, "GPU", "cpu"),
        ({"model": "speednet94"}, "GPU", "round_robin"),
        ({"model": "speednet94"}, "CPU", "cpu"),
        ({"model": "speednet94", "strategy": "mirrored"}, "GPU", "cpu"),
        ({"model": "speednet94", "deterministic": True}, "GPU", "cpu"),
        ({"model": "speednet94", "variable_placement": "cpu"}, "GPU", "cpu"),
        ({"model": "cifarnet", "variable_placement": "auto"}, "GPU", "round_robin"),
        ({"model": "cifarnet", "variable_placement": "auto"}, "CPU", "cpu"),
        ({"variable_placement": "least_loaded"}, "CPU", "least_loaded"),
    ],
)
def test_placement_is_measured_on_gpus_if_asked_or_for_speednets(monkeypatch, examples, settings, device, placement):
    measured = ("round_robin", True, "of a stand-in")
    monkeypatch.setattr(tuning, "recommend_placement", lambda *_: measured)
    on_devices = [Tower(0, f"/{device}:0"), Tower(1, f"/{device}:1")]
    config = tuning.with_default_placement(TrainConfig(**settings), on_devices)
    resolve = functools.partial(tuning.resolve_placement, config, on_devices, "float32")
    assert resolve(examples, LENGTH).variable_placement == placement
    as_before = resolve(examples, LENGTH, "least_loaded").variable_placement  # on resuming
    auto = settings.get("variable_placement") == "auto"
    assert as_before == ("least_loaded" if auto or placement == "round_robin" else placement)
    chosen = tuning.resolve_choices(TrainConfig(**settings), on_devices, "float32", examples, LENGTH, {})
    assert chosen[0].variable_placement == placement
    assert chosen[1] == ["variable_placement"] * (auto or placement == "round_robin")


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
    smaller = replace(config, num_gpus=4, **given)
    assert smaller.micro_batches >= 2 * config.micro_batches or not flags


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
def test_impossible_shares_are_refused(settings, message):
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
    on_towers = {"num_gpus": 2, "tower_shares": "auto", "variable_placement": "cpu"}
    config = TrainConfig(model=TINY_NET, batch_size=40, **on_towers)
    monkeypatch.setattr(tuning, "rates_beside_each_other", lambda works: [30.0, 10.0])
    resolved = tuning.resolve_shares(config, towers(2), "float32", examples, LENGTH)
    assert resolved.tower_shares == "30,10"
    assert lines_with(caplog.text, "tower shares 30, 10", "40 images", "600, 200 images/s")
    again = tuning.resolve_shares(config, towers(2), "float32", examples, LENGTH, previous="20,20")
    assert again.tower_shares == "20,20" and lines_with(caplog.text, "tower shares 20,20")
    monkeypatch.setattr(tuning, "measure_speeds", lambda *_: [10.2, 10.0])
    resolved = tuning.resolve_shares(config, towers(2), "float32", examples, LENGTH)
    assert resolved.tower_shares == "20,20"
    alone = replace(config, num_gpus=1)
    assert tuning.resolve_shares(alone, towers(1), "float32", examples, LENGTH).tower_shares == "1"


def test_speeds_are_measured_of_towers_at_work_together(towers, examples, monkeypatch):
    monkeypatch.setattr(tuning, "SHARES_SECONDS", 0.2)
    on_towers = {"num_gpus": 2, "tower_shares": "auto", "variable_placement": "cpu"}
    config = TrainConfig(model=TINY_NET, batch_size=40, **on_towers)
    speeds = tuning.measure_speeds(config, towers(2), "float32", examples, LENGTH)
    assert len(speeds) == 2 and min(speeds) > 0
    at_work, together = threading.Semaphore(2), []

    def work(seconds):
        with at_work:
            together.append(at_work._value)
            time.sleep(seconds)

    fast, slow = tuning.rates_beside_each_other([functools.partial(work, 0.02), functools.partial(work, 0.08)])
    assert 2 < fast / slow < 5 and 0 in together


def test_a_tower_that_fails_in_measuring_ends_it():
    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        tuning.rates_beside_each_other([lambda: time.sleep(0.001), fail])
