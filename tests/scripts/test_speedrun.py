"""The speedrun: its settings, the work of a run, and statistics over seeds."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from cifar_towers import files
from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.errors import RunError, UsageError
from cifar_towers.training import build
from scripts.speedrun import seeds, training
from scripts.speedrun.settings import SpeedrunConfig

ROOT = Path(__file__).parents[2]
TINY = {"dataset": "synthetic", "model": "cifarnet", "crop": 24, "shift": 0, "batch_size": 40, "precision": "float32"}
TRAIN = synthetic.make(80, seed=0, stream=0)
METADATA = {
    "recipe": "mine", "model": "speednet94", "batch_size": 1536, "hard_example_pool": 3072, "dataset": "cifar10",
    "precision": "float32", "processor": "Abacus", "cores": 2, "gpus": ["A100"], "onednn": "1", "tta": 2,
    "target": 0.94, "date": "2026-01-01",
}  # fmt: skip


@pytest.mark.parametrize(("program", "flag"), [("speedrun", "--rounds=-1"), ("scaling", "--link_gb_per_s=0")])
def test_program_starts_in_a_checkout(program, flag):
    command = [sys.executable, "-m", f"scripts.{program}", flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and flag[2:] in done.stderr


def test_a_training_that_fails_says_how_to_keep_the_finished_seeds(tmp_path, monkeypatch):
    """The same command is not the one to type if it has --overwrite."""
    failing = [sys.executable, "-c", "raise SystemExit('full disk')"]
    monkeypatch.setattr(training, "train_command", lambda config: failing)
    expected = r"exit code 1 \(full disk\); mend that, then repeat the command without --overwrite, which keeps"
    with pytest.raises(RunError, match=expected):
        training.run_training(TrainConfig(train_dir=str(tmp_path), overwrite=True), quiet=True)


def test_seed_with_too_few_steps_to_time_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds.peak, "measure", lambda *args, **settings: {"convolution": 1.0})
    monkeypatch.setattr(seeds, "run_training", lambda recipe: {"images_per_sec": None})
    config = SpeedrunConfig(TrainConfig(**TINY), train_dir=str(tmp_path), seeds="0")
    with pytest.raises(UsageError, match="too few steps to time; give more --max_steps or --epochs"):
        seeds._train_seeds(config, METADATA, 1)


def test_command_of_a_training_has_its_settings_and_its_name(tmp_path):
    """The name is none of `configs/`, or one of them, which would load its settings."""
    changed = {"nesterov": True, "soft_placement": False, "recipe": "mine", "learning_rate": 0.3, "micro_batches": 0}
    config = TrainConfig(**TINY, **changed, seed=4, train_dir=str(tmp_path / "with spaces"))
    for named in (config, dataclasses.replace(config, recipe="speed94")):
        command = training.train_command(named)
        assert Path(command[1]).exists() and parse_command_line(TrainConfig, command[1:], "") == named


def test_work_is_counted_for_each_kind_of_step(towers):
    """Ten steps, 30 % of them on smaller images; the whitening is trained in the first two."""
    recipe = TrainConfig(
        model="speednet93", batch_size=8, epochs=1, image_size_schedule="0=20,30%=32", whitening_epochs=0.2
    )
    work = seeds.count_work(recipe, towers(2), "float32", TRAIN)
    others = ("kernels", "biases", "head")
    first, small, large = (20, (*others, "whitening")), (20, others), (32, others)
    assert {kind: steps for kind, (steps, _) in work.items()} == {first: 2, small: 1, large: 7}
    totals = {kind: sum(operations.values()) for kind, (_, operations) in work.items()}
    assert 0.3 < totals[small] / totals[large] < (20 / 32) ** 2
    # the gradient to the images of the first convolution after the whitening: 19 x 19, 24 -> 64 channels
    assert totals[first] - totals[small] == 8 * 2 * 19 * 19 * 24 * 9 * 64


def test_work_includes_selecting_hard_examples(towers):
    """Eight of sixteen: the model's work on eight and the proxy's on sixteen, though a step is one function."""
    both = TrainConfig(model="speednet93", batch_size=8, hard_example_pool=16, epochs=1, whitening_epochs=0)
    configs = both, dataclasses.replace(both, hard_example_pool=0), build.proxy_config(both)
    works = [seeds.count_work(config, towers(1), "float32", TRAIN).values() for config in configs]
    ((steps, both),), ((model_steps, model),), ((proxy_steps, proxy),) = works
    assert steps == proxy_steps and model_steps == 2 * steps
    assert sum(both.values()) == sum(model.values()) + sum(proxy.values())


def test_work_of_one_tower_does_not_depend_on_the_shares_of_several(towers):
    even = TrainConfig(**TINY, epochs=1, num_gpus=2)
    uneven = dataclasses.replace(even, tower_shares="3,1")
    assert seeds.count_work(uneven, towers(2), "float32", TRAIN) == seeds.count_work(even, towers(2), "float32", TRAIN)


@pytest.mark.parametrize(
    ("settings", "machine", "message"),
    [
        ({"num_gpus": 1}, {}, "num_gpus 1 -> 2"),
        ({}, {"cores": 64, "gpus": []}, r"cores 64 -> 2, gpus \[\] -> \['A100'\]"),
        ({}, {"precision": "bfloat16"}, "precision bfloat16 -> float32"),
    ],
)
def test_earlier_run_under_other_conditions_is_refused(tmp_path, settings, machine, message):
    recipe = TrainConfig(**TINY, num_gpus=2, train_dir=str(tmp_path))
    earlier = dataclasses.asdict(recipe) | {"data_dir": "elsewhere"}, METADATA | {"git_revision": "another"}
    for changes, other in (({}, {}), (settings, machine)):
        files.write_json(tmp_path / "config.json", earlier[0] | changes)
        files.write_json(tmp_path / "environment.json", earlier[1] | other)
        if not (changes or other):
            seeds._check_same_conditions(tmp_path, recipe, METADATA)
    with pytest.raises(UsageError, match=message):
        seeds._check_same_conditions(tmp_path, recipe, METADATA)
    seeds._check_same_conditions(tmp_path, dataclasses.replace(recipe, overwrite=True), METADATA)


def test_settings_that_an_earlier_run_chose_are_no_other_settings(tmp_path):
    recipe = TrainConfig(**TINY, num_gpus=2, train_dir=str(tmp_path))
    chosen = {"micro_batches": 4, "variable_placement": "round_robin", "tower_shares": "3,1"}
    files.write_json(tmp_path / "config.json", dataclasses.asdict(recipe) | chosen)
    asked = dataclasses.replace(recipe, micro_batches=0, tower_shares="auto")
    seeds._check_same_conditions(tmp_path, asked, METADATA)
    for name, value in (("micro_batches", 2), ("tower_shares", "")):
        with pytest.raises(UsageError, match=f"{name} {chosen[name]} -> {value}"):
            seeds._check_same_conditions(tmp_path, dataclasses.replace(asked, **{name: value}), METADATA)


def make_seed(seed, accuracy, train, convolution, reused=False):
    seconds = {"train": train, "input": 4.0, "report": 1.0, "compile": 20.0, "start": 10.0, "evaluate": 30.0}
    return {
        "seed": seed, "reused": reused, "revision": "abc", "seconds": seconds, "step_seconds": train + 5,
        "images_per_sec": 200.0, "accuracy": accuracy, "plain_accuracy": accuracy - 0.01,
        "peaks": [{"convolution": convolution, "matmul": 90.0}] * 2,
    }  # fmt: skip


SEEDS = [make_seed(0, 0.939, 95.0, 100.0), make_seed(1, 0.941, 195.0, 120.0), make_seed(2, 0.943, 145.0, 140.0, True)]
WORK = {"kind": (2, {"MatMul": 3 * 10**12, "Conv2D": 6 * 10**12})}


def test_seconds_to_target_include_untimed_first_steps():
    """43 of 75 operations are of timed steps, which take 150 s."""
    work = {"small": (3, {"Conv2D": 10, "MatMul": 1}), "large": (2, {"Conv2D": 20, "MatMul": 1})}
    summary = seeds.summarize(SEEDS, work, target=0.94)
    assert (summary["work"], summary["steps"], summary["operations"]) == (75, 5, {"Conv2D": 70, "MatMul": 5})
    assert summary["training"]["mean"] == 150
    assert summary["seconds_to_target"] == summary["whole_training"] == 150 * (75 / 43)
    untimed = seeds.summarize(SEEDS, {"kind": (1, {"Conv2D": 200})}, target=0.94)
    assert untimed["seconds_to_target"] == 150
    assert seeds.summarize(SEEDS, work, target=0.9411)["seconds_to_target"] is None


def test_statistics_over_seeds_and_fraction_of_the_peak(tmp_path, capsys):
    summary = seeds.summarize(SEEDS, WORK, target=0.94)
    assert summary["accuracy"]["mean"] == pytest.approx(0.941) and summary["training"]["std"] == 50
    assert summary["seconds_to_target"] == 300 and summary["compile"]["mean"] == 20 and summary["save"]["mean"] == 0
    assert summary["peak"] == 120 and summary["seconds_at_peak"] == pytest.approx(150)
    assert summary["fraction_of_peak"] == pytest.approx(9e12 / 150 / 120e9)
    seeds.publish(tmp_path, METADATA, summary)
    text = capsys.readouterr().out
    parts = "3,072", "94.00 %", "300.0 s", "18,000 GFLOP in 2 steps", "Conv2D 66.7 %", "150.0 s", "50.0 %", "\n2*  "
    assert all(part in text for part in parts), text
    assert files.read_json(tmp_path / "speedrun.json")["training"]["mean"] == 150
    without_peaks = seeds.summarize([seed | {"peaks": []} for seed in SEEDS[:1]], WORK, target=0)
    assert without_peaks["fraction_of_peak"] is None
    assert "Accuracy:" in seeds.conclude(METADATA | {"target": 0}, without_peaks)


def test_accuracy_is_that_of_averaged_weights_on_test():
    evaluations = [
        {"split": split, "weights": weights, "tta": tta, "accuracy": score}
        for split, weights, tta, score in [
            ("validation", "raw", 0, 0.1), ("test", "raw", 0, 0.2), ("test", "raw", 2, 0.3), ("test", "ema", 2, 0.4),
        ]
    ]  # fmt: skip
    assert [seeds.accuracy_on_test(evaluations, tta) for tta in (0, 2)] == [0.2, 0.4]
