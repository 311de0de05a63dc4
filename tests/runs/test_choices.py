"""Choices that a run makes by itself: placement, micro-batches, number of towers."""

import json
from dataclasses import replace

import pytest
import tensorflow as tf

from cifar_towers import trainer
from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.reporting import run_logger
from cifar_towers.training import auto_placement, tower_count
from cifar_towers.training.run_setup import setup_run
from cifar_towers.training.step_runner import StepRunner
from tests.messages import lines_with
from tests.runs.short_runs import (
    QUICK,
    STEPS,
    TINY,
    StopAtStep,
    run,
)


@pytest.mark.slow
def test_auto_placement_is_stored_and_changes_no_weights(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(auto_placement, "on_gpus", lambda towers: True)  # where it is measured
    config = replace(QUICK, num_gpus=2, max_steps=2)
    auto = replace(config, train_dir=str(tmp_path / "auto"), variable_placement="auto")
    measured = run(auto)
    (output,) = lines_with(caplog.text, "variable placement", "4 images", "2 towers")
    chosen = json.loads((tmp_path / "auto/config.json").read_text())["variable_placement"]
    assert chosen in output
    asked = run(config, train_dir=str(tmp_path / "asked"), variable_placement=chosen)
    assert asked["weights_sha256"] == measured["weights_sha256"]
    caplog.clear()
    run(auto, max_steps=3)
    assert lines_with(caplog.text, "variable placement", chosen)


@pytest.fixture
def small_memory(monkeypatch):
    """Return small_memory(fits): a step for which `fits(micro_batches, image_size)` is false exceeds the memory.

    small_memory returns the list of the numbers of micro-batches of all attempts.
    """

    def of(fits):
        start, attempts = StepRunner.start, []

        def prepare(*arguments, **options):
            setup = setup_run(*arguments, **options)
            attempts.append(setup.config.micro_batches)
            return setup

        def start_if_it_fits(self, step, batch, inputs, **options):
            if not fits(attempts[-1], inputs.image_size):
                raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith shape [1024,64]")
            return start(self, step, batch, inputs, **options)

        monkeypatch.setattr(trainer, "setup_run", prepare)
        monkeypatch.setattr(StepRunner, "start", start_if_it_fits)
        return attempts

    return of


def test_micro_batches_follow_the_memory(tmp_path, small_memory, capsys):
    """Compare with a run of that number from the start; a number that does not fit at all is an error."""
    attempts = small_memory(lambda parts, size: parts >= 4)
    config = replace(TINY, num_gpus=2, max_steps=6, eval_every_epochs=0)
    result = run(config, train_dir=str(tmp_path / "auto"), micro_batches=0)
    output = capsys.readouterr().out
    assert attempts == [1, 2, 4]
    assert len(lines_with(output, "OOM when allocating tensor with shape [1024,64]", "--micro_batches=")) == 2
    assert lines_with(output, "--micro_batches=4", "batch norm", "25 images", "50")
    given = run(config, train_dir=str(tmp_path / "given"), micro_batches=4)
    assert given["weights_sha256"] == result["weights_sha256"]
    small_memory(lambda parts, size: False)
    with pytest.raises(UsageError, match="memory.* --batch_size"):
        run(config, train_dir=str(tmp_path / "never"), micro_batches=0, batch_size=4)


@pytest.mark.slow
def test_micro_batches_go_on_from_the_step_that_did_not_fit_and_are_kept(tmp_path, small_memory, capsys):
    """Train on where larger images come in the middle of a run; also when the run is resumed."""
    attempts = small_memory(lambda parts, size: parts >= 2 or size < 20)
    config = replace(QUICK, num_gpus=2, train_dir=str(tmp_path / "auto"), micro_batches=0)
    with pytest.raises(Interrupted, match="step 14"):
        run(config, StopAtStep(15))  # which counts the second start too
    output = capsys.readouterr().out
    assert attempts == [1, 2] and lines_with(output, "resuming", "step 10")
    result = run(config)
    assert attempts == [1, 2, 2] and result["step"] == STEPS
    one = replace(QUICK, num_gpus=2, train_dir=str(tmp_path / "whole"), micro_batches=0)
    assert run(one)["weights_sha256"] == result["weights_sha256"]


def test_towers_with_too_small_a_share_are_announced(tmp_path, monkeypatch, capsys):
    """Measure logical CPU devices that pass for GPUs, by a clock on which each tower costs a millisecond."""

    def time_steps(steps):
        return {name: [0.0 * step() + int(name) / 1000] for name, step in steps.items()}

    monkeypatch.setattr(tower_count, "on_gpus", lambda towers: True)
    monkeypatch.setattr(tower_count, "time_steps", time_steps)
    config = replace(TINY, num_gpus=4, batch_size=200, max_steps=12, eval_every_epochs=0)
    plain = run(config, train_dir=str(tmp_path / "plain"))
    assert "--num_gpus=2" not in capsys.readouterr().out  # it would take more than a small part of the time left
    monkeypatch.setattr(run_logger, "SPARE_TIME", 1e6)
    advised = run(config, train_dir=str(tmp_path / "advised"))
    assert lines_with(capsys.readouterr().out, "2 towers", "200 images", "2.0 ms", "4.0 ms", "25", "--num_gpus=2")
    assert advised["weights_sha256"] == plain["weights_sha256"]
