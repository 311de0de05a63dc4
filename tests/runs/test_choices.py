"""Choices that a run makes by itself: placement and micro-batches."""

import json
from dataclasses import replace

import pytest
import tensorflow as tf

from cifar_towers import trainer
from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.training import tuning
from cifar_towers.training.step_runner import StepRunner
from tests.configs import net
from tests.messages import lines_with
from tests.runs.short_runs import QUICK, STEPS, TINY, StopAtStep, run


def choices(directory):
    return json.loads((directory / "environment.json").read_text())["chosen"]


@pytest.mark.slow
def test_auto_placement_is_stored_and_changes_no_weights(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(tuning, "on_gpus", lambda towers: True)  # where it is measured
    config = replace(QUICK, num_gpus=2, max_steps=2)
    measured = run(config, tmp_path / "auto", variable_placement="auto")
    (output,) = lines_with(caplog.text, "variable placement", "4 images", "2 towers")
    chosen = json.loads((tmp_path / "auto/config.json").read_text())["variable_placement"]
    assert chosen in output and choices(tmp_path / "auto") == ["variable_placement"]
    asked = run(config, tmp_path / "asked", variable_placement=chosen)
    assert asked["weights_sha256"] == measured["weights_sha256"] and choices(tmp_path / "asked") == []
    caplog.clear()
    run(config, tmp_path / "auto", variable_placement="auto", max_steps=3)
    assert lines_with(caplog.text, "variable placement", chosen)


@pytest.fixture
def small_memory(monkeypatch):
    """Return small_memory(fits, where): a step for which `fits(micro_batches, image_size)` is false exceeds the memory.

    small_memory returns the list of the numbers of micro-batches of all attempts; `where` is "trace" or "start".
    """

    def of(fits, where):
        set_up, start, attempts = trainer.Run.__init__, getattr(StepRunner, where), []

        def set_up_and_record(self, *arguments, **options):
            set_up(self, *arguments, **options)
            attempts.append(self.config.micro_batches)

        def start_if_it_fits(self, step, batch, **options):
            if not fits(attempts[-1], self.image_size_at(step)):
                raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith shape [1024,64]")
            return start(self, step, batch, **options)

        monkeypatch.setattr(trainer.Run, "__init__", set_up_and_record)
        monkeypatch.setattr(StepRunner, where, start_if_it_fits)
        return attempts

    return of


def test_micro_batches_follow_the_memory(tmp_path, small_memory, capsys):
    """Compare with a run of that number from the start; a number that does not fit at all is an error."""
    attempts = small_memory(lambda parts, size: parts >= 4, "trace")
    config = replace(TINY, num_gpus=1, batch_size=100, max_steps=3, eval_every_epochs=0)
    result = run(config, tmp_path / "auto", micro_batches=0)
    output = capsys.readouterr().out
    assert attempts == [1, 2, 4] and result["seconds"].get("not_running", 0.0) < 0.001
    assert len(lines_with(output, "OOM when allocating tensor with shape [1024,64]", "--micro_batches=")) == 2
    assert lines_with(output, "--micro_batches=4", "batch norm", "25 images", "50")
    given = run(config, tmp_path / "given", micro_batches=4)
    assert choices(tmp_path / "auto") == ["micro_batches"] and choices(tmp_path / "given") == []
    assert given["weights_sha256"] == result["weights_sha256"]
    small_memory(lambda parts, size: False, "trace")
    with pytest.raises(UsageError, match="memory.* --batch_size"):
        run(config, tmp_path / "never", micro_batches=0, batch_size=2)


@pytest.mark.slow
def test_micro_batches_go_on_from_the_step_that_did_not_fit_and_are_kept(tmp_path, small_memory, capsys):
    """Train on where larger images come in the middle of a run; also when the run is resumed."""
    attempts = small_memory(lambda parts, size: parts >= 2 or size < 20, "start")
    config = replace(QUICK, num_gpus=2, micro_batches=0)
    with pytest.raises(Interrupted, match="step 14"):
        run(config, tmp_path / "auto", StopAtStep(15))  # which counts the second start too
    output = capsys.readouterr().out
    assert attempts == [1, 2] and lines_with(output, "resuming", "step 10")
    result = run(config, tmp_path / "auto")
    assert attempts == [1, 2, 2] and result["step"] == STEPS
    assert run(config, tmp_path / "whole")["weights_sha256"] == result["weights_sha256"]


def test_micro_batches_of_stages_are_kept(tmp_path, small_memory):
    """Resume a run whose devices hold stages of one model: it has one tower on two devices."""
    attempts = small_memory(lambda parts, size: parts >= 2, "trace")
    stages = {"model": net("dropping"), "parallelism": "model", "num_gpus": 2}
    config = replace(TINY, micro_batches=0, eval_every_epochs=0, **stages)
    for steps in (1, 2):
        run(config, tmp_path, max_steps=steps)
    assert attempts == [1, 2, 2]
