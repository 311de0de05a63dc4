"""Steps that are not finite: skipped, named, and never saved."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data.batches import Batches
from cifar_towers.errors import DivergedError, Interrupted
from cifar_towers.runs.checkpoint import list_checkpoints, read_checkpoint
from tests.helpers.messages import lines_with
from tests.helpers.short_runs import TINY, StopAtStep, records_of, run

WITH_BRIGHTNESS = replace(TINY, brightness=1e-30, num_gpus=2)  # inject_nan sets the brightness


@pytest.fixture
def inject_nan(monkeypatch):
    """Return inject_nan(steps), which makes an image of these steps NaN in all later runs."""
    stream = Batches.stream

    def of(steps):
        def with_nan(self, first_step, last_step):
            for step, batch in enumerate(stream(self, first_step, last_step), first_step + 1):
                if step in steps:
                    draws = batch.draws
                    changed = tf.tensor_scatter_nd_update(draws.brightness, [[150]], [np.nan])
                    batch = batch._replace(draws=draws._replace(brightness=changed))
                yield batch

        monkeypatch.setattr(Batches, "stream", with_nan)

    return of


def assert_finite(train_dir):
    assert list_checkpoints(train_dir)
    for path in list_checkpoints(train_dir):
        values, _ = read_checkpoint(path)
        assert all(np.isfinite(value).all() for value in values.values())


@pytest.mark.parametrize(
    ("settings", "tower"),
    [
        ({}, "tower_1"),
        pytest.param({"micro_batches": 2}, "tower_1", marks=pytest.mark.slow),
    ],
)
def test_a_nonfinite_batch_skips_only_its_update(tmp_path, inject_nan, capsys, settings, tower):
    inject_nan({2, 3, 6})
    result = run(
        WITH_BRIGHTNESS,
        tmp_path,
        max_steps=6,
        checkpoint_every_steps=1,
        summary_every_steps=1,
        **settings,
    )

    assert result["step"] == 6
    assert result["skipped_steps"] == 3
    assert_finite(tmp_path)

    *_, before, last = list_checkpoints(tmp_path)
    previous, _ = read_checkpoint(before)
    skipped, _ = read_checkpoint(last)
    assert (previous.pop("step"), skipped.pop("step")) == (5, 6)
    assert any(name.startswith("ema") for name in previous)

    for name, value in previous.items():
        np.testing.assert_array_equal(skipped[name], value, err_msg=name)

    assert lines_with(capsys.readouterr().out, "step 3", f"loss of {tower} is not finite")
    records = records_of(tmp_path, "train")
    assert [record["step"] for record in records if record["loss"] is None] == [2, 3, 6]


@pytest.mark.slow
def test_too_many_nonfinite_steps_end_a_run_that_can_be_resumed(tmp_path, inject_nan):
    """Those before an interrupt count."""
    inject_nan({4, 5, 6})
    config = replace(WITH_BRIGHTNESS, max_steps=8, checkpoint_every_steps=3)
    with pytest.raises(Interrupted, match="step 5"):
        run(config, tmp_path, StopAtStep(5))
    with pytest.raises(DivergedError, match="step 6 .*step-5.npz .*--learning_rate"):
        run(config, tmp_path)

    assert_finite(tmp_path)

    inject_nan(set())
    assert run(config, tmp_path)["skipped_steps"] == 2


def test_a_diverged_run_saves_no_nonfinite_values(tmp_path):
    with pytest.raises(DivergedError, match="in a row.*--learning_rate .*--overwrite"):
        run(TINY, tmp_path, learning_rate=1e38, checkpoint_every_steps=1, summary_every_steps=1)
    assert_finite(tmp_path)
    skipped_steps = [record["skipped_steps"] for record in records_of(tmp_path, "train")]
    assert skipped_steps == [0, 1, 2, 3]  # also of the step that ended it


def test_a_save_that_finds_a_nonfinite_value_ends_the_run_and_names_it(tmp_path):
    """The first update overflows from finite gradients."""
    rates = {"learning_rate": 1e38, "weight_decay": 1e38}
    message = r"^model\.\S+ is not finite after step 1; no checkpoint .* --head_learning_rate\)$"
    with pytest.raises(DivergedError, match=message):
        run(TINY, tmp_path, checkpoint_every_steps=1, **rates)
    assert list_checkpoints(tmp_path) == []
