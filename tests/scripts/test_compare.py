"""The comparison of two runs or revisions: what is found in runs, the exit codes, the flags."""

from pathlib import Path

import numpy as np
import pytest

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import parse_command_line
from cifar_towers.runs.checkpoint import checkpoint_path, write_checkpoint
from scripts import compare as program
from tests.helpers.example_runs import change, make_run, read_records, write_records
from tests.helpers.messages import lines_with

EVALUATION = {
    "kind": "eval",
    "split": "test",
    "weights": "raw",
    "tta": False,
    "loss": 2.0,
    "accuracy": 0.5,
}


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(changes): whether a run of 11 steps and one with changes are the same, and what is
    printed.
    """

    def write(name, records=(), biases=(1.0, 0.5, 0.0), sha256="f00d", last_step=11, **variables):
        train_dir = make_run(tmp_path / name, last_step=last_step)
        for step, bias in enumerate(biases, start=1):
            values = {"kernel": np.ones((2, 3), "f4"), "bias": np.full(3, bias, "f4"), **variables}
            write_checkpoint(checkpoint_path(train_dir, step), values, {"step": step})

        losses = {("train", 3): float("nan"), **dict(records)}
        changed = []
        for record in read_records(train_dir):
            loss = losses.get((record["kind"], record["step"]), record["loss"])
            changed.append(record | {"loss": loss})
        write_records(train_dir, changed)

        change(train_dir, "result.json", weights_sha256=sha256)
        return train_dir

    def compare(changes):
        monkeypatch.setattr(program, "find_or_train", lambda name, worktree, *_: worktree)
        scale = {"scale": np.zeros(2, "f4")}
        one = write("one", **scale)
        other = write("other", **scale | changes)
        same = program.compare_small_run("run", one, other, tmp_path, tmp_path)
        return same, capsys.readouterr().out

    return compare


def test_equal_runs_are_the_same_nan_included(compare):
    same, text = compare({})
    assert same
    assert len(lines_with(text, ": same")) == len(text.splitlines()) == 6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"records": {("train", 2): 1.2000002}}, ["losses", "step 2", "1.2 and 1.2000002"]),
        # no texts
        ({"records": {("train", 9): 2.0, ("train", 11): 2.0}}, ["losses", "step 9", "step 8"]),
        ({"biases": (1.0, 0.5, -0.0)}, ["weights", "step-3.npz", "1 of 3", "bias"]),
        ({"last_step": 10}, ["only in one", "eval 10 test_tta", "eval 11 test"]),
        ({"records": {("eval", 11): 2.5}}, ["evaluations", "step 11", "test", "and 2.5"]),
        ({"moving_mean": np.zeros(())}, ["weights", "step-1.npz", "moving_mean"]),
        ({"scale": np.array([0, 0])}, ["weights", "step-1.npz", "scale"]),
        ({"scale": np.zeros((1, 2), "f4")}, ["weights", "step-1.npz", "scale"]),
        ({"sha256": "beef"}, ["weights", "f00d", "beef"]),
    ],
)
def test_first_step_that_differs_is_named_with_its_value(compare, changes, named):
    same, text = compare(changes)
    different = [line for line in text.splitlines()[1:] if ": same" not in line]
    different = [line for line in different if "common part" not in line]
    assert not same
    assert lines_with("\n".join(different), *named) == different


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"kind": "start", "step": 0}, "no records"),
        (EVALUATION | {"step": 1}, "no weights"),
        ({"kind": "train", "step": 1, "learning_rate": 0.1}, "accuracy, gradient_norm, loss"),
    ],
)
def test_run_without_its_values_is_an_error(tmp_path, record, named):
    write_records(tmp_path, [record])
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(RuntimeError, match=named):
        program.list_contents(tmp_path)


def test_every_flag_of_the_runs_is_one_of_train():
    for flags in program.RUNS.values():
        parse_command_line(TrainConfig, [*program.COMMON.split(), *flags.split()])


# The program --------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Make two equal runs without checkpoints, `one` and `other`, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "one"), make_run(tmp_path / "other")


def test_two_directories_are_compared_as_runs(runs, capsys):
    assert program.main(["one", "other"]) == 0
    assert len(lines_with(capsys.readouterr().out, "same")) == 4

    _, other = runs
    change(other, "config.json", seed=1)
    change(other, "environment.json", class_names=["cat"])
    change(other, "result.json", weights_sha256=64 * "f")

    assert program.main(["one", "other"]) == 1

    output = capsys.readouterr().out
    assert lines_with(output, "settings", "seed 0 -> 1")
    assert lines_with(output, "environments", "class_names", "['cat']")
    assert lines_with(output, "weights after step 8", 16 * "0", 16 * "f")


def test_runs_without_a_common_step_are_not_the_same(runs, capsys):
    _, other = runs
    for name in ("metrics.jsonl", "result.json"):
        (other / name).unlink()
    assert program.main(["one", "other"]) == 1
    assert lines_with(capsys.readouterr().out, "no step in common")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "named"),
    [
        (["one", "nowhere"], 2, "nowhere"),
        (["nowhere", "one"], 2, "'nowhere' is no directory and no revision"),
        (["one", "damaged"], 3, "damaged/result.json"),
    ],
)
def test_what_cannot_be_compared_is_named(runs, capsys, arguments, exit_code, named):
    damaged = make_run(Path("damaged"))
    (damaged / "result.json").write_text("{")
    assert program.main(arguments) == exit_code
    assert lines_with(capsys.readouterr().err, named)


def test_runs_that_do_not_exist_are_refused(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        program.main(["HEAD", "--runs=resume,nowhere"])
    assert "'nowhere'" in capsys.readouterr().err


def test_head_is_not_compared_in_place_of_changed_files(monkeypatch, capsys):
    monkeypatch.setattr(program, "git", lambda *arguments: " M cifar_towers/trainer.py")
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main(["HEAD~1"]) == 2
    assert "does not have the changes in cifar_towers/trainer.py" in capsys.readouterr().err


def test_two_revisions_are_trained_and_compared(monkeypatch, tmp_path, capsys):
    """Each commit is checked out, and its worktree removed."""
    trained = []

    def train(name, worktree, keep, images):
        assert (worktree / "scripts/train.py").exists()
        assert (images / "train").is_dir()
        trained.append((worktree, keep))
        return make_run(keep / worktree.name / name)

    monkeypatch.setattr(program, "find_or_train", train)
    git = program.git
    clean = lambda *given: "" if given[0] == "status" else git(*given)  # noqa: E731
    monkeypatch.setattr(program, "git", clean)
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)

    assert program.main(["HEAD", "HEAD", "--runs=resume", f"--keep={tmp_path}"]) == 0
    assert "resume: same" in capsys.readouterr().out

    (worktree, keep), (_, keep_again) = trained
    assert keep == tmp_path != keep_again  # HEAD is compared with itself, so it is trained twice
    assert not worktree.exists()
    assert str(worktree) not in program.git("worktree", "list")
