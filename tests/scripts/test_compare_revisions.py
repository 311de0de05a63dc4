"""The comparison of two revisions: what is found in their runs, and its flags."""

import json
from subprocess import CalledProcessError
from unittest.mock import Mock

import numpy as np
import pytest

from cifar_towers.checkpointing.checkpoint import checkpoint_path, write_checkpoint
from cifar_towers.cli.main import parse_command_line
from cifar_towers.config import TrainConfig
from scripts import compare_revisions

EVALUATION = {"kind": "eval", "split": "test", "weights": "raw", "tta": 0, "loss": 2.0, "accuracy": 0.5}


@pytest.fixture
def write_run(tmp_path):
    """write_run(name, losses, biases): a run's directory with these values at steps 1, 2, .."""

    def write(name, losses=(2.5, 2.25, float("nan")), biases=(1.0, 0.5, 0.0), sha256="f00d", score=2.0, **variables):
        train_dir = tmp_path / name
        for step, bias in enumerate(biases, start=1):
            values = {"kernel": np.ones((2, 3), "f4"), "bias": np.full(3, bias, "f4"), **variables}
            train_dir.mkdir(exist_ok=True)
            write_checkpoint(checkpoint_path(train_dir, step), values, {"step": step})
        records = [
            {"kind": "train", "step": step, "loss": loss, "accuracy": 0.1, "gradient_norm": 1.0, "learning_rate": 0.1}
            for step, loss in enumerate(losses, start=1)
        ]
        records.append(EVALUATION | {"step": len(losses), "loss": score})
        (train_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        result = {"step": len(losses), "weights_sha256": sha256, "seconds": {"compile": 1, "steps": 2}}
        (train_dir / "result.json").write_text(json.dumps(result))
        (train_dir / "config.json").write_text("{}")
        return train_dir

    return write


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(first, second): whether two runs' directories are the same, and the lines that say so."""

    def compare(first, second):
        monkeypatch.setattr(compare_revisions, "find_or_train", lambda name, worktree, *_: worktree)
        return compare_revisions.compare_run("run", first, second, tmp_path), capsys.readouterr().out.splitlines()

    return compare


def test_equal_runs_are_the_same_nan_included(write_run, compare):
    first, second = write_run("first"), write_run("second")
    assert compare(first, second) == (
        True,
        [
            "run: same, 3 s and 3 s",
            "  settings and environments: same",
            "  losses: same at all 3 common steps, the last 3",
            "  evaluations: same at all 1 common steps, the last 3",
            "  weights: same at step-1.npz, step-2.npz, step-3.npz",
            "  weights after step 3: same, sha256 f00d",
        ],
    )
    records = {"train 1", "train 2", "train 3", "eval 3 test/raw"}
    assert compare_revisions.list_contents(first) == records


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"losses": (2.5, 2.2500002, 1.0), "biases": (1.0, 0.5, -0.0)},
            {
                "losses: from step 2: loss 2.25 and 2.2500002 (same until step 1)",
                "weights: from step-3.npz: 1 of 3 variables; largest relative differences: bias (0.0e+00)",
            },
        ),
        (
            {"losses": (2.5, 2.25), "biases": (1.0, 0.5)},
            {"only in one of them: eval 2 test/raw, eval 3 test/raw"},
        ),
        ({"losses": (2.5, 2.25)}, {"only in one of them: eval 2 test/raw, eval 3 test"}),
        ({"score": 2.5}, {"evaluations: from step 3, test/raw: loss 2.0 and 2.5"}),
        (
            {"moving_mean": np.zeros(())},
            {"weights: from step-1.npz: other variables, among them moving_mean"},
        ),
        (
            {"scale": np.array([0, 0])},
            {"weights: from step-1.npz: other variables, among them scale"},
        ),
        (
            {"scale": np.zeros((1, 2), "f4")},
            {"weights: from step-1.npz: other variables, among them scale"},
        ),
        ({"sha256": "beef"}, {"weights after step 3: sha256 f00d and beef"}),
    ],
)
def test_first_step_that_differs_is_named_with_its_value(write_run, compare, changes, found):
    scale = {"scale": np.zeros(2, "f4")}
    same, lines = compare(write_run("first", **scale), write_run("second", **scale | changes))
    assert not same and lines[0] == "run: different, 3 s and 3 s"
    same_lines = [line for line in lines[1:] if ": same" in line or "only the common part" in line]
    differing = [line.strip() for line in lines[1:] if line not in same_lines]
    assert len(differing) == len(found) and all(any(line.startswith(each) for line in differing) for each in found)


def test_steps_are_ordered_as_numbers(write_run, compare):
    losses = [1.0] * 11
    other = [*losses[:8], 2.0, 1.0, 2.0]
    _, lines = compare(write_run("first", losses), write_run("second", other))
    assert "  losses: from step 9: loss 1.0 and 2.0 (same until step 8)" in lines


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "start", "step": 0}, "no records"),
        (EVALUATION | {"step": 1}, "no weights"),
        ({"kind": "train", "step": 1, "learning_rate": 0.1}, "a train record .* has no accuracy, gradient_norm, loss"),
    ],
)
def test_run_without_its_values_is_an_error(tmp_path, record, message):
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(record)}\n")
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(RuntimeError, match=message):
        compare_revisions.list_contents(tmp_path)


def test_a_missing_git_and_a_failed_checkout_are_one_line(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(compare_revisions.subprocess, "run", Mock(side_effect=FileNotFoundError(2, "No such file")))
        with pytest.raises(SystemExit) as missing:
            compare_revisions.parse_arguments(["main"])
    error = capsys.readouterr().err
    assert missing.value.code == 2 and "git cannot be started: No such file; install it" in error
    assert error.count("\n") == 1
    failed = CalledProcessError(128, "git", stderr="Preparing worktree\nfatal: No space left on device\n")
    monkeypatch.setattr(compare_revisions, "git", Mock(side_effect=failed))
    message = "^compare_revisions.py: abc cannot be checked out: fatal: No space left"
    with pytest.raises(SystemExit, match=message), compare_revisions.check_out(tmp_path / "abc"):
        pass


def test_every_flag_of_the_runs_is_one_of_train():
    for flags in compare_revisions.RUNS.values():
        parse_command_line(TrainConfig, [*compare_revisions.COMMON.split(), *flags.split()])
