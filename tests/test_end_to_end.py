"""End-to-end runs on the synthetic set: accuracy, files, resuming, failures."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

from cifar_towers import files, trainer
from cifar_towers.checkpointing import workdir
from cifar_towers.checkpointing.checkpoint import latest_checkpoint, list_checkpoints, read_metadata, read_variables
from cifar_towers.cli import main, seeds
from cifar_towers.cli.shutdown import ShutdownHandler
from cifar_towers.data import cifar10, sources, synthetic
from cifar_towers.data.batches import Batches
from cifar_towers.errors import DataError, DivergedError, Interrupted, RunError, UsageError
from cifar_towers.inference import evaluate
from cifar_towers.inference.compare import compare_runs
from cifar_towers.inference.settings import EvaluateConfig
from cifar_towers.reporting import figures, run_logger
from cifar_towers.reporting.seed_statistics import read_scalars
from cifar_towers.reporting.time_left import TimeLeft
from cifar_towers.training import auto_placement, health, tower_count
from cifar_towers.training.run_setup import setup_run
from cifar_towers.training.step_runner import StepRunner
from tests.configs import TINY_NET, recipe

QUICK = recipe(
    "smoke", image_size=20, image_size_schedule="0=18,50%=20", shift=0, batch_size=200, whitening_images=500, tta=0,
    precision="float32", summary_every_steps=5, ema_decay=0.5,
)  # fmt: skip
STEPS = 20
RATES = {"learning_rate": 0.1, "bias_learning_rate": 0.0, "whitening_learning_rate": 0.0}
TINY = replace(QUICK, model=TINY_NET, image_size_schedule="", **RATES)  # for tests that do not depend on the model


@pytest.fixture(autouse=True, scope="module")
def small_synthetic_set():
    """2,000 + 500 images instead of 10,000 + 2,000, made once."""
    small = synthetic.make(2000, 0, 0), synthetic.make(500, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "load", lambda seed=0: small)
        yield


@pytest.fixture(autouse=True)
def cheap_figures(monkeypatch):
    """Figures that take seconds are drawn in `one_run` alone."""
    monkeypatch.setattr(figures, "confusion_matrix", lambda *_: np.zeros([8, 8, 3], np.uint8))


def run(config, stop=None, launch_id="", **settings):
    """Trains with `config`, some settings replaced, and returns the result."""
    config = replace(config, **settings)
    return trainer.train(config, sources.find(config.dataset), stop or ShutdownHandler(), launch_id=launch_id)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """A finished run on two towers, for tests that only read it."""
    directory = tmp_path_factory.mktemp("runs") / "one"
    settings = {"tta": 2, "log_device_placement": True, "checkpoint_every_steps": 9}
    return directory, run(QUICK, num_gpus=2, train_dir=str(directory), **settings)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """The same with the tiny model, for tests that do not depend on the model."""
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    return directory, run(TINY, num_gpus=2, train_dir=str(directory), checkpoint_every_steps=9)


def records_of(train_dir, kind):
    lines = (train_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_accuracy_on_one_and_four_towers(tmp_path, one_run, count):
    result = run(QUICK, num_gpus=count, train_dir=str(tmp_path / "run"))
    for each in (result, one_run[1]):
        assert each["step"] == STEPS
        assert each["evaluations"][0]["accuracy"] > 0.6
    # batch statistics are per shard, so the runs agree in accuracy, not to the bit
    assert abs(result["evaluations"][0]["accuracy"] - one_run[1]["evaluations"][0]["accuracy"]) < 0.25


def test_records_of_a_run(one_run):
    directory, result = one_run
    train = records_of(directory, "train")
    assert [r["step"] for r in train] == list(range(1, 21))  # ten times as often as diagnostics, at least every step
    assert {"step", "epoch", "loss", "accuracy", "images_per_sec", "learning_rate"} <= set(train[0])
    assert [r["image_side"] for r in train] == [18] * 10 + [20] * 10
    assert train[9]["epoch"] == 1.0 and train[-1]["loss"] < train[0]["loss"]
    final = [r for r in records_of(directory, "eval") if r["step"] == STEPS]
    assert [(r["split"], r["weights"], r["tta"], r["count"]) for r in final] == [
        ("test", weights, tta, 500) for weights in ("raw", "ema") for tta in (0, 2)
    ]
    assert [r["step"] for r in train if "towers" in r] == [5, 10, 15, 20]
    assert {name: len(each) for name, each in train[4]["towers"].items()} == {
        "loss": 2,
        "gradient_norm": 2,
        "cosine": 2,
    }
    assert np.sum(final[0]["confusion"]) == 500
    assert [r["accuracy"] for r in final] == [r["accuracy"] for r in result["evaluations"]]
    environment = json.loads((directory / "environment.json").read_text())
    assert [t["device"] for t in environment["towers"]] == ["/CPU:0", "/CPU:1"]
    assert json.loads((directory / "config.json").read_text())["batch_size"] == 200


def events_of(directory):
    return EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()


def tensors_of(events, tag):
    return {event.step: tf.make_ndarray(event.tensor_proto) for event in events.Tensors(tag)}


TAGS = {"loss", "accuracy", "health/gradient_norm", "health/bad_steps", "health/rollbacks", "health/loss_scale"}
TAGS |= {"losses/cross_entropy", "losses/cross_entropy (raw)", "losses/total_loss", "losses/total_loss (raw)"}
TAGS |= {f"learning_rate/{group}" for group in ("kernels", "biases", "head", "whitening")}
TAGS |= {"speed/images_per_sec", "speed/step_seconds", "speed/input_wait", "memory/host_mb", "input/augmented"}
TAGS |= {f"{kind}/group1_gelu1" for kind in ("activations", "sparsity")}
PER_WEIGHT = ("weights", "gradients", "weight_norm", "gradient_norm", "update_ratio")
TAGS |= {f"{kind}/group1_conv1/kernel" for kind in PER_WEIGHT}
TAGS |= {f"run/{text}" for text in ("recipe", "command", "environment", "model", "variables")}


def test_tensorboard_training_tags(one_run):
    train = events_of(one_run[0] / "train")
    tags = set(train.Tags()["tensors"])
    assert tags >= TAGS
    assert not [tag for tag in tags if "tower_" in tag]
    names = {node.name.split("/")[0] for node in train.Graph().node}
    assert {"tower_0", "tower_1"} <= names
    shown = tensors_of(train, "input/augmented")[20]
    assert tf.io.decode_png(shown[2]).shape == (int(shown[1]), int(shown[0]), 3)
    counts = tensors_of(train, "activations/group1_gelu1")
    assert list(counts) == [5, 10, 15, 20]
    assert counts[20][:, 2].sum() == 64 * 9 * 9 * 64  # 64 images after the first pool
    for tower in ("tower_0", "tower_1"):
        cosines = tensors_of(events_of(one_run[0] / tower), "towers/cosine")
        assert list(cosines) == [5, 10, 15, 20] and 0 < cosines[5] <= 1


def test_every_chart_of_custom_scalars_has_a_curve(one_run):
    """A tag that is renamed where it is written, and not in the charts, would leave a chart empty."""
    parts = [events_of(one_run[0] / part) for part in ("train", "eval", "tower_0")]
    written = [tag for events in parts for tag in events.Tags()["tensors"]]
    layout = layout_pb2.Layout.FromString(tensors_of(parts[0], CONFIG_SUMMARY_TAG)[0].item())
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    without_curve = {
        (title, pattern)
        for title, patterns in charts.items()
        for pattern in patterns
        if not any(re.match(pattern, tag) for tag in written)
    }
    assert without_curve == {("GPU utilization, %", "gpu_utilisation/.*")}  # there is no GPU
    losses = {tag for pattern in charts["training loss, raw and smoothed"] for tag in written if re.match(pattern, tag)}
    assert losses == {"loss", "losses/cross_entropy", "losses/total_loss"}


def test_tensorboard_tags_do_not_depend_on_the_number_of_towers(tmp_path, one_run):
    run(QUICK, num_gpus=1, max_steps=5, train_dir=str(tmp_path))
    one, two = (set(events_of(path / "train").Tags()["tensors"]) for path in (tmp_path, one_run[0]))
    assert two - one == {"towers/gradient_noise_scale"}  # which one tower has nothing to estimate from
    assert one <= two


def test_every_tag_of_the_tutorial_has_a_counterpart(tmp_path):
    """The table in docs/tensorboard.md, row by row."""
    page = (Path(__file__).parents[1] / "docs" / "tensorboard.md").read_text()
    table = page.split("## Tags of the TensorFlow tutorial")[1].splitlines()
    rows = [line.split(" | ") for line in table if line.startswith("| `")]
    tutorials, ours = ({tag for row in rows for tag in re.findall("`(.+?)`", row[side])} for side in (0, 1))
    layers = ("conv1", "conv2", "local3", "local4", "softmax_linear")
    of_layers = {f"{layer}/{kind}" for layer in layers for kind in ("activations", "sparsity", "weights", "biases")}
    of_layers |= {f"{layer}/{kind}/gradients" for layer in layers for kind in ("weights", "biases")}
    losses = {"cross_entropy", "local3/weight_loss", "local4/weight_loss", "total_loss"}
    losses |= {f"{loss} (raw)" for loss in losses}
    assert tutorials == of_layers | losses | {"images", "learning_rate", "Precision @ 1"}
    config = recipe("cifarnet", dataset="synthetic", batch_size=64, max_steps=2, num_gpus=2, precision="float32")
    run(config, train_dir=str(tmp_path))
    tags = {tag for part in ("train", "eval") for tag in events_of(tmp_path / part).Tags()["tensors"]}
    assert ours <= tags, ours - tags


def test_smoothed_losses_are_moving_averages_of_the_raw_ones(one_run):
    train = events_of(one_run[0] / "train")
    for term in ("cross_entropy", "total_loss"):
        raw, averaged = (tensors_of(train, f"losses/{term}{which}") for which in (" (raw)", ""))
        total, weight = np.float64(0), np.float64(0)
        for step in range(1, 21):
            total, weight = 0.9 * total + 0.1 * np.float64(raw[step]), 0.9 * weight + 0.1
            assert averaged[step] == pytest.approx(total / weight, rel=1e-6)


def test_tensorboard_evaluation_tags(one_run):
    directory, result = one_run
    evaluated, name = events_of(directory / "eval"), "chequered ring"
    for picture in ("confusion", "mistakes"):
        width, height, png = tensors_of(evaluated, f"{picture}/test")[20]
        assert tf.io.decode_png(png).shape == (int(height), int(width), 3) and int(width) > 300
    assert 0 <= tensors_of(evaluated, f"class_accuracy/test/{name}")[20] <= 1
    assert tensors_of(evaluated, f"precision_recall/test/{name}")[20].shape == (6, 127)
    shown = tensors_of(evaluated, "accuracy/test/ema_tta2")
    assert shown[20] == pytest.approx(result["evaluations"][-1]["accuracy"])
    final = tensors_of(events_of(directory / "result"), "final/accuracy/test/ema_tta2")
    assert final == {20: shown[20]}
    (embedding,) = directory.glob("projector_*")
    assert embedding.name == "projector_00000020" and len((embedding / "features.tsv").read_text().splitlines()) == 500


def test_finished_run_returns_its_stored_result(one_run, capsys):
    directory, result = one_run
    assert run(QUICK, num_gpus=4, train_dir=str(directory)) == result
    assert f"{directory} is complete at step {STEPS}" in capsys.readouterr().out


def test_resume_with_another_recipe_is_refused(one_run):
    directory, _ = one_run
    with pytest.raises(UsageError, match=r"other settings \(batch_size 200 -> 100, momentum 0.85 -> 0.5\)"):
        run(QUICK, train_dir=str(directory), batch_size=100, momentum=0.5)


def test_evaluate_reproduces_the_score_of_the_run(one_run):
    directory, result = one_run
    config = EvaluateConfig(train_dir=str(directory), precision="float32")
    score = json.loads(evaluate.evaluate_checkpoint(replace(config, weights="ema", tta=2, num_gpus=3, json=True)))
    expected = result["evaluations"][-1]["accuracy"]
    assert score["count"] == 500 and score["accuracy"] == pytest.approx(expected, abs=0.004)
    assert score["interval95"][0] < score["accuracy"] < score["interval95"][1]
    assert sum(map(sum, score["confusion"])) == 500
    table = evaluate.evaluate_checkpoint(config)
    assert "chequered ring" in table and "ema weights, TTA 0" in table


def test_evaluate_without_a_checkpoint_is_refused(one_run, tmp_path):
    beside = f"runs beside it: .*{one_run[0].name}"
    (tmp_path / "empty" / "run").mkdir(parents=True)
    begun = shutil.copytree(one_run[0], tmp_path / "begun", ignore=lambda *_: ["checkpoints"])
    for place, why in (
        (tmp_path / "empty" / "run", "it is not the directory of a run; give the directory of a run, as runs/"),
        (one_run[0].parent / "none", f"there is no such directory; {beside}"),
        (begun, "its run has not saved any yet; train on"),
    ):
        with pytest.raises(UsageError, match=f"no checkpoint in {place}: {why}"):
            evaluate.evaluate_checkpoint(EvaluateConfig(train_dir=str(place)))
    with pytest.raises(UsageError, match="held out no validation"):
        evaluate.evaluate_checkpoint(EvaluateConfig(train_dir=str(one_run[0]), split="validation"))


class StopAtStep(ShutdownHandler):
    """A signal that arrives during step `at`."""

    def __init__(self, at):
        self._left = at
        super().__init__()

    def check(self):
        if self._deferred:  # the loop, once a step
            self._left -= 1
            self.signal = None if self._left else SIGTERM
        super().check()


@pytest.mark.parametrize(
    ("config", "at", "fixture"),
    [
        (TINY, 13, "tiny_run"),
        *(pytest.param(QUICK, at, "one_run", marks=pytest.mark.slow) for at in (3, 13)),
    ],
    ids=["tiny", "whitening", "after whitening"],
)
def test_resumed_run_equals_uninterrupted_run(tmp_path, request, config, at, fixture):
    directory, result = request.getfixturevalue(fixture)
    config = replace(config, num_gpus=2, train_dir=str(tmp_path / "run"))
    with pytest.raises(Interrupted, match=f"saved step {at}:") as caught:
        run(config, StopAtStep(at))
    assert caught.value.exit_code == 143
    assert run(config)["weights_sha256"] == result["weights_sha256"]
    steps = [r["step"] for r in records_of(config.directory, "train")]
    assert steps == sorted(set(steps))
    same, output = compare_runs(directory, config.directory)
    assert same and "losses: same at all 20 common steps, the last 20" in output
    assert "weights: same at step-00000020" in output and "weights after step 20: same, sha256 " in output


def test_compare_runs_prints_differences(tmp_path, tiny_run, monkeypatch, capsys):
    changed = shutil.copytree(tiny_run[0], tmp_path / "changed")
    metrics, result = changed / "metrics.jsonl", changed / "result.json"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    next(line for line in lines if line["kind"] == "train" and line["step"] == 7)["loss"] += 1e-6
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result.write_text(json.dumps(json.loads(result.read_text()) | {"weights_sha256": "0" * 64}))
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")  # as the program would leave it set
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(tiny_run[0]), str(changed)])
    assert main.compare_runs.__wrapped__(ShutdownHandler()) == 1  # the exit code
    output = capsys.readouterr().out
    assert "losses: from step 7: loss " in output and "(same until step 6)" in output
    assert "weights: same at step-00000009, " in output and f" and {'0' * 16}\n" in output
    environment = json.loads((changed / "environment.json").read_text())
    (changed / "environment.json").write_text(json.dumps(environment | {"variables": environment["variables"][1:]}))
    count = len(environment["variables"])
    assert f"variables a list of {count} -> a list of {count - 1}" in compare_runs(tiny_run[0], changed)[1]
    result.write_text("[1, 2]")
    output = compare_runs(tiny_run[0], changed)[1]
    assert f"{tiny_run[0]} ended at step 20, {changed} has not ended: only the common part is compared" in output
    metrics.unlink()
    shutil.rmtree(changed / "checkpoints")
    same, output = compare_runs(tiny_run[0], changed)
    assert not same and "the runs have no step in common, so nothing can be compared" in output


class SimulatedKill(BaseException):
    """Nothing in a run handles it, as with `kill -9`."""


class KillAtStep(StopAtStep):
    def check(self):
        try:
            super().check()
        except Interrupted:
            raise SimulatedKill from None


@pytest.mark.slow
def test_killed_run_resumes_without_duplicate_events(tmp_path):
    """Each step is in the event files once."""
    config = replace(QUICK, num_gpus=2, train_dir=str(tmp_path), checkpoint_every_steps=8)
    with pytest.raises(SimulatedKill):
        run(config, KillAtStep(13))
    assert list(tensors_of(events_of(tmp_path / "train"), "loss"))[-1] == 12  # the 13th is read with the next
    run(config)
    for part, tag, steps in (
        ("train", "loss", list(range(1, 21))),
        ("tower_1", "towers/loss", [5, 10, 15, 20]),
        ("eval", "accuracy/test/raw", [10, 20]),
        ("result", "final/images_per_sec", [20]),
    ):
        assert [event.step for event in events_of(tmp_path / part).Tensors(tag)] == steps
    run(config, train_dir=str(tmp_path / "uninterrupted"))
    scales = [
        [r.get("gradient_noise_scale") for r in records_of(path, "train")]
        for path in (tmp_path, tmp_path / "uninterrupted")
    ]
    assert scales[0] == scales[1] and any(scales[0])  # a moving average that is restored


def test_rate_of_a_step_that_compiles_after_a_resume_is_that_of_the_next(tmp_path, capsys):
    """A step is recorded once the next has run, or at the end of an epoch."""
    config = replace(TINY, max_steps=4, summary_every_steps=1, train_dir=str(tmp_path))
    with pytest.raises(Interrupted):
        run(config, StopAtStep(2))
    result = run(config)
    rates = [record["images_per_sec"] for record in records_of(tmp_path, "train")]
    assert len(rates) == 4 and None not in rates and min(rates) > 0
    assert result["images_per_sec"] > 0 and "0 images/s" not in re.findall(r"\S+ images/s", capsys.readouterr().out)
    alone = run(config, max_steps=1, overwrite=True)
    assert alone["images_per_sec"] is None and "too few steps to time; weights" in capsys.readouterr().out


def test_time_left_counts_each_compiled_step_with_its_own_time(tmp_path, monkeypatch):
    """Also where images grow just before the end of an epoch, at which the last step is read early."""
    seconds, compiling, end_step = {}, set(), TimeLeft.end_step

    def record(time_left, step, compiled):
        before = time_left._seconds.total()
        end_step(time_left, step, compiled)
        seconds[step] = time_left._seconds.total() - before
        compiling.update([] if compiled else [step])

    monkeypatch.setattr(TimeLeft, "end_step", record)
    run(QUICK, image_size_schedule="0=18,40%=20", train_dir=str(tmp_path))
    assert list(seconds) == list(range(1, STEPS + 1))
    assert {1, 9} <= compiling and {step for step, took in seconds.items() if not took} == compiling, seconds
    steps = [took for step, took in seconds.items() if step not in compiling]
    assert min(steps) > 0.1 * np.median(steps), seconds


def test_profile_is_written_and_summarized(tmp_path, capsys):
    run(TINY, max_steps=4, profile_steps="1:3", train_dir=str(tmp_path))
    assert len(list((tmp_path / "train" / "plugins" / "profile").rglob("*.xplane.pb"))) == 1
    output = capsys.readouterr().out
    assert "profile of steps 1 to 2: a step takes" in output and "Conv2DBackpropFilter" in output


def test_overwrite_applies_once_per_launch(tmp_path, capsys):
    config = replace(TINY, max_steps=1, overwrite=True, train_dir=str(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    for launch_id, complete in (("one", False), ("one", True), ("another", False)):
        run(config, launch_id=launch_id)
        assert ("is complete at step 1" in capsys.readouterr().out) == complete
    assert (tmp_path / "notes.txt").read_text() == "mine"  # foreign files are kept


@pytest.mark.slow
def test_compare_runs_of_two_seeds(tmp_path, one_run):
    config = replace(QUICK, num_gpus=2, train_dir=str(tmp_path), seed=1, checkpoint_every_steps=9)
    run(config, max_steps=9)
    same, output = compare_runs(one_run[0], tmp_path)
    assert not same and "max_steps 0 -> 9, seed 0 -> 1, tta 2 -> 0\n" in output
    assert "losses: from step 1: loss " in output and "weights: from step-00000009: " in output


def resumed_at(step, config, tmp_path):
    """The directories of an uninterrupted run and of one that is resumed at a step, whose weights are the same."""
    uninterrupted, resumed = (replace(config, train_dir=str(tmp_path / name)) for name in ("uninterrupted", "resumed"))
    with pytest.raises(Interrupted):
        run(resumed, StopAtStep(step))
    assert run(resumed)["weights_sha256"] == run(uninterrupted)["weights_sha256"]
    return uninterrupted.directory, resumed.directory


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"optimizer": "muon", "lookahead": True}, {"optimizer": "adamw"}])
def test_optimizer_slots_are_restored(tmp_path, settings):
    resumed_at(3, replace(QUICK, num_gpus=2, max_steps=6, learning_rate=0.01, **settings), tmp_path)


@pytest.mark.slow
def test_max_steps_can_be_raised(tmp_path, one_run):
    config = replace(QUICK, num_gpus=2, train_dir=str(tmp_path))
    assert run(config, max_steps=7)["step"] == 7
    assert run(config)["weights_sha256"] == one_run[1]["weights_sha256"]


def test_evaluations_of_an_earlier_end_are_kept(tmp_path):
    for last_step in (1, 2):
        run(TINY, train_dir=str(tmp_path), max_steps=last_step)
    assert {record["step"] for record in records_of(tmp_path, "eval")} == {1, 2}


def test_hard_examples_with_resume_and_graph(tmp_path, capsys):
    config = replace(TINY, num_gpus=2, max_steps=4, batch_size=50, hard_example_pool=200)
    directories = resumed_at(2, config, tmp_path)
    assert "4 steps of 50, the hardest of 200, 10 per epoch" in capsys.readouterr().out
    one, other = (read_variables(latest_checkpoint(directory)) for directory in directories)
    for name in ("proxy.model.head.kernel", "proxy.optimizer.kernels.momentum.0", "proxy.step"):
        np.testing.assert_array_equal(one[name], other[name])
    shown = events_of(directories[0] / "train")
    assert {"proxy/loss", "proxy/accuracy"} <= set(shown.Tags()["tensors"])
    graph = shown.Graph()
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    drawn = ("proxy/tower_1/gradients/", "tower_1/gradients/", "hardest/", "variables/proxy/head/kernel")
    assert all(any(name.startswith(box) for name in names) for box in drawn)
    assert not any(name.startswith("gradient_tape") for name in names)


@pytest.mark.slow
def test_resume_on_another_number_of_towers(tmp_path, capsys):
    config = replace(QUICK, train_dir=str(tmp_path))
    with pytest.raises(Interrupted):
        run(config, num_gpus=4, stop=StopAtStep(6))
    assert run(config, num_gpus=1)["step"] == STEPS
    assert "resuming from step 6, saved with 4 towers in float32" in capsys.readouterr().out


@pytest.mark.slow
def test_resume_under_other_strategies(tmp_path, one_run, capsys):
    """Four towers, then two mirrored replicas, then one tower: step, rate and accuracy continue."""
    config = replace(QUICK, train_dir=str(tmp_path / "mixed"), summary_every_steps=1, batch_statistics="final")
    starts = [{"num_gpus": 4}, {"num_gpus": 2, "strategy": "mirrored"}, {"num_gpus": 1}]
    results = [run(config, max_steps=steps, **settings) for steps, settings in zip((8, 14, 20), starts, strict=True)]
    assert "resuming from step 8, saved with 4 towers" in capsys.readouterr().out
    assert [result["step"] for result in results] == [8, 14, 20]
    train = records_of(tmp_path / "mixed", "train")
    assert [r["step"] for r in train] == list(range(1, 21))
    uninterrupted = records_of(one_run[0], "train")
    assert [r["learning_rate"] for r in train] == [r["learning_rate"] for r in uninterrupted]
    before, after = results[0]["evaluations"][0]["accuracy"], results[1]["evaluations"][0]["accuracy"]
    assert after > before - 0.1 and results[2]["evaluations"][0]["accuracy"] > 0.6
    assert train[8]["loss"] < train[0]["loss"]  # the first step of the second strategy is not a first step


@pytest.mark.slow
def test_checkpoint_restores_the_same_weights_under_every_strategy(tmp_path):
    """Without a step in between, the weights are equal to the bit."""
    config = replace(QUICK, train_dir=str(tmp_path), max_steps=3)
    saved = run(config, num_gpus=4, variable_placement="least_loaded")
    for settings in (
        {"num_gpus": 2, "strategy": "mirrored"},
        {"num_gpus": 2, "parallelism": "model"},
        {"num_gpus": 2, "variable_placement": "round_robin", "gradient_device": "cpu"},
    ):
        (tmp_path / "result.json").unlink()  # otherwise it is complete and nothing is read
        assert run(config, **settings)["weights_sha256"] == saved["weights_sha256"]


@pytest.mark.slow
def test_auto_placement_is_stored_and_changes_no_weights(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(auto_placement, "on_gpus", lambda towers: True)  # where it is measured
    config = replace(QUICK, num_gpus=2, max_steps=2)
    auto = replace(config, train_dir=str(tmp_path / "auto"), variable_placement="auto")
    measured = run(auto)
    (output,) = [line for line in caplog.messages if "a step of 4 images on each of 2 towers takes" in line]
    chosen = json.loads((tmp_path / "auto/config.json").read_text())["variable_placement"]
    assert output.startswith(f"variable placement {chosen}: ")
    asked = run(config, train_dir=str(tmp_path / "asked"), variable_placement=chosen)
    assert asked["weights_sha256"] == measured["weights_sha256"]
    caplog.clear()
    run(auto, max_steps=3)
    assert f"variable placement {chosen}: as the run began" in caplog.messages


OOM = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith shape [1024,64]")
NO_KERNEL = tf.errors.UnimplementedError(None, None, "A deterministic GPU implementation of X is not available.")


@pytest.mark.parametrize(
    ("error", "settings", "expected", "message"),
    [
        (
            OOM,
            {"micro_batches": 2},
            UsageError,
            r"^OOM when allocating tensor with shape \[1024,64\]: .*--micro_batches=4 ",
        ),
        (
            NO_KERNEL,
            {"deterministic": True},
            UsageError,
            "^A deterministic GPU implementation of X .*: train without --deterministic",
        ),
        (NO_KERNEL, {}, tf.errors.UnimplementedError, "^A deterministic GPU implementation of X is not available.$"),
    ],
    ids=["out of memory", "no deterministic operation", "other"],
)
def test_errors_of_tensorflow_suggest_flags(tmp_path, monkeypatch, error, settings, expected, message):
    def train(*_):
        raise error

    monkeypatch.setattr(trainer.Trainer, "_train", train)
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    with pytest.raises(expected, match=message):
        run(QUICK, train_dir=str(tmp_path / "run"), **settings)


@pytest.fixture
def small_memory(monkeypatch):
    """small_memory(fits): steps for whose micro-batches and image size `fits` is false do not fit into the memory.
    Returns the numbers of micro-batches of all attempts."""

    def of(fits):
        start, attempts = StepRunner.start, []

        def prepare(*arguments, **options):
            setup = setup_run(*arguments, **options)
            attempts.append(setup.config.micro_batches)
            return setup

        def start_if_it_fits(self, step, batch, inputs, **options):
            if not fits(attempts[-1], inputs.image_size):
                raise OOM
            return start(self, step, batch, inputs, **options)

        monkeypatch.setattr(trainer, "setup_run", prepare)
        monkeypatch.setattr(StepRunner, "start", start_if_it_fits)
        return attempts

    return of


def test_micro_batches_follow_the_memory(tmp_path, small_memory, capsys):
    """The same bits as with that number from the start; a number that does not fit at all is an error."""
    attempts = small_memory(lambda parts, size: parts >= 4)
    config = replace(TINY, num_gpus=2, max_steps=6, eval_every_epochs=0)
    result = run(config, train_dir=str(tmp_path / "auto"), micro_batches=0)
    output = capsys.readouterr().out
    assert attempts == [1, 2, 4] and output.count("continuing with --micro_batches=") == 2
    said = "a step does not fit into the memory (OOM when allocating tensor with shape [1024,64]): continuing with "
    assert f"{said}--micro_batches=4; batch norm now sees 25 images at a time instead of 50, which is another" in output
    given = run(config, train_dir=str(tmp_path / "given"), micro_batches=4)
    assert given["weights_sha256"] == result["weights_sha256"]
    small_memory(lambda parts, size: False)
    with pytest.raises(UsageError, match="the memory is too small for this; a smaller --batch_size"):
        run(config, train_dir=str(tmp_path / "never"), micro_batches=0, batch_size=4)


@pytest.mark.slow
def test_micro_batches_go_on_from_the_step_that_did_not_fit_and_are_kept(tmp_path, small_memory, capsys):
    """Where larger images come in the middle of a run; also when it is resumed."""
    attempts = small_memory(lambda parts, size: parts >= 2 or size < 20)
    config = replace(QUICK, num_gpus=2, train_dir=str(tmp_path / "auto"), micro_batches=0)
    with pytest.raises(Interrupted, match="saved step 14"):
        run(config, StopAtStep(15))  # which counts the second start too
    output = capsys.readouterr().out
    assert attempts == [1, 2] and "resuming from step 10" in output
    result = run(config)
    assert attempts == [1, 2, 2] and result["step"] == STEPS
    one = replace(QUICK, num_gpus=2, train_dir=str(tmp_path / "whole"), micro_batches=0)
    assert run(one)["weights_sha256"] == result["weights_sha256"]


def test_towers_with_too_small_a_share_are_announced(tmp_path, monkeypatch, capsys):
    """On logical CPU devices that pass for GPUs, by a clock on which each tower costs a millisecond."""

    def time_steps(steps):
        return {name: [0.0 * step() + int(name) / 1000] for name, step in steps.items()}

    monkeypatch.setattr(tower_count, "on_gpus", lambda towers: True)
    monkeypatch.setattr(tower_count, "time_steps", time_steps)
    config = replace(TINY, num_gpus=4, batch_size=200, max_steps=12, eval_every_epochs=0)
    plain = run(config, train_dir=str(tmp_path / "plain"))
    sentence = "2 towers would be faster than 4: a step of 200 images takes 2.0 ms there, 4.0 ms here (medians of "
    assert sentence not in capsys.readouterr().out  # it would take more than a small part of the time left
    monkeypatch.setattr(run_logger, "SPARE_TIME", 1e6)
    advised = run(config, train_dir=str(tmp_path / "advised"))
    assert f"{sentence}25); give --num_gpus=2\n" in capsys.readouterr().out
    assert advised["weights_sha256"] == plain["weights_sha256"]


def test_indivisible_batch_uses_fewer_towers(tmp_path, caplog):
    caplog.set_level("INFO")
    run(TINY, num_gpus=0, batch_size=51, max_steps=1, train_dir=str(tmp_path))
    assert "1 of 2 towers: batch_size=51 cannot be shared by 2 towers; 50 and 52 can" in caplog.text
    assert len(json.loads((tmp_path / "environment.json").read_text())["towers"]) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_dir": "file/run"}, "cannot be made: Not a directory"),
        ({"profile_steps": "4:6"}, "profile_steps=4:6: this run ends with step 4"),
        (
            {"strategy": "mirrored", "all_reduce": "nccl"},
            "all_reduce=nccl joins GPUs, and not each of the 2 towers has one",
        ),
    ],
)
def test_run_that_cannot_start_leaves_no_directory(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=message):
        run(TINY, **{"num_gpus": 2, "max_steps": 4, "train_dir": "run"} | settings)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def saved_run(tmp_path, one_run):
    """A run of 20 steps with checkpoints of steps 9, 18 and 20, and the config that resumes it."""
    shutil.copytree(one_run[0], tmp_path, dirs_exist_ok=True)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path)] == ["09", "18", "20"]
    return tmp_path, replace(QUICK, num_gpus=2, train_dir=str(tmp_path))


def test_damaged_checkpoint_is_quarantined_and_the_previous_one_restored(saved_run, one_run, capsys, caplog):
    directory, config = saved_run
    damaged = directory / "checkpoints/step-00000020/state.data-00000-of-00001"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    evaluate.evaluate_checkpoint(EvaluateConfig(train_dir=str(directory)))  # changes nothing, and warns too
    (passed_over,) = (line for line in caplog.messages if "is damaged" in line)
    assert "step-00000020 is damaged (" in passed_over and passed_over.endswith("; step-00000018 is taken")
    capsys.readouterr()
    assert run(config)["weights_sha256"] == one_run[1]["weights_sha256"]
    output = capsys.readouterr().out
    assert output.count("is damaged") == 1 and "resuming from step 18" in output
    assert (directory / "checkpoints/damaged-step-00000020").is_dir()


def test_run_with_only_damaged_checkpoints_is_refused(tmp_path, tiny_run):
    directory = shutil.copytree(tiny_run[0], tmp_path / "copy")
    config = replace(TINY, num_gpus=2, train_dir=str(directory))
    for checkpoint in list_checkpoints(directory):
        (checkpoint / "facts.json").unlink()
    for _ in range(2):  # the second time they have other names
        with pytest.raises(DataError, match=r"every checkpoint in .* is damaged; .* --overwrite to start again"):
            run(config)
    assert run(config, overwrite=True, max_steps=1)["step"] == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", '{"model_type": "bert"}'), ("result.json", "[1]"), ("config.json", "no JSON")],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_not_overwritten(tmp_path, name, content, overwrite):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=f"{name} is of no run and would be replaced; give another --train_dir"):
        run(TINY, train_dir=str(tmp_path), max_steps=1, overwrite=overwrite)
    assert (tmp_path / name).read_text() == content


def test_empty_config_is_replaced(tmp_path):
    """As a power loss may leave it."""
    (tmp_path / "config.json").write_text("")
    assert run(TINY, train_dir=str(tmp_path), max_steps=1)["step"] == 1


def test_locked_train_dir_is_refused(saved_run):
    directory, config = saved_run
    message = "another process trains in .*; end it, or give another --train_dir"
    with files.locked(directory / ".lock"), pytest.raises(UsageError, match=message):
        run(config)


@pytest.mark.slow
def test_failed_save_is_logged_and_retried(tmp_path, one_run, monkeypatch, capsys):
    """The disk is full for a while: older checkpoints stay and the final weights are the same."""
    config = replace(QUICK, num_gpus=2, train_dir=str(tmp_path), checkpoint_every_steps=3)
    commit, calls = files.commit, []

    def sometimes_full(final, write):
        calls.append(final.name)
        if 2 <= len(calls) <= 4:
            raise OSError(28, "No space left on device")
        commit(final, write)

    monkeypatch.setattr(files, "commit", sometimes_full)
    result = run(config)
    assert result["weights_sha256"] == one_run[1]["weights_sha256"] and result["failed_saves"] == 3
    output = capsys.readouterr().out
    assert "step 6 could not be saved (No space left on device); step-00000003 is kept" in output
    assert "3 checkpoints could not be saved when they were due" in output


def test_failed_final_save_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "commit", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="step 2, the last, could not be saved; make room"):
        run(TINY, train_dir=str(tmp_path), max_steps=2)
    assert "test " in capsys.readouterr().out  # the score is printed nevertheless


def test_unwritable_records_do_not_stop_a_run(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "train").write_text("in the way of the event files")
    assert run(TINY, train_dir=str(tmp_path), max_steps=2)["step"] == 2
    assert len([line for line in caplog.messages if "training continues without" in line]) == 2


def test_config_that_could_not_be_written_is_written_at_the_end(tmp_path, monkeypatch, capsys):
    """Without config.json a run cannot be loaded, so the end of the run and a restart write it again."""
    config, write = replace(TINY, train_dir=str(tmp_path), max_steps=2), files.write_whole
    full = {tmp_path / "config.json"}

    def on_a_full_disk(path, content):
        if path in full:
            raise OSError(28, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", on_a_full_disk)
        result = run(config)
    assert (tmp_path / "result.json").exists() and not (tmp_path / "config.json").exists()
    assert run(config)["weights_sha256"] == result["weights_sha256"]
    assert json.loads((tmp_path / "config.json").read_text())["max_steps"] == 2
    capsys.readouterr()
    run(config)
    assert "is complete at step 2" in capsys.readouterr().out


@pytest.mark.slow
def test_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    config = replace(QUICK, train_dir=str(tmp_path), checkpoint_every_steps=2, keep_checkpoints=1)
    run(config, eval_every_epochs=0.2)
    kept = [read_metadata(path) for path in list_checkpoints(tmp_path)]
    scores = {r["step"]: r["accuracy"] for r in records_of(tmp_path, "eval") if r["weights"] == "ema"}
    best = max((step for step in scores if step < STEPS), key=lambda step: scores[step])
    assert [metadata["step"] for metadata in kept] == [best, STEPS] and kept[0]["accuracy"] == scores[best]


@pytest.mark.slow
def test_overwrite_keeps_foreign_files(tmp_path):
    config = replace(QUICK, train_dir=str(tmp_path), max_steps=3)
    mine = [tmp_path / name for name in ("notes.txt", "train/cat/1.png", "result/table.csv", "checkpoints/best.h5")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    first = run(config)
    again = run(config, overwrite=True)
    assert again["weights_sha256"] == first["weights_sha256"]
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)
    (tmp_path / "train" / ".kept.tmp").write_text("left by a kill")
    workdir.clear(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted([*mine, tmp_path / ".lock"])
    assert not (tmp_path / "eval").exists()
    others = tmp_path / "train" / "events.out.tfevents.1"
    others.write_text("of a program that keeps checkpoints/ and train/ too")
    workdir.clear(tmp_path)
    assert others.exists() and all(path.exists() for path in mine)


@pytest.fixture
def inject_nan(monkeypatch):
    """inject_nan(steps): an image of NaN in the input of these steps, in all later runs."""

    def of(steps):
        stream = Batches.stream

        def with_nan(self, first_step, last_step):
            for step, batch in enumerate(stream(self, first_step, last_step), first_step + 1):
                if step in steps:
                    brightness = tf.tensor_scatter_nd_update(batch.draws.brightness, [[150]], [np.nan])
                    batch = batch._replace(draws=batch.draws._replace(brightness=brightness))
                yield batch

        monkeypatch.setattr(Batches, "stream", with_nan)

    return of


WITH_BRIGHTNESS = replace(TINY, brightness=1e-30, num_gpus=2)  # inject_nan sets the brightness


def all_finite(train_dir):
    checkpoints = [read_variables(checkpoint) for checkpoint in list_checkpoints(train_dir)]
    assert all(np.isfinite(value).all() for values in checkpoints for value in values.values())
    return bool(checkpoints)


def test_nonfinite_batch_skips_only_its_update(tmp_path, inject_nan, capsys):
    inject_nan({4, 5, 20})
    result = run(WITH_BRIGHTNESS, train_dir=str(tmp_path), checkpoint_every_steps=1, summary_every_steps=1)
    assert result["step"] == STEPS and result["bad_steps"] == 3 and all_finite(tmp_path)
    previous, skipped = (read_variables(checkpoint) for checkpoint in list_checkpoints(tmp_path)[-2:])
    assert (previous.pop("step"), skipped.pop("step")) == (19, 20)
    for name, value in previous.items():
        if not name.startswith("ema"):  # averages still follow
            np.testing.assert_array_equal(skipped[name], value, err_msg=name)
    output = capsys.readouterr().out
    origin = "cross_entropy of tower_1 is not finite; first of its tensors: the images"
    assert f"step 5 made no update (2 in a row, 3 end the run): {origin}" in output
    assert "3 steps made no update" in output
    lost = [r["step"] for r in records_of(tmp_path, "train") if r["loss"] is None]
    assert lost == [4, 5, 20]


PROXY = {"batch_size": 50, "hard_example_pool": 200}


@pytest.mark.parametrize(
    ("settings", "origin"),
    [
        ({"strategy": "mirrored"}, " of tower_1"),
        ({"micro_batches": 2, "data_on": "device"}, " of tower_1"),
        ({"parallelism": "model", "micro_batches": 4, "model": "cifarnet"}, " of tower_0"),
        pytest.param(
            PROXY,
            "step 2 made no update (1 in a row, 3 end the run): proxy: cross_entropy of tower_1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_nonfinite_batch_is_located(tmp_path, inject_nan, monkeypatch, capsys, settings, origin):
    """Of the hard examples it is never selected here, so that only the proxy computes it."""
    monkeypatch.setattr(tf.math, "top_k", lambda losses, count, sorted: SimpleNamespace(indices=tf.range(count)))
    inject_nan({2})
    result = run(WITH_BRIGHTNESS, train_dir=str(tmp_path), max_steps=3, **settings)
    assert result["bad_steps"] == 1 and all_finite(tmp_path)
    assert f"{origin} is not finite; first of its tensors: the images" in capsys.readouterr().out


@pytest.mark.slow
def test_too_many_nonfinite_steps_end_a_run_that_can_be_resumed(tmp_path, inject_nan):
    inject_nan({4, 5, 6})
    config = replace(WITH_BRIGHTNESS, train_dir=str(tmp_path), checkpoint_every_steps=3)
    with pytest.raises(Interrupted, match="saved step 5"):
        run(config, StopAtStep(5))
    with pytest.raises(DivergedError, match=r"step 6 .* \(3 in a row.*; step-00000005 is kept: .*--rollback_on"):
        run(config)
    assert all_finite(tmp_path)
    assert run(config, max_nonfinite_steps=4)["bad_steps"] == 3


def test_diverged_run_saves_no_nonfinite_values(tmp_path):
    config = replace(TINY, train_dir=str(tmp_path), learning_rate=1e38, checkpoint_every_steps=1)
    with pytest.raises(DivergedError, match=r"made no update \(3 in a row.*--overwrite with a smaller --learning_rate"):
        run(config)
    assert all_finite(tmp_path)


@pytest.mark.slow
def test_rollback_halves_the_learning_rates(tmp_path, inject_nan, monkeypatch, capsys):
    monkeypatch.setattr(health, "MAX_ROLLBACKS", 2)
    steps = {7, 8}
    inject_nan(steps)
    settings = {"max_nonfinite_steps": 2, "rollback_on_divergence": True, "max_steps": 12, "checkpoint_every_steps": 2}
    config = replace(WITH_BRIGHTNESS, train_dir=str(tmp_path), summary_every_steps=1, **settings)
    with pytest.raises(DivergedError, match="step 8 made no update .* 2 rollbacks have not helped"):
        run(config)  # meets the same steps after each rollback
    rates = [r["learning_rate"] for r in records_of(tmp_path, "train")]
    output = capsys.readouterr().out
    assert "rolled back to step 6; learning rates are 0.5 of the recipe's" in output
    assert "rolled back to step 4; learning rates are 0.25 of the recipe's" in output  # the first did not help
    steps.clear()
    result = run(config)
    output = capsys.readouterr().out
    assert "resuming from step 6" in output and result["rollbacks"] == 2 and all_finite(tmp_path)
    assert [r["step"] for r in records_of(tmp_path, "train")] == list(range(1, 13))
    assert rates[4] < rates[3]


def test_target_accuracy_ends_a_run(tmp_path, capsys):
    config = replace(TINY, train_dir=str(tmp_path), target_accuracy=0.05, eval_every_epochs=0.2)

    class StopAtTheEnd(ShutdownHandler):
        def exit_immediately_from_now(self, message):
            if "evaluates it" in message:
                raise Interrupted(SIGTERM, message)

    with pytest.raises(Interrupted, match="step 2 is saved"):
        run(config, StopAtTheEnd())
    assert run(config)["step"] == 2  # the target stays reached
    assert capsys.readouterr().out.count("reached ") == 2
    scores = [(r["step"], r["weights"]) for r in records_of(tmp_path, "eval")]
    assert scores == [(2, "raw"), (2, "ema")]


@pytest.mark.parametrize("share", [1e-9, 1e9])
def test_figures_of_evaluations_are_limited_to_a_share_of_the_time(tmp_path, monkeypatch, share):
    monkeypatch.setattr(run_logger, "DRAWING_SHARE", share)
    run(TINY, train_dir=str(tmp_path), max_steps=8, eval_every_epochs=0.2, validation_examples=0)
    evaluated = events_of(tmp_path / "eval")
    steps = list(tensors_of(evaluated, "class_accuracy/test/chequered ring"))
    assert len(steps) == 4
    assert list(tensors_of(evaluated, "mistakes/test")) == (steps if share > 1 else [steps[0], steps[-1]])


def test_test_split_is_evaluated_only_at_the_end(tmp_path):
    run(TINY, train_dir=str(tmp_path), validation_examples=500, max_steps=8)
    scores = records_of(tmp_path, "eval")
    assert {r["split"] for r in scores if r["step"] < 8} == {"validation"}
    assert {r["split"] for r in scores if r["step"] == 8} == {"validation", "test"}


@pytest.mark.slow
def test_seeds_have_means_and_bands_that_a_resumed_run_continues(tmp_path, capsys, monkeypatch):
    """Of every scalar, beside the runs; the same whether or not the second seed was interrupted."""
    config = replace(TINY, train_dir=str(tmp_path / "whole"), max_steps=4, seeds="0,1,2", summary_every_steps=1)
    seeds.train_seeds(config, (0, 1, 2), sources.find("synthetic"), ShutdownHandler())
    results = [json.loads((tmp_path / f"whole/seed{seed}/result.json").read_text()) for seed in (0, 1, 2)]
    values = [100 * result["evaluations"][0]["accuracy"] for result in results]
    expected = f"mean {np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} % (n=3, 95 % interval "
    assert f"test accuracy, raw weights, TTA 0: {expected}" in capsys.readouterr().out

    def scalars(directory):
        return dict(entry for path in sorted(directory.glob("events*")) for entry in read_scalars(path))

    for part in ("train", "eval"):
        found = scalars(tmp_path / "whole/seeds" / part)
        runs = [scalars(tmp_path / f"whole/seed{seed}" / part) for seed in (0, 1, 2)]
        assert len(found) == 5 * len(set().union(*runs)) > 0
        for tag, step in set().union(*runs):
            values = [run[tag, step] for run in runs if (tag, step) in run]
            mean, std = np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0.0
            statistics = [found[prefix + tag, step] for prefix in ("", "std/", "mean-std/", "mean+std/", "n/")]
            np.testing.assert_allclose(statistics, [mean, std, mean - std, mean + std, len(values)], 1e-6, 1e-6)

    resumed = replace(config, train_dir=str(tmp_path / "resumed"))
    with pytest.raises(Interrupted):
        seeds.train_seeds(resumed, (0, 1, 2), sources.find("synthetic"), StopAtStep(6))
    assert ("loss", 1) in scalars(tmp_path / "resumed/seeds/train")
    seeds.train_seeds(resumed, (0, 1, 2), sources.find("synthetic"), ShutdownHandler())
    for part in ("train", "eval"):
        one, other = (scalars(tmp_path / name / "seeds" / part) for name in ("whole", "resumed"))
        timed = ("speed/", "memory/")
        assert one.keys() == other.keys()
        for (tag, step), value in one.items():
            if not any(name in tag for name in timed):
                assert value == other[tag, step], (tag, step)


def test_synthetic_fallback_prints_a_banner(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cifar10, "reachable", lambda url: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    config = replace(TINY, dataset="auto", data_dir=str(tmp_path / "none"), max_steps=1)
    trainer.train(config, sources.find("auto", config.data_dir), ShutdownHandler())
    assert capsys.readouterr().out.count("SYNTHETIC DATA, NOT CIFAR-10") == 2
    environment = json.loads((tmp_path / "runs/tiny-synthetic-seed0/environment.json").read_text())
    assert "SYNTHETIC" in environment["synthetic_data"]
