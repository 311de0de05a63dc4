"""Callbacks are told what happens, change nothing, and leave a saved run when one of them fails."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace

import pytest

from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.reporting.run_logger import Callbacks
from cifar_towers.signals import StopSignals
from tests.runs.short_runs import STEPS, TINY, StopAtStep, records_of, run


class Recorder:
    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run.directory))

    def on_step(self, step, metrics):
        self.calls.append((step, metrics))

    def on_evaluation(self, step, evaluation):
        self.calls.append((step, evaluation["split"], evaluation["accuracy"]))

    def on_end(self, run):
        self.calls.append(("end", run.directory, run.result is not None))


def fail_at(step, error):
    def callback(at, metrics):
        if at == step:
            raise error

    return callback


def test_a_callback_is_told_all_that_is_recorded_and_changes_nothing(tmp_path, tiny_run):
    class Callable:
        def __call__(self, step, metrics):
            plain.append(step)

    recorder, plain, bound = Recorder(), [], []
    directory = tmp_path / "run"
    partial = functools.partial(lambda steps, step, metrics: steps.append(step), bound)
    result = run(TINY, directory, num_gpus=2, callbacks=[recorder, Callable(), partial])
    assert result["weights_sha256"] == tiny_run[1]["weights_sha256"]
    assert recorder.calls[0] == ("start", directory) and recorder.calls[-1] == ("end", directory, True)
    steps = {step: rest[0] for step, *rest in recorder.calls if isinstance(rest[0], dict)}
    assert list(steps) == plain == bound == list(range(1, STEPS + 1))
    for record in records_of(directory, "train"):
        metrics = steps[record["step"]]
        assert all(type(value) is float for value in metrics.values())
        assert metrics["loss"] == record["loss"] and metrics["learning_rate"] == record["learning_rate"]
        assert ("tower_1/loss" in metrics) == ("towers" in record)
    assert steps[5]["tower_1/loss"] == records_of(directory, "train")[4]["towers"]["loss"][1]
    told = [call for call in recorder.calls if call[1:2] == ("test",)]
    assert told == [(r["step"], "test", r["accuracy"]) for r in records_of(directory, "eval")]


@pytest.mark.parametrize("error", [ValueError("no more"), SystemExit(0)])
def test_a_failing_callback_ends_the_run_saved_and_it_resumes_to_the_same_bits(tmp_path, tiny_run, capsys, error):
    recorder = Recorder()
    with pytest.raises(type(error)) as caught:
        run(TINY, tmp_path, num_gpus=2, callbacks=[fail_at(7, error), recorder])
    assert caught.value is error and caught.traceback[-1].path == Path(__file__)
    assert re.search(r"a callback failed; saved step [789]: the same command resumes", capsys.readouterr().out)
    assert recorder.calls[-2][0] <= 6 and recorder.calls[-1] == ("end", tmp_path, False)
    result = run(TINY, tmp_path, num_gpus=2)
    assert result["weights_sha256"] == tiny_run[1]["weights_sha256"]


def test_a_callback_that_fails_where_the_target_is_reached_ends_the_run_saved(tmp_path):
    class Failing:
        def on_evaluation(self, step, evaluation):
            raise OSError("no network")

    config = replace(TINY, target_accuracy=0.05, eval_every_epochs=0.2)
    with pytest.raises(OSError, match="no network"):
        run(config, tmp_path, callbacks=[Failing()])
    assert run(config, tmp_path)["step"] == 2


def test_an_interrupted_run_tells_its_callbacks_that_it_ends(tmp_path):
    """An interrupt while it resumes ends it after a step."""
    recorder, signals = Recorder(), StopSignals(())

    class Starting:
        def on_start(self, run):
            signals.received = SIGTERM

    with pytest.raises(Interrupted, match="step 2"):
        run(TINY, tmp_path, StopAtStep(2), max_steps=4, callbacks=[recorder])
    assert recorder.calls[-1] == ("end", tmp_path, False)
    with pytest.raises(Interrupted, match="^saved step 3: the same command resumes"):
        run(TINY, tmp_path, signals, max_steps=4, callbacks=[Starting()])


def test_after_an_error_those_that_were_started_are_told_of_the_end():
    class Failing(Recorder):
        def on_start(self, run):
            super().on_start(run)
            raise ValueError("the first error")

        def on_end(self, run):
            self.calls.append(("end", run))
            raise ValueError("not the first")

    told, failing, untold = Recorder(), Failing(), Recorder()
    callbacks = Callbacks([told, failing, untold], opened := SimpleNamespace(directory="run", result=None))
    with pytest.raises(ValueError, match="the first error"), callbacks.until_end():
        callbacks.start()
        callbacks.step(1, {"loss": 1})
    assert told.calls == [("start", "run"), ("end", "run", False)]
    assert failing.calls == [("start", "run"), ("end", opened)] and untold.calls == []


def test_callbacks_that_change_their_arguments_or_fail_at_the_end_leave_a_complete_run(tmp_path):
    """The next callback gets the arguments as they were."""

    class Clearing:
        def on_step(self, step, metrics):
            metrics.clear()

        def on_evaluation(self, step, evaluation):
            evaluation["confusion"][0].clear()
            evaluation.clear()

        def on_end(self, run):
            raise OSError("no network")

    recorder = Recorder()
    with pytest.raises(OSError, match="no network"):
        run(TINY, tmp_path, max_steps=1, callbacks=[Clearing(), recorder])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step"] == 1
    for evaluation, record in zip(result["evaluations"], records_of(tmp_path, "eval"), strict=True):
        assert evaluation == {key: record[key] for key in evaluation} and len(evaluation["confusion"][0]) == 10
        assert (1, "test", record["accuracy"]) in recorder.calls
    assert recorder.calls[1][1]["loss"] == records_of(tmp_path, "train")[0]["loss"]


def test_an_object_that_is_no_callback_is_refused():
    with pytest.raises(UsageError, match=r"\[\] cannot be called and has none of on_start, on_step"):
        Callbacks([[]])
