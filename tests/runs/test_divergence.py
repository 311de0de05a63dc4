"""Steps that are not finite: skipped, located, rolled back, and never saved."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers import trainer
from cifar_towers.checkpointing.checkpoint import list_checkpoints, read_variables
from cifar_towers.data.batches import Batches
from cifar_towers.errors import DivergedError, Interrupted
from cifar_towers.reporting import run_logger
from cifar_towers.training import health
from tests.messages import lines_with
from tests.runs.short_runs import TINY, StopAtStep, records_of, run


@pytest.fixture
def inject_nan(monkeypatch):
    """Return inject_nan(steps), which makes an image of these steps NaN in all later runs."""

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


@pytest.mark.parametrize("precision", ["float32", "float64", "float16", "bfloat16"])
def test_float32_is_advised_to_runs_in_16_bits_only(precision):
    checkpoints = SimpleNamespace(describe_latest=lambda: "step 4 is saved")
    stopped = SimpleNamespace(config=TINY, precision=precision, checkpoints=checkpoints)
    with pytest.raises(DivergedError, match="--overwrite with a smaller --learning_rate") as caught:
        trainer.Run.roll_back(stopped, DivergedError("too many"))
    assert ("--precision=float32" in str(caught.value)) == ("16" in precision)


def diverged(restored):
    """Return what `Run.roll_back` uses of a run, whose checkpoint manager restores this metadata."""
    return SimpleNamespace(
        config=replace(TINY, rollback_on_divergence=True), precision="float32", timer=Mock(), log=Mock(),
        step_runner=Mock(), logger=Mock(), checkpoints=Mock(roll_back=Mock(return_value=restored)),
        health=health.Health(3, None, (), None, print, skipped_steps=3, last_good_step=5),
    )  # fmt: skip


def test_time_of_a_rollback_counts_as_saving():
    """Otherwise it would count as waiting for the input of the next step."""
    state = diverged({"step": 4, "evaluations": []})
    assert trainer.Run.roll_back(state, DivergedError("too many")) == 4
    state.checkpoints.roll_back.assert_called_once_with(5, skipped_steps=3, rollbacks=1)
    assert state.timer.mock_calls[-1] == call.end_phase("save")


def test_rollback_without_a_checkpoint_says_how_to_start_again():
    message = "^too many; there is no checkpoint to go back to: start again with --overwrite and a smaller --learning"
    with pytest.raises(DivergedError, match=message):
        trainer.Run.roll_back(diverged(None), DivergedError("too many"))


def all_finite(train_dir):
    checkpoints = [read_variables(checkpoint) for checkpoint in list_checkpoints(train_dir)]
    assert all(np.isfinite(value).all() for values in checkpoints for value in values.values())
    return bool(checkpoints)


def test_nonfinite_batch_skips_only_its_update(tmp_path, inject_nan, capsys):
    inject_nan({2, 3, 6})
    result = run(WITH_BRIGHTNESS, tmp_path, max_steps=6, checkpoint_every_steps=1, summary_every_steps=1)
    assert result["step"] == 6 and result["skipped_steps"] == 3 and all_finite(tmp_path)
    previous, skipped = (read_variables(checkpoint) for checkpoint in list_checkpoints(tmp_path)[-2:])
    assert (previous.pop("step"), skipped.pop("step")) == (5, 6) and any(name.startswith("ema") for name in previous)
    for name, value in previous.items():
        np.testing.assert_array_equal(skipped[name], value, err_msg=name)
    output = capsys.readouterr().out
    assert lines_with(output, "step 3", "2 in a row", "3 ", "cross_entropy of tower_1", "images")
    assert lines_with(output, "3 skipped steps")
    lost = [r["step"] for r in records_of(tmp_path, "train") if r["loss"] is None]
    assert lost == [2, 3, 6]


@pytest.mark.parametrize(
    ("settings", "origin"),
    [
        ({"strategy": "mirrored"}, " of tower_1"),
        ({"micro_batches": 2, "data_on": "device"}, " of tower_1"),
        ({"parallelism": "model", "micro_batches": 4, "model": "cifarnet"}, " of tower_0"),
        pytest.param(
            {"batch_size": 50, "hard_example_pool": 200}, "proxy: cross_entropy of tower_1", marks=pytest.mark.slow
        ),
    ],
)
def test_nonfinite_batch_is_located(tmp_path, inject_nan, monkeypatch, capsys, settings, origin):
    """Select other examples than the one with the NaN where hard ones are selected, so that only the proxy sees it."""
    monkeypatch.setattr(tf.math, "top_k", lambda losses, count, sorted: SimpleNamespace(indices=tf.range(count)))
    inject_nan({2})
    result = run(WITH_BRIGHTNESS, tmp_path, max_steps=3, **settings)
    assert result["skipped_steps"] == 1 and all_finite(tmp_path)
    assert lines_with(capsys.readouterr().out, "step 2", "1 in a row", "3 ", origin, "not finite", "images")


@pytest.mark.parametrize(("steps", "located"), [({2}, 0), ({2, 3}, 1)])
def test_steps_that_are_read_late_as_on_gpus(tmp_path, inject_nan, monkeypatch, capsys, steps, located):
    """A tensor of step 2 is looked for only if step 3, which has been applied by then, left the weights alone."""
    monkeypatch.setattr(trainer, "on_gpus", lambda towers: True)
    inject_nan(set(steps))
    result = run(WITH_BRIGHTNESS, tmp_path, max_steps=5, checkpoint_every_steps=100)
    output = capsys.readouterr().out
    assert result["skipped_steps"] == len(steps) and len(lines_with(output, "in a row", "not finite")) == len(steps)
    assert len(lines_with(output, "step 2", "not finite", "images")) == located


@pytest.mark.slow
def test_too_many_nonfinite_steps_end_a_run_that_can_be_resumed(tmp_path, inject_nan):
    inject_nan({4, 5, 6})
    config = replace(WITH_BRIGHTNESS, checkpoint_every_steps=3)
    with pytest.raises(Interrupted, match="step 5"):
        run(config, tmp_path, StopAtStep(5))
    with pytest.raises(DivergedError, match=r"step 6 .*3 in a row.*step-00000005 .*--rollback_on_divergence"):
        run(config, tmp_path)
    assert all_finite(tmp_path)
    assert run(config, tmp_path, max_nonfinite_steps=4)["skipped_steps"] == 3


def test_diverged_run_saves_no_nonfinite_values(tmp_path):
    with pytest.raises(DivergedError, match="3 in a row.*--overwrite.* --learning_rate"):
        run(TINY, tmp_path, learning_rate=1e38, checkpoint_every_steps=1)
    assert all_finite(tmp_path)


@pytest.mark.slow
def test_rollback_halves_the_learning_rates(tmp_path, inject_nan, monkeypatch, capsys):
    monkeypatch.setattr(health, "MAX_ROLLBACKS", 2)
    monkeypatch.setattr(run_logger, "TIMES_SECONDS", 0)
    steps = {7, 8}
    inject_nan(steps)
    settings = {"max_nonfinite_steps": 2, "rollback_on_divergence": True, "max_steps": 12, "checkpoint_every_steps": 2}
    config = replace(WITH_BRIGHTNESS, summary_every_steps=1, **settings)
    with pytest.raises(DivergedError, match="step 8 .* 2 rollbacks"):
        run(config, tmp_path)  # meets the same steps after each rollback
    rates = [r["learning_rate"] for r in records_of(tmp_path, "train")]
    output = capsys.readouterr().out
    assert lines_with(output, "rolled back", "step 6", " 0.5 ")
    assert lines_with(output, "rolled back", "step 4", " 0.25 ")  # the first did not help
    steps.clear()
    result = run(config, tmp_path)
    output = capsys.readouterr().out
    assert lines_with(output, "resuming", "step 6") and result["rollbacks"] == 2 and all_finite(tmp_path)
    assert result["lost_steps"] == (8 - 6) + (8 - 4) + (8 - 6)  # the last ones by the error
    assert [r["step"] for r in records_of(tmp_path, "train")] == list(range(1, 13))
    assert rates[4] < rates[3]
