"""A run that is stopped continues to the same bits, or on other devices."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cifar_towers.checkpointing.checkpoint import find_checkpoint, read_checkpoint
from cifar_towers.errors import DataError, Interrupted
from cifar_towers.inference.compare import compare_runs
from tests.messages import lines_with
from tests.programs import call
from tests.runs.short_runs import QUICK, TINY, StopAtStep, events_of, records_of, run, stopped_after, tensors_of


def stop_and_resume(config, train_dir, at):
    """Stop a run at a step, resume it, and return its result."""
    with pytest.raises(Interrupted, match=f"step {at}\\b") as caught:
        run(config, train_dir, StopAtStep(at))
    assert caught.value.exit_code == 143
    return run(config, train_dir)


@pytest.mark.parametrize(
    ("config", "at", "fixture"),
    [(TINY, 13, "tiny_run"), *(pytest.param(QUICK, at, "one_run", marks=pytest.mark.slow) for at in (3, 13))],
    ids=["tiny", "whitening", "after whitening"],
)
def test_resumed_run_equals_uninterrupted_run(tmp_path, request, config, at, fixture):
    directory, result, _ = request.getfixturevalue(fixture)
    resumed = stop_and_resume(replace(config, num_gpus=2), tmp_path, at)
    assert resumed["weights_sha256"] == result["weights_sha256"]
    steps = [r["step"] for r in records_of(tmp_path, "train")]
    assert steps == sorted(set(steps))
    same, output = compare_runs(directory, tmp_path)
    assert same and lines_with(output, "losses", "same", "20")
    assert lines_with(output, "weights", "same", "step-20") and lines_with(output, "step 20", "same", "sha256")


class SimulatedKill(BaseException):
    """Nothing in a run handles it, as with `kill -9`."""


class KillAtStep(StopAtStep):
    @property
    def received(self):
        if super().received:
            raise SimulatedKill
        return 0


@pytest.mark.slow
def test_killed_run_resumes_without_duplicate_records(tmp_path):
    config = replace(TINY, num_gpus=2, checkpoint_every_steps=8)
    with pytest.raises(SimulatedKill):
        run(config, tmp_path, KillAtStep(13))
    assert list(tensors_of(events_of(tmp_path / "train"), "loss"))[-1] == 12  # the 13th is read with the next
    run(config, tmp_path)
    for part, tag, steps in (
        ("train", "loss", list(range(1, 21))),
        ("tower_1", "towers/loss", [5, 10, 15, 20]),
        ("eval", "accuracy/test/ema", [10, 20]),
    ):
        assert list(tensors_of(events_of(tmp_path / part), tag)) == steps
    assert [record["step"] for record in records_of(tmp_path, "train")] == list(range(1, 21))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"optimizer": "muon", "lookahead": True}, {"optimizer": "adamw"}])
def test_optimizer_slots_are_restored(tmp_path, settings):
    config = replace(QUICK, num_gpus=2, max_steps=6, learning_rate=0.01, **settings)
    resumed = stop_and_resume(config, tmp_path / "resumed", 3)
    assert resumed["weights_sha256"] == run(config, tmp_path / "uninterrupted")["weights_sha256"]


def test_max_steps_can_be_raised(tmp_path, tiny_run):
    """Look for the evaluation at the earlier end, too."""
    assert run(TINY, tmp_path, num_gpus=2, max_steps=7)["step"] == 7
    assert run(TINY, tmp_path, num_gpus=2)["weights_sha256"] == tiny_run[1]["weights_sha256"]
    assert {record["step"] for record in records_of(tmp_path, "eval")} == {7, 10, 20}


def test_hard_examples_with_resume_and_graph(tmp_path, capsys):
    config = replace(TINY, num_gpus=2, max_steps=4, batch_size=50, hard_example_pool=200, checkpoint_every_steps=2)
    whole = run(config, tmp_path / "whole")
    directories = [stopped_after(2, tmp_path / "whole", tmp_path / "resumed"), tmp_path / "whole"]
    assert run(config, directories[0])["weights_sha256"] == whole["weights_sha256"]
    assert lines_with(capsys.readouterr().out, "4 steps", "50", "hardest", "200", "10 ")
    one, other = (read_checkpoint(find_checkpoint(directory))[0] for directory in directories)
    for name in ("proxy.model.head.kernel", "proxy.optimizer.kernels.momentum.0", "proxy.step"):
        np.testing.assert_array_equal(one[name], other[name])
    shown = events_of(directories[0] / "train")
    assert {"proxy/loss", "proxy/accuracy"} <= set(shown.Tags()["tensors"])
    graph = shown.Graph()
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    drawn = ("proxy/tower_1/", "tower_1/", "hardest/")
    assert all(any(name.startswith(box) for name in names) for box in drawn)


def test_a_resumed_run_says_what_has_changed(tmp_path, capsys):
    """Change a file of the user's and the number of towers: neither belongs to the recipe."""
    file = tmp_path / "mine.py"
    text = "import tensorflow as tf\n\n\ndef loss(labels, logits):\n    return -tf.reduce_sum(labels * logits, 1)\n"
    config = replace(TINY, loss=f"{file}:loss", label_smoothing=0.0)
    for steps, towers, now, changes in (
        (1, 1, text, ()),
        (2, 1, text, ()),
        (3, 1, f"{text}# other", ("code of loss",)),
        (4, 2, f"{text}# other", ("towers 1 -> 2",)),
    ):
        file.write_text(now)
        run(config, tmp_path / "run", max_steps=steps, num_gpus=towers)
        output = capsys.readouterr().out
        line = next(iter(lines_with(output, "resuming from step")), "")
        assert bool(line) == (steps > 1) and ("changes what is computed" in line) == bool(changes)
        assert all(change in line for change in changes)


@pytest.mark.slow
def test_resume_under_other_strategies(tmp_path, one_run, capsys):
    """Train on four towers, then two mirrored replicas, then one tower: step, rate and accuracy continue."""
    config = replace(QUICK, summary_every_steps=1)
    starts = [{"num_gpus": 4}, {"num_gpus": 2, "strategy": "mirrored"}, {"num_gpus": 1}]
    results = [run(config, tmp_path, max_steps=end, **start) for end, start in zip((8, 14, 20), starts, strict=True)]
    assert lines_with(capsys.readouterr().out, "resuming", "step 8", "towers 4 -> 2")
    assert [result["step"] for result in results] == [8, 14, 20]
    train = records_of(tmp_path, "train")
    assert [r["step"] for r in train] == list(range(1, 21))
    uninterrupted = records_of(one_run[0], "train")
    assert [r["learning_rate"] for r in train] == [r["learning_rate"] for r in uninterrupted]
    before, after = results[0]["evaluations"][0]["accuracy"], results[1]["evaluations"][0]["accuracy"]
    assert after > before - 0.1 and results[2]["evaluations"][0]["accuracy"] > 0.6
    assert train[8]["loss"] < train[0]["loss"]  # the first step of the second strategy is not a first step


@pytest.mark.slow
def test_checkpoint_restores_the_same_weights_under_every_strategy(tmp_path):
    """Restore without a step in between: the weights are equal to the bit."""
    config = replace(QUICK, max_steps=3)
    saved = run(config, tmp_path, num_gpus=4, variable_placement="least_loaded")
    for settings in (
        {"num_gpus": 2, "strategy": "mirrored"},
        {"num_gpus": 2, "strategy": "stages"},
        {"num_gpus": 2, "variable_placement": "round_robin"},
    ):
        (tmp_path / "result.json").unlink()  # otherwise it is complete and nothing is read
        assert run(config, tmp_path, **settings)["weights_sha256"] == saved["weights_sha256"]


def test_compare_runs_prints_differences(saved_run, tiny_run, monkeypatch, capsys):
    changed, original = saved_run, tiny_run[0]
    metrics, result = changed / "metrics.jsonl", changed / "result.json"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    next(line for line in lines if line["kind"] == "train" and line["step"] == 7)["loss"] += 1e-6
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result.write_text(json.dumps(json.loads(result.read_text()) | {"weights_sha256": "0" * 64}))
    assert call(monkeypatch, "compare-runs", original, changed) == 1  # the exit code
    output = capsys.readouterr().out
    assert lines_with(output, "losses", "step 7", "step 6")
    assert lines_with(output, "weights", "same", "step-9") and "0" * 16 in output
    environment = json.loads((changed / "environment.json").read_text())
    (changed / "environment.json").write_text(json.dumps(environment | {"class_names": environment["class_names"][1:]}))
    assert lines_with(compare_runs(original, changed)[1], "class_names", "a list of 10", "a list of 9")
    result.write_text("[1, 2]")
    with pytest.raises(DataError, match="result.json cannot be read"):
        compare_runs(original, changed)
    result.unlink()
    assert lines_with(compare_runs(original, changed)[1], original, "step 20", changed)
    metrics.unlink()
    for path in changed.glob("step-*"):
        path.unlink()
    same, output = compare_runs(original, changed)
    assert not same and lines_with(output, "no step in common")


@pytest.mark.slow
def test_compare_runs_of_two_seeds(tmp_path, tiny_run):
    run(TINY, tmp_path, num_gpus=2, seed=1, checkpoint_every_steps=9, max_steps=9, tta=1)
    same, output = compare_runs(tiny_run[0], tmp_path)
    assert not same and lines_with(output, "max_steps 0 -> 9", "seed 0 -> 1", "tta 0 -> 1")
    assert lines_with(output, "losses", "step 1") and lines_with(output, "weights", "step-9")
