import dataclasses
import json

import pytest

from cifar_towers.benchmark import ceilings, processes, side_by_side, speedrun
from cifar_towers.benchmark.speedrun import Work
from cifar_towers.config import SpeedrunConfig, TrainConfig, parse_command_line
from cifar_towers.data import sources, synthetic
from cifar_towers.data.batches import Batches
from cifar_towers.errors import RunError, UsageError
from cifar_towers.reporting import records

TINY = {"dataset": "synthetic", "model": "cifarnet", "crop": 24, "shift": 0, "batch_size": 40, "precision": "float32"}


def test_a_training_is_given_the_settings_it_should_have():
    config = SpeedrunConfig(**TINY, nesterov=True, soft_placement=False, recipe="mine", learning_rate=0.3).varied(
        seeds="", seed=4, train_dir="runs/with spaces"
    )
    command = processes.train_command(config)
    assert command[1].endswith("scripts/train.py")
    assert parse_command_line(TrainConfig, command[1:], "") == config


def test_the_work_of_a_run_is_that_of_its_steps():
    work = Work(steps={24: 3, 32: 2}, operations={24: {"Conv2D": 10, "MatMul": 1}, 32: {"Conv2D": 20, "MatMul": 1}})
    assert work.total() == 3 * 11 + 2 * 21 and work.total(less=1) == 2 * 11 + 21
    assert work.by_kind() == {"Conv2D": 70, "MatMul": 5}


def test_work_is_counted_for_each_side_of_the_images(towers):
    """Ten steps, 30 % of them on smaller images; the head alone does not depend on the side."""
    train = synthetic.make(80, seed=0, stream=0)
    config = SpeedrunConfig(model="speednet93", batch_size=8, epochs=1, image_sides="0=20,30%=32", num_gpus=2)
    work = speedrun.count_work(config, towers(2), "float32", train, Batches(train, 8, 0))
    assert work.steps == {20: 3, 32: 7}
    small, large = (work.operations[side]["Conv2D"] for side in (20, 32))
    assert 0.3 < small / large < (20 / 32) ** 2 and work.operations[20]["MatMul"] == work.operations[32]["MatMul"]


def test_a_run_of_other_settings_is_refused(tmp_path):
    config = SpeedrunConfig(**TINY, num_gpus=2).varied(seeds="", train_dir=str(tmp_path))
    records.write_json(tmp_path / "config.json", dataclasses.asdict(config) | {"num_gpus": 1, "data_dir": "elsewhere"})
    with pytest.raises(UsageError, match=r"of other settings \(num_gpus 1 -> 2\); give those"):
        speedrun._check_settings(tmp_path, config)
    speedrun._check_settings(tmp_path, dataclasses.replace(config, num_gpus=1))
    speedrun._check_settings(tmp_path, dataclasses.replace(config, fresh=True))


def test_a_training_that_fails_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    config = SpeedrunConfig(**TINY).varied(seeds="", train_dir=str(tmp_path))
    with pytest.raises(RunError, match="ended with 2 .*KERAS_BACKEND=jax is set"):
        processes.train(config, quiet=True)


@pytest.mark.slow
def test_a_race_from_start_to_standings(tmp_path, monkeypatch, capfd):
    """Two seeds of three steps and one round beside Keras; then the same again, which trains nothing."""
    monkeypatch.setattr(ceilings, "CONVOLUTIONS", (((8, 8, 8, 32), (3, 3, 32, 64)),))
    monkeypatch.setattr(ceilings, "SIDE", 256)
    monkeypatch.setattr(side_by_side, "VISIT_SECONDS", 0.1)
    monkeypatch.setattr(side_by_side, "LEAST_STEPS", 3)
    config = SpeedrunConfig(
        **TINY, num_gpus=2, max_steps=3, seeds="0,1", rounds=1, peers="keras,tutorial", target=0.01,
        train_dir=str(tmp_path), recipe="mine",
    )  # fmt: skip
    speedrun.run(config, sources.find("synthetic"))
    told = json.loads((tmp_path / "speedrun.json").read_text())
    race = told["race"]
    assert [seed["reused"] for seed in race["seeds"]] == [False, False] and len(race["ceilings"]) == 4
    for seed in (0, 1):
        result = json.loads((tmp_path / f"seed{seed}" / "result.json").read_text())
        assert race["seeds"][seed]["accuracy"] == result["evaluations"][-1]["accuracy"] and result["step"] == 3
        assert race["seeds"][seed]["seconds"] == result["seconds"]
    assert race["seconds_to_target"] == race["training"]["mean"] > 0 and 0 < race["fraction_of_ceiling"] < 1
    assert {row["name"]: len(row["images_per_sec"]) for row in told["side_by_side"]} == {
        "cifar_towers": 1, "keras": 1, "tutorial": 1,
    }  # fmt: skip
    assert "ours/theirs" in (tmp_path / "speedrun.txt").read_text()
    capfd.readouterr()

    speedrun.run(dataclasses.replace(config, rounds=0), sources.find("synthetic"))
    again = json.loads((tmp_path / "speedrun.json").read_text())["race"]
    assert [seed["reused"] for seed in again["seeds"]] == [True, True]
    assert again["ceilings"] == race["ceilings"] and again["training"] == race["training"]
    assert "is complete at step 3" in capfd.readouterr().out
