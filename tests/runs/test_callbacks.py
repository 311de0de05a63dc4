"""Callbacks are told what happens, change nothing, and leave a saved run when one of them fails."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM

import pytest

from cifar_towers.cli.main import start_training
from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.reporting.run_logger import CallbackError, Callbacks
from cifar_towers.shutdown import ShutdownHandler
from tests.runs.short_runs import STEPS, TINY, StopAtStep, records_of, run


class Recorder:
    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run))

    def on_step(self, step, metrics):
        self.calls.append((step, metrics))

    def on_evaluation(self, step, evaluation):
        self.calls.append((step, evaluation["split"], evaluation["accuracy"]))

    def on_end(self, run):
        self.calls.append(("end", run, (run / "result.json").exists()))


def fail_at(step):
    def callback(at, metrics):
        if at == step:
            raise ValueError("no more")

    return callback


def test_a_callback_is_told_all_that_is_recorded_and_changes_nothing(tmp_path, tiny_run):
    recorder, plain = Recorder(), []
    directory = tmp_path / "run"
    result = run(TINY, directory, num_gpus=2, callbacks=[recorder, lambda step, metrics: plain.append(step)])
    assert result["weights_sha256"] == tiny_run[1]["weights_sha256"]
    assert recorder.calls[0] == ("start", directory) and recorder.calls[-1] == ("end", directory, True)
    steps = {step: rest[0] for step, *rest in recorder.calls if isinstance(rest[0], dict)}
    assert list(steps) == plain == list(range(1, STEPS + 1))
    for record in records_of(directory, "train"):
        metrics = steps[record["step"]]
        assert all(type(value) is float for value in metrics.values())
        assert metrics["loss"] == record["loss"] and metrics["learning_rate"] == record["learning_rate"]
        assert ("tower_1/loss" in metrics) == ("towers" in record)
    assert steps[5]["tower_1/loss"] == records_of(directory, "train")[4]["towers"]["loss"][1]
    told = [call for call in recorder.calls if call[1:2] == ("test",)]
    assert told == [(r["step"], "test", r["accuracy"]) for r in records_of(directory, "eval")]


def test_a_failing_callback_ends_the_run_saved_and_it_resumes_to_the_same_bits(tmp_path, tiny_run):
    recorder = Recorder()
    with pytest.raises(CallbackError) as caught:
        run(TINY, tmp_path, num_gpus=2, callbacks=[fail_at(7), recorder])
    for part in ("callback, on_step", "test_callbacks.py, line ", "ValueError: no more", "saved step ", "resumes"):
        assert part in str(caught.value)
    assert recorder.calls[-2][0] <= 6 and recorder.calls[-1] == ("end", tmp_path, False)
    result = run(TINY, tmp_path, num_gpus=2)
    assert result["weights_sha256"] == tiny_run[1]["weights_sha256"]


def test_a_callback_that_fails_where_the_target_is_reached_is_no_interrupt(tmp_path):
    class Failing:
        def on_evaluation(self, step, evaluation):
            raise OSError("no network")

    config = replace(TINY, target_accuracy=0.05, eval_every_epochs=0.2)
    with pytest.raises(CallbackError, match="on_evaluation: .*OSError: no network; saved step 2: .*resumes"):
        run(config, tmp_path, callbacks=[Failing])
    assert run(config, tmp_path)["step"] == 2


def test_a_callback_that_exits_ends_the_run_saved(tmp_path):
    with pytest.raises(CallbackError, match=r"callbacks.py, line .*SystemExit: 0; saved step \d+: .* resumes"):
        run(TINY, tmp_path, callbacks=[lambda step, metrics: sys.exit(0)])


def test_an_interrupted_run_tells_its_callbacks_that_it_ends(tmp_path):
    """An interrupt while it resumes does not deny the steps that are saved."""
    recorder, shutdown = Recorder(), ShutdownHandler()

    class Starting:
        def on_start(self, run):
            shutdown.signal = SIGTERM

    with pytest.raises(Interrupted, match="step 2"):
        run(TINY, tmp_path, StopAtStep(2), max_steps=4, callbacks=[recorder])
    assert recorder.calls[-1] == ("end", tmp_path, False)
    with pytest.raises(Interrupted, match="^before the first step since the last start; nothing new to save$"):
        run(TINY, tmp_path, shutdown, max_steps=4, callbacks=[Starting])


def test_after_an_error_those_that_were_started_are_told_of_the_end():
    class Failing(Recorder):
        def on_start(self, run):
            super().on_start(run)
            raise ValueError("the first error")

        def on_end(self, run):
            self.calls.append(("end", run))
            raise ValueError("not the first")

    told, failing, untold = Recorder(), Failing(), Recorder()
    callbacks = Callbacks([told, failing, untold], Path("run"))
    with pytest.raises(CallbackError, match="on_start: .*the first error"), callbacks.until_end():
        callbacks.start()
        callbacks.step(1, {"loss": 1})
    assert told.calls == [("start", Path("run")), ("end", Path("run"), False)]
    assert failing.calls == [("start", Path("run")), ("end", Path("run"))] and untold.calls == []


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
    with pytest.raises(CallbackError, match=r"on_end: .*OSError: no network; the run is complete"):
        run(TINY, tmp_path, max_steps=1, callbacks=[Clearing(), recorder])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["step"] == 1
    for evaluation, record in zip(result["evaluations"], records_of(tmp_path, "eval"), strict=True):
        assert evaluation == {key: record[key] for key in evaluation} and len(evaluation["confusion"][0]) == 10
        assert (1, "test", record["accuracy"]) in recorder.calls
    assert recorder.calls[1][1]["loss"] == records_of(tmp_path, "train")[0]["loss"]


def test_programs_hand_callbacks_the_run_for_each_seed_too(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("""
class Note:
    def on_start(self, run):
        (run.directory / "start").write_text(f"{run.config['batch_size']} {run.config['seed']} {run.result}")

    def on_end(self, run):
        (run.directory / "end").write_text(str(run.result["step"]))
""")
    config = replace(TINY, train_dir=str(tmp_path / "run"), max_steps=1, seeds="3", callback=f"{file}:Note")
    start_training(config, ShutdownHandler())
    start_training(replace(config, seeds=""), ShutdownHandler())
    for directory, seed in (("run/seed3", 3), ("run", TINY.seed)):
        noted = [(tmp_path / directory / name).read_text() for name in ("start", "end")]
        assert noted == [f"200 {seed} None", "1"]


def test_callbacks_are_loaded_by_name_and_checked(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("steps = []\n\n\ndef follow(step, metrics):\n    open(__file__ + '.out', 'a').write(f'{step} ')\n")
    run(TINY, tmp_path / "run", max_steps=3, callback=f"{file}:follow")
    assert (tmp_path / "mine.py.out").read_text() == "1 2 3 "
    with pytest.raises(UsageError, match="has no function folow"):
        run(TINY, tmp_path / "other", callback=f"{file}:folow")
    file.write_text("class Tracker:\n    def __init__(self, project):\n        self.on_step = print\n")
    with pytest.raises(UsageError, match=r"a callback cannot be instantiated: TypeError: Tracker.*'project'"):
        run(TINY, tmp_path / "other", callback=f"{file}:Tracker")
    with pytest.raises(CallbackError, match=r"\[\] is no function and has none of on_start, on_step"):
        Callbacks([[]])


def test_model_loss_and_callback_of_one_file_share_its_variables_in_each_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("""
import tensorflow as tf

from tests.nets import tiny

class Note:
    called = ()

    def on_step(self, step, metrics):
        self.called += (step,)

    def on_end(self, run):
        others = [each for each in self.called if each != "loss"]
        (run.directory / "called").write_text(f"{others} {len(others) < len(self.called)}")

note = Note()

def net(image_size, num_classes):
    note.called += ("net",)
    return tiny(image_size, num_classes)

def loss(labels, logits):
    note.called += ("loss",)
    return tf.nn.softmax_cross_entropy_with_logits(labels, logits)
""")
    config = replace(TINY, train_dir=str(tmp_path), max_steps=2, seeds="3,4", model=f"{file}:net")
    start_training(replace(config, loss=f"{file}:loss", callback=f"{file}:note"), ShutdownHandler())
    for seed in ("seed3", "seed4"):
        assert (tmp_path / seed / "called").read_text() == "['net', 1, 2] True"
