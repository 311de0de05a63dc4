"""Settings that a run chooses: variable placement and tower shares by measuring, micro-batches by memory."""

import functools
import itertools
from types import SimpleNamespace

import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.towers import Tower
from cifar_towers.towers.placement import PLACEMENTS
from cifar_towers.training import tuning
from tests.configs import TINY_NET


def test_fastest_placement_wins_and_ties_go_to_the_simplest(towers, examples, monkeypatch):
    """By a clock on which a step takes 3 seconds, 1.02 or 1, and with a schedule that the run's own length fits."""
    assert tuple(PLACEMENTS) == ("cpu", "round_robin", "least_loaded")
    steps = itertools.cycle([0.0, 3.0, 0.0, 1.02, 0.0, 1.0])  # before each one, and in it
    clock = itertools.accumulate(steps)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    config = TrainConfig(model=TINY_NET, batch_size=20, learning_rate_schedule="linear:0=0.2,1=1,100%=0")
    length = RunLength(steps_per_epoch=150, total=300, last=300)
    found = tuning.recommend_placement(config, towers(2), "float32", examples, length)
    assert found.placement == "round_robin"


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
    measured = tuning.Recommendation("round_robin", True, "of a stand-in")
    monkeypatch.setattr(tuning, "recommend_placement", lambda *_: measured)
    on_devices = [Tower(0, f"/{device}:0"), Tower(1, f"/{device}:1")]
    resolve = functools.partial(tuning.resolve_placement, TrainConfig(**settings), on_devices, "float32")
    length = RunLength(steps_per_epoch=150, total=300, last=300)
    assert resolve(examples, length).variable_placement == placement
    as_before = resolve(examples, length, "least_loaded").variable_placement  # on resuming
    auto = settings.get("variable_placement") == "auto"
    assert as_before == ("least_loaded" if auto or placement == "round_robin" else placement)


@pytest.mark.parametrize(
    ("seconds", "answer"),
    [
        ((1.0, 1.02, 0.98), "does not matter"),
        ((1.0, 1.02, 0.9), "--variable_placement=least_loaded"),
        ((1.0, 1.2, 1.1), "--variable_placement=cpu"),
    ],
)
def test_answer_is_one_sentence_with_the_times(towers, examples, monkeypatch, seconds, answer):
    clock = itertools.accumulate(itertools.cycle([step for each in seconds for step in (0.0, each)]))
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    config = TrainConfig(model=TINY_NET, batch_size=20)
    length = RunLength(steps_per_epoch=150, total=300, last=300)
    sentence = tuning.recommend_placement(config, towers(2), "float32", examples, length).sentence()
    times = ", ".join(f"{name} {1000 * each:.1f} ms" for name, each in zip(PLACEMENTS, seconds, strict=True))
    assert all(part in sentence for part in (answer, "4 images", "2 towers", times, "25"))
    alone = tuning.recommend_placement(config, towers(1), "float32", examples, length).sentence()
    assert "does not matter" in alone and "one tower" in alone
