"""Steps that are not finite: skipped, named, and never saved."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.checkpointing.checkpoint import list_checkpoints, read_checkpoint
from cifar_towers.data.batches import Batches
from cifar_towers.errors import DivergedError, Interrupted
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


def all_finite(train_dir):
    checkpoints = [read_checkpoint(path)[0] for path in list_checkpoints(train_dir)]
    assert all(np.isfinite(value).all() for values in checkpoints for value in values.values())
    return bool(checkpoints)


def test_nonfinite_batch_skips_only_its_update(tmp_path, inject_nan, capsys):
    inject_nan({2, 3, 6})
    result = run(WITH_BRIGHTNESS, tmp_path, max_steps=6, checkpoint_every_steps=1, summary_every_steps=1)
    assert result["step"] == 6 and result["skipped_steps"] == 3 and all_finite(tmp_path)
    previous, skipped = (read_checkpoint(path)[0] for path in list_checkpoints(tmp_path)[-2:])
    assert (previous.pop("step"), skipped.pop("step")) == (5, 6) and any(name.startswith("ema") for name in previous)
    for name, value in previous.items():
        np.testing.assert_array_equal(skipped[name], value, err_msg=name)
    output = capsys.readouterr().out
    assert lines_with(output, "step 3", "2 in a row", "3 ", "cross_entropy of tower_1")
    assert lines_with(output, "3 skipped steps")
    lost = [r["step"] for r in records_of(tmp_path, "train") if r["loss"] is None]
    assert lost == [2, 3, 6]


@pytest.mark.parametrize(
    ("settings", "origin"),
    [
        ({"strategy": "mirrored"}, " of tower_1"),
        ({"micro_batches": 2}, " of tower_1"),
        ({"strategy": "stages", "micro_batches": 4, "model": "cifarnet"}, " of tower_0"),
        pytest.param(
            {"batch_size": 50, "hard_example_pool": 200}, "proxy: cross_entropy of tower_1", marks=pytest.mark.slow
        ),
    ],
)
def test_the_tower_of_a_nonfinite_number_is_named(tmp_path, inject_nan, monkeypatch, capsys, settings, origin):
    """Select other examples than the one with the NaN where hard ones are selected, so that only the proxy sees it."""
    monkeypatch.setattr(tf.math, "top_k", lambda losses, count, sorted: SimpleNamespace(indices=tf.range(count)))
    inject_nan({2})
    result = run(WITH_BRIGHTNESS, tmp_path, max_steps=3, **settings)
    assert result["skipped_steps"] == 1 and all_finite(tmp_path)
    assert lines_with(capsys.readouterr().out, "step 2", "1 in a row", "3 ", origin, "not finite")


@pytest.mark.slow
def test_too_many_nonfinite_steps_end_a_run_that_can_be_resumed(tmp_path, inject_nan):
    inject_nan({4, 5, 6})
    config = replace(WITH_BRIGHTNESS, checkpoint_every_steps=3)
    with pytest.raises(Interrupted, match="step 5"):
        run(config, tmp_path, StopAtStep(5))
    with pytest.raises(DivergedError, match=r"step 6 .*3 in a row.*step-5.npz is kept; .*--learning_rate"):
        run(config, tmp_path)
    assert all_finite(tmp_path)
    inject_nan(set())
    assert run(config, tmp_path)["skipped_steps"] == 2


def test_diverged_run_saves_no_nonfinite_values(tmp_path):
    with pytest.raises(DivergedError, match="3 in a row.*--overwrite.* --learning_rate"):
        run(TINY, tmp_path, learning_rate=1e38, checkpoint_every_steps=1)
    assert all_finite(tmp_path)
