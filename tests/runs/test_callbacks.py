"""Callbacks are told what happens, change nothing, and leave a saved run when one of them fails."""

import copy
from signal import SIGTERM
from types import SimpleNamespace

import pytest

from cifar_towers.checkpointing.checkpoint import list_checkpoints
from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.reporting.run_logger import Callbacks
from cifar_towers.signals import StopSignals
from tests.runs.short_runs import STEPS, TINY, Recorder, records_of, run


def test_a_callback_is_told_all_that_is_recorded(tiny_run):
    """That it changes nothing is what the runs without one prove, which end with the same bits."""
    directory, _, recorder = tiny_run
    assert recorder.calls[0] == ("start", directory) and recorder.calls[-1] == (
        "end",
        directory,
        True,
    )
    steps = {call[1]: call[2] for call in recorder.calls if call[0] == "step"}
    assert list(steps) == list(range(1, STEPS + 1))
    for record in records_of(directory, "train"):
        metrics = steps[record["step"]]
        assert all(type(value) is float for value in metrics.values())
        assert (
            metrics["loss"] == record["loss"]
            and metrics["learning_rate"] == record["learning_rate"]
        )
        assert metrics.get("tower_1/loss") == (
            record["towers"]["loss"][1] if "towers" in record else None
        )
    told = [(call[1], call[2]["accuracy"]) for call in recorder.calls if call[0] == "evaluation"]
    assert told == [
        (record["step"], record["accuracy"]) for record in records_of(directory, "eval")
    ]


@pytest.mark.parametrize(
    ("hook", "error"), [("on_step", SystemExit(0)), ("on_evaluation", OSError(101))]
)
def test_an_error_of_a_callback_is_raised_once_the_step_is_saved(tmp_path, hook, error):
    """Also where the target is reached."""

    def fail(*_):
        raise error

    recorder, failing = Recorder(), SimpleNamespace(**{hook: fail})
    with pytest.raises(type(error)) as caught:
        run(
            TINY,
            tmp_path,
            target_accuracy=0.05,
            eval_every_epochs=0.2,
            callbacks=[failing, recorder],
        )
    assert caught.value is error and list_checkpoints(tmp_path)
    assert recorder.calls[-1] == ("end", tmp_path, False)


def test_an_interrupt_while_it_starts_ends_a_run_after_a_step_and_tells_its_callbacks(tmp_path):
    recorder, signals = Recorder(), StopSignals(())
    starting = SimpleNamespace(on_start=lambda run: setattr(signals, "received", SIGTERM))
    with pytest.raises(Interrupted, match="step 1"):
        run(TINY, tmp_path, signals, max_steps=4, callbacks=[recorder, starting])
    assert recorder.calls[-1] == ("end", tmp_path, False)


def test_after_an_error_those_that_were_started_are_told_of_the_end():
    class Failing(Recorder):
        def on_start(self, run):
            super().on_start(run)
            raise ValueError("the first error")

        def on_end(self, run):
            self.calls.append(("end", run))
            raise ValueError("not the first")

    told, failing, untold = Recorder(), Failing(), Recorder()
    callbacks = Callbacks(
        [told, failing, untold], opened := SimpleNamespace(directory="run", result=None)
    )
    with pytest.raises(ValueError, match="the first error"), callbacks.until_end():
        callbacks.start()
        callbacks.step(1, {"loss": 1})
    assert told.calls == [("start", "run"), ("end", "run", False)]
    assert failing.calls == [("start", "run"), ("end", opened)] and untold.calls == []


def test_a_callback_that_changes_its_arguments_changes_nothing_else():
    def clear(step, evaluation):
        evaluation["confusion"][0].clear()
        evaluation.clear()

    recorder, record = Recorder(), {"split": "test", "accuracy": 0.5, "confusion": [[1, 0], [1, 0]]}
    before = copy.deepcopy(record)
    Callbacks([SimpleNamespace(on_evaluation=clear), recorder]).evaluation(1, record)
    assert record == before and recorder.calls == [("evaluation", 1, before)]


def test_an_object_that_is_no_callback_is_refused():
    with pytest.raises(UsageError, match=r"\[\] .*on_start, on_step"):
        Callbacks([[]])
