"""The comparison of two revisions: the first difference, and its flags."""

import json

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.config import TrainConfig
from scripts import compare_revisions


@pytest.fixture
def write_run(tmp_path):
    """write_run(name, losses, biases): the run that a directory with these values at steps 1, 2, .. holds."""

    def write(name, losses=(2.5, 2.25, float("nan")), biases=(1.0, 0.5, 0.0), weights_sha256="f00d", **variables):
        train_dir = tmp_path / name
        for step, bias in enumerate(biases, start=1):
            kernel = tf.Variable(tf.ones((2, 3)))
            values = {"kernel": kernel, "bias": tf.Variable(np.full(3, bias, "f4")), **variables}
            tf.train.Checkpoint(**values).write(str(train_dir / f"checkpoints/step-{step:08d}/state"))
        records = [
            {"kind": "train", "step": step, "loss": loss, "gradient_norm": 1.0, "learning_rate": 0.1}
            for step, loss in enumerate(losses, start=1)
        ]
        records.append({"kind": "eval", "step": len(losses), "loss": 2.0, "accuracy": 0.5})
        (train_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        (train_dir / "result.json").write_text(json.dumps({"weights_sha256": weights_sha256}))
        return compare_revisions.read_run(train_dir)

    return write


def differences(first, second):
    return tuple(compare_revisions.first_difference(first[kind], second[kind]) for kind in ("losses", "weights"))


def test_equal_runs_are_the_same_nan_included(write_run):
    first, second = write_run("first"), write_run("second")
    assert differences(first, second) == ("", "")
    assert differences(first, json.loads(json.dumps(second))) == ("", "")  # as results are stored
    assert sorted(first["losses"]) == sorted(first["weights"]) == ["1", "2", "3"]
    assert set(first["weights"]["1"]) == {"kernel", "bias"}
    assert first["losses"]["2"] == {"loss": 2.25, "gradient_norm": 1.0, "learning_rate": 0.1}
    assert first["losses"]["3"]["evaluation 3"] == [2.0, 0.5]


@pytest.mark.parametrize(
    ("changes", "losses", "weights"),
    [
        (
            {"losses": (2.5, 2.2500002, 1.0), "biases": (1.0, 0.5, -0.0)},
            "from step 2: loss",
            "from step 3: bias",
        ),
        (
            {"losses": (2.5, 2.25), "biases": (1.0, 0.5)},
            "from step 2: evaluation 3 only at second",
            "from step 2: weights_sha256 only at second",
        ),
        ({"moving_mean": tf.Variable(0.0)}, "", "from step 1: moving_mean only at second"),
        ({"scale": tf.Variable([0, 0])}, "", "from step 1: scale"),
        ({"scale": tf.Variable([[0.0, 0.0]])}, "", "from step 1: scale"),
        ({"scale": tf.Variable([0.0, 0.0]), "weights_sha256": "beef"}, "", "from step 3: weights_sha256"),
    ],
)
def test_first_step_that_differs_is_named_with_its_value(write_run, changes, losses, weights):
    same = {"scale": tf.Variable([0.0, 0.0])} if "scale" in changes else {}
    assert differences(write_run("first", **same), write_run("second", **changes)) == (losses, weights)


def test_steps_are_ordered_as_numbers():
    steps = {str(step): {"loss": 1.0} for step in range(1, 12)}
    other = steps | {"9": {"loss": 2}, "11": {"loss": 2}}
    assert compare_revisions.first_difference(steps, other) == "from step 9: loss"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "start", "step": 0}, "no checkpoints"),
        ({"kind": "train", "step": 1, "learning_rate": 0.1}, "a train record of .* has no gradient_norm, loss"),
    ],
)
def test_run_without_its_values_is_an_error(tmp_path, record, message):
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(record)}\n")
    with pytest.raises(RuntimeError, match=message):
        compare_revisions.read_run(tmp_path)


def test_every_flag_of_the_runs_is_one_of_train():
    for flags in compare_revisions.RUNS.values():
        parse_command_line(TrainConfig, ["train.py", *compare_revisions.COMMON.split(), *flags.split()], "")
