"""A run that ended early goes on to the same bits: at any step, for any reason, with any state, on
other devices.
"""

from dataclasses import replace

import numpy as np
import pytest

from cifar_towers import load_run
from cifar_towers.errors import Interrupted
from cifar_towers.runs.checkpoint import find_checkpoint, read_checkpoint, step_of, write_checkpoint
from scripts.compare import compare_runs
from tests.helpers.messages import lines_with
from tests.helpers.short_runs import (
    QUICK,
    TINY,
    StopAtStep,
    events_of,
    records_of,
    run,
    stopped_after,
    tensors_of,
)

TWO_TOWERS = replace(TINY, num_gpus=2)


class SimulatedKill(BaseException):
    """Nothing in a run handles it, as with `kill -9`."""


class KillAtStep(StopAtStep):
    @property
    def received(self):
        if super().received:
            raise SimulatedKill
        return 0


def by_signal(directory):
    """Stop a run, as all of these functions do, and return the step to go on from."""
    with pytest.raises(Interrupted, match="step 13\\b") as caught:
        run(TWO_TOWERS, directory, StopAtStep(13))
    assert caught.value.exit_code == 143
    return 13


def by_kill(directory, checkpoint_every_steps=8):
    with pytest.raises(SimulatedKill):
        run(TWO_TOWERS, directory, KillAtStep(13), checkpoint_every_steps=checkpoint_every_steps)
    # records after the checkpoint
    assert list(tensors_of(events_of(directory / "train"), "loss"))[-1] > 8
    return 8


def by_callback(directory):
    def fail(step, metrics):
        if step == 13:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        run(TWO_TOWERS, directory, callbacks=[fail])
    return max(13, step_of(find_checkpoint(directory)))


def by_max_steps(directory):
    """End, and then go on without a result until the next end."""
    assert run(TWO_TOWERS, directory, max_steps=7)["step"] == 7
    with pytest.raises(Interrupted):
        run(TWO_TOWERS, directory, StopAtStep(1))
    assert not (directory / "result.json").exists()
    return 8


def by_max_steps_at_an_evaluation(directory):
    assert run(TWO_TOWERS, directory, max_steps=10)["step"] == 10
    with pytest.raises(Interrupted):
        run(TWO_TOWERS, directory, StopAtStep(1))
    return 11


def by_damage(directory):
    """Kill it, and damage the newest checkpoint."""
    by_kill(directory, checkpoint_every_steps=4)
    damaged = directory / "step-12.npz"
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    return 8


@pytest.mark.parametrize(
    "stop",
    [
        by_signal,
        by_damage,
        pytest.param(by_kill, marks=pytest.mark.slow),
        pytest.param(by_callback, marks=pytest.mark.slow),
        pytest.param(by_max_steps, marks=pytest.mark.slow),
        pytest.param(by_max_steps_at_an_evaluation, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_ends_with_the_same_bits_and_each_record_once(
    tmp_path, tiny_run, capsys, stop
):
    saved = stop(tmp_path)
    capsys.readouterr()
    run(TWO_TOWERS, tmp_path)
    output = capsys.readouterr().out
    (line,) = lines_with(output, "resuming", f"step {saved}")

    assert "->" not in line  # nothing has changed
    steps_left_in_epoch = 10 - saved % 10
    assert lines_with(output, f"mean of the {steps_left_in_epoch} step")

    same, differences = compare_runs(tiny_run.directory, tmp_path)
    assert same, differences
    assert [record["step"] for record in records_of(tmp_path, "train")] == list(range(1, 21))

    evaluated = [record["step"] for record in records_of(tmp_path, "eval")]
    assert evaluated[-2:] == [10, 20]
    assert len(evaluated) == len(set(evaluated))
    assert list(tensors_of(events_of(tmp_path / "train"), "loss")) == list(range(1, 21))

    of_towers = tensors_of(events_of(tmp_path / "train"), "tower_1/loss")

    # 7: the last step of the first part
    assert [step for step in of_towers if step != 7] == [5, 10, 15, 20]


def test_seconds_of_earlier_starts_count(tmp_path):
    run(TINY, tmp_path, max_steps=1)
    checkpoint = find_checkpoint(tmp_path)
    values, metadata = read_checkpoint(checkpoint)
    metadata["seconds"]["start"] = 1000.0
    write_checkpoint(checkpoint, values, metadata)

    result = run(TINY, tmp_path, max_steps=2)
    assert 1000 < result["seconds"]["start"] < 1100


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon", "lookahead": True},
        {"jit_compile": True, "num_gpus": 1},
        {"micro_batches": 2},
        pytest.param(
            {"optimizer": "adamw", "variable_placement": "round_robin"}, marks=pytest.mark.slow
        ),
        {"strategy": "mirrored", "batch_statistics": "synchronized"},
        {"precision": "bfloat16"},
        {"precision": "bfloat16", "num_gpus": 1, "optimizer": "muon", "lookahead": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_every_kind_of_state_is_restored(tmp_path, capsys, settings):
    """Compare all variables of the last checkpoint: also slots and averages."""
    config = replace(
        TWO_TOWERS, max_steps=6, checkpoint_every_steps=3, learning_rate=0.01, **settings
    )
    run(config, tmp_path / "whole")
    run(config, stopped_after(3, tmp_path / "whole", tmp_path / "resumed"))

    assert lines_with(capsys.readouterr().out, "resuming", "step 3")

    same, differences = compare_runs(tmp_path / "whole", tmp_path / "resumed")
    assert same, differences
    assert "step-6.npz" in differences, differences


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_bfloat16_is_for_the_computation_alone(tmp_path, num_gpus):
    """Weights, slots and averages are kept in float32, and trained to about what float32 gives."""
    config = replace(TINY, num_gpus=num_gpus, lookahead=True, max_steps=10, learning_rate=0.2)
    losses = {}
    for precision in ("float32", "bfloat16"):
        directory = tmp_path / precision
        run(config, directory, precision=precision)
        losses[precision] = np.array([record["loss"] for record in records_of(directory, "train")])
        values, metadata = read_checkpoint(find_checkpoint(directory))
        owners = {name.partition(".")[0] for name in values}
        assert owners == {"step", "model", "ema", "lookahead", "optimizer"}
        dtypes = {value.dtype.name for value in values.values() if value.dtype.kind not in "iu"}
        assert dtypes == {"float32"}
        assert metadata["facts"]["precision"] == precision

    assert losses["bfloat16"][-1] < 0.98 * losses["bfloat16"][0]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)
    assert not np.array_equal(losses["bfloat16"], losses["float32"])


@pytest.mark.slow
def test_a_speednet_goes_on_through_its_image_sizes(tmp_path, speednet_run):
    """After step 10 the images are larger."""
    directory = stopped_after(9, speednet_run[0], tmp_path / "resumed")
    run(replace(QUICK, num_gpus=2, tta=True), directory)
    same, differences = compare_runs(speednet_run[0], tmp_path / "resumed")
    assert same, differences


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpus": 4, "variable_placement": "round_robin"},
        {"num_gpus": 2, "strategy": "mirrored"},
        pytest.param({"num_gpus": 1}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_the_same_weights_are_restored_on_other_devices(tmp_path, tiny_run, settings):
    """It goes on from its last step, so that nothing but the restoring decides."""
    directory = stopped_after(20, tiny_run.directory, tmp_path / "moved")
    assert run(TINY, directory, **settings)["weights_sha256"] == tiny_run.result["weights_sha256"]


@pytest.mark.slow
def test_a_run_goes_on_under_other_strategies(tmp_path, tiny_run, capsys):
    """Train on four towers, then two mirrored replicas, then one tower: step, rate and loss
    continue.
    """
    starts = {8: {"num_gpus": 4}, 14: {"num_gpus": 2, "strategy": "mirrored"}, 20: {"num_gpus": 1}}
    for end, start in starts.items():
        assert run(TINY, tmp_path, max_steps=end, **start)["step"] == end

    assert lines_with(capsys.readouterr().out, "step 8", "towers 4 -> 2")
    assert load_run(tmp_path).environment["lineage"] == [
        "from step 8: towers 4 -> 2, strategy towers -> mirrored",
        "from step 14: towers 2 -> 1, strategy mirrored -> towers",
    ]

    ours = records_of(tmp_path, "train")
    uninterrupted = records_of(tiny_run.directory, "train")
    for name in ("step", "learning_rate"):
        assert [record[name] for record in ours] == [record[name] for record in uninterrupted]

    assert ours[-1]["loss"] == pytest.approx(uninterrupted[-1]["loss"], rel=0.05)
    assert ours[8]["loss"] < ours[0]["loss"]


def test_a_resumed_run_uses_and_names_what_has_changed(tmp_path, capsys, monkeypatch):
    """The file of the user's loss and the number of towers do not belong to the recipe."""
    file = tmp_path / "mine.py"
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    code = "import tensorflow as tf\n\n\ndef loss(labels, logits):\n"
    code += "    return {} - tf.reduce_sum(labels * logits, 1)\n"
    config = replace(TINY, loss=f"{file}:loss", label_smoothing=0.0)
    for count, offset in ((1, 0), (2, 100)):
        file.write_text(code.format(offset))
        run(config, tmp_path / "run", max_steps=count, num_gpus=count)
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    changed = "towers 1 -> 2", "oneDNN 1 -> 0", "code of loss "

    assert lines_with(capsys.readouterr().out, "resuming from step 1", *changed)

    # a group of repetitions differs from it, but not by the machine's settings
    (change,) = load_run(tmp_path / "run").environment["lineage"]

    assert change.startswith("from step 1: towers 1 -> 2, code of loss ")
    assert "oneDNN" not in change

    records = records_of(tmp_path / "run", "train")
    rows = [(record["loss"] > 50, record["images_per_sec"]) for record in records]

    # a rate is unknown, as each was the first step of a start
    assert rows == [(False, None), (True, None)]

    events = events_of(tmp_path / "run/train")  # the user's function is called `loss`
    tags = events.Tags()["tensors"]

    assert "losses/loss" in tags
    assert "losses/cross_entropy" not in tags
