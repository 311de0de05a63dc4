"""Callbacks are told what happens, change nothing, and leave a saved run when one of them fails."""

import copy
from signal import SIGTERM
from types import SimpleNamespace

import pytest
import tensorflow as tf

from cifar_towers.callbacks import Callbacks
from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.reporting.run_logger import RunLogger
from cifar_towers.runs.checkpoint import list_checkpoints, step_of
from cifar_towers.signals import StopSignals
from cifar_towers.training import runner
from tests.helpers.messages import lines_with
from tests.helpers.short_runs import STEPS, TINY, Recorder, records_of, run


def test_a_callback_is_told_all_that_is_recorded(tiny_run):
    """That it changes nothing is what the runs without one prove, which end with the same bits."""
    directory, _, recorder = tiny_run

    assert recorder.calls[0] == ("start", directory)
    assert recorder.calls[-1] == ("end", directory, True)

    steps = {call[1]: call[2] for call in recorder.calls if call[0] == "step"}
    assert list(steps) == list(range(1, STEPS + 1))

    for record in records_of(directory, "train"):
        metrics = steps[record["step"]]
        assert all(type(value) is float for value in metrics.values())
        assert metrics["loss"] == record["loss"]
        assert metrics["learning_rate"] == record["learning_rate"]
        if "towers" in record:
            assert metrics["tower_1/loss"] == record["towers"]["loss"][1]
        else:
            assert "tower_1/loss" not in metrics
    told = [(call[1], call[2]["accuracy"]) for call in recorder.calls if call[0] == "evaluation"]

    assert told == [
        (record["step"], record["accuracy"]) for record in records_of(directory, "eval")
    ]


@pytest.mark.parametrize(
    ("hook", "error", "step"), [("on_step", SystemExit(0), 1), ("on_evaluation", OSError(101), 2)]
)
def test_an_error_of_a_callback_is_raised_once_the_step_is_saved(
    tmp_path, capsys, hook, error, step
):
    def fail(*_):
        raise error

    recorder = Recorder()
    failing = SimpleNamespace(**{hook: fail})
    with pytest.raises(type(error)) as caught:
        run(TINY, tmp_path, callbacks=[failing, recorder], eval_every_epochs=0.2)

    assert caught.value is error

    (checkpoint,) = list_checkpoints(tmp_path)
    assert step_of(checkpoint) == step
    assert lines_with(capsys.readouterr().out, "stopped by an error", f"step {step}")
    assert recorder.calls[-1] == ("end", tmp_path, False)


@pytest.mark.parametrize("part", ["log_step", "log_evaluation"])
def test_an_error_while_logging_leaves_a_run_that_goes_on_to_the_same_bits(
    tmp_path, monkeypatch, tiny_run, part
):
    full = OSError(28, "No space left on device")
    settings = {"num_gpus": 2, "eval_every_epochs": 0.2}  # two towers as in `tiny_run`
    calls = iter(range(1000))
    function = getattr(RunLogger, part)

    def fail(*arguments, **options):
        if next(calls) == 3:
            raise full
        return function(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, part, fail)
        with pytest.raises(OSError, match="No space") as caught:
            run(TINY, tmp_path, **settings)

    assert caught.value is full
    assert list_checkpoints(tmp_path)

    resumed = run(TINY, tmp_path, **settings)
    assert resumed["weights_sha256"] == tiny_run.result["weights_sha256"]


def test_after_an_error_of_the_step_the_newest_checkpoint_stands(tmp_path, monkeypatch, capsys):
    """Its variables may be half assigned."""
    function = runner.to_numpy
    lost = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
    calls = iter(range(1000))

    def fail(values):
        if next(calls) >= 10:  # two calls a step
            raise lost
        return function(values)

    monkeypatch.setattr(runner, "to_numpy", fail)
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        run(TINY, tmp_path, checkpoint_every_steps=3)

    assert caught.value is lost
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-3.npz"]
    assert lines_with(capsys.readouterr().out, "is not saved", "OOM", "step-3.npz is kept")


def test_an_interrupt_while_it_starts_ends_a_run_after_a_step_and_tells_its_callbacks(tmp_path):
    recorder = Recorder()
    signals = StopSignals(())
    starting = SimpleNamespace(on_start=lambda run: setattr(signals, "received", SIGTERM))
    with pytest.raises(Interrupted, match="step 1"):
        run(TINY, tmp_path, signals, max_steps=4, callbacks=[recorder, starting])
    assert recorder.calls[-1] == ("end", tmp_path, False)


def test_those_that_were_started_are_told_of_the_end_whatever_others_raise():
    class Failing(Recorder):
        def on_start(self, run):
            super().on_start(run)
            raise ValueError("at the start")

        def on_end(self, run):
            super().on_end(run)
            raise OSError("at the end")

    told = Recorder()
    failing = Failing()
    untold = Recorder()
    opened = SimpleNamespace(directory="run", result=None)
    callbacks = Callbacks([told, failing, untold], opened)
    with pytest.raises(OSError, match="at the end") as caught, callbacks.until_end():
        callbacks.start()

    assert isinstance(caught.value.__context__, ValueError)
    assert told.calls == failing.calls == [("start", "run"), ("end", "run", False)]
    assert untold.calls == []


def test_a_callback_that_changes_its_arguments_changes_nothing_else():
    def clear(step, evaluation):
        evaluation["confusion"][0].clear()
        evaluation.clear()

    recorder = Recorder()
    record = {"split": "test", "accuracy": 0.5, "confusion": [[1, 0], [1, 0]]}
    before = copy.deepcopy(record)
    Callbacks([SimpleNamespace(on_evaluation=clear), recorder]).evaluation(1, record)

    assert record == before
    assert recorder.calls == [("evaluation", 1, before)]


def test_an_object_that_is_no_callback_is_refused():
    with pytest.raises(UsageError, match=r"\[\] .*on_start, on_step"):
        Callbacks([[]])
