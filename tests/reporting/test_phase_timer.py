import json

import pytest

from cifar_towers.reporting import phase_timer
from cifar_towers.reporting.phase_timer import PhaseTimer, training_seconds


@pytest.fixture
def spend(monkeypatch):
    """spend(seconds): advances the clocks that a timer reads."""
    now = [100.0]
    monkeypatch.setattr(phase_timer.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(phase_timer.time, "time", lambda: 1_750_000_000 + now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_seconds_by_phase_and_images_per_second(spend):
    timer = PhaseTimer()
    timer.resume({"seconds": {"train": 3.0, "save": 1.0}, "images": 300}, {})
    for phase, seconds, is_traced in (("compile", 50, False), ("input", 1, True), ("input", 1, True)):
        spend(seconds)
        timer.end_phase(phase)
        spend(2)
        timer.end_step(100, is_traced)
    spend(7)
    timer.end_phase("evaluate")
    assert timer.seconds == {"compile": 52, "input": 2, "train": 7, "evaluate": 7, "save": 1}
    assert timer.images == 500 and timer.images_per_sec() == 500 / 9 and training_seconds(timer.seconds) == 61
    assert timer.recent_rates() == pytest.approx((200 / 6, 2 / 6))


def test_rates_are_unknown_until_a_step_is_timed(spend):
    timer = PhaseTimer()
    assert timer.images_per_sec() is None
    timer.resume({"seconds": {"train": 3.0}, "images": 300}, {})
    spend(2)
    timer.end_step(100, is_traced=False)
    assert timer.recent_rates() == (None, None)
    assert timer.images_per_sec() == 100  # of the start before


@pytest.fixture
def process(spend):
    """process(saved, newest, steps): a process of a run, which ends without a word; and what it left.

    It takes 5 s to start, 10 s to compile, and 1.5 s of input, 2 s of training and 0.5 s of logging for a step.
    """

    def run(saved=None, newest=None, steps=3):
        timer = PhaseTimer()
        spend(1)  # before it knows that it resumes
        timer.resume(saved or {}, newest or timer.metadata())
        for phase, seconds in (("start", 4), ("compile", 10)):
            spend(seconds)
            timer.end_phase(phase)
        take(timer, steps)
        return timer

    def take(timer, steps):
        for _ in range(steps):
            spend(1.5)
            timer.end_phase("input")
            spend(2)
            timer.end_step(100, is_traced=True)
            spend(0.5)
            timer.end_phase("report")

    run.take = take
    return run


def record(timer):
    """Return what a checkpoint or times.json would hold."""
    return json.loads(json.dumps(timer.metadata()))


def test_steps_of_a_killed_process_are_lost_and_the_parts_are_the_whole(process, spend):
    """A process saves its third step and is killed after its seventh; ten seconds later another one starts."""
    timer = process(steps=3)
    saved = record(timer)
    process.take(timer, 4)
    newest = record(timer)
    spend(0.25)  # of a step that it never ends
    spend(10)
    timer = process(saved, newest, steps=2)
    steps = {"train": 10, "input": 7.5, "report": 2.5}
    assert timer.seconds == steps | {"start": 10, "compile": 20, "lost": 16, "not_running": 10.25}
    assert (timer.step, timer.lost_steps, timer.images) == (5, 4, 500)
    summary = timer.summary()
    assert sum(summary["seconds"].values()) == 15 + 7 * 4 + 10.25 + 15 + 2 * 4
    assert summary["goodput"] == 10 / sum(summary["seconds"].values()) and summary["lost_steps"] == 4
    assert summary["images_per_sec"] == 500 / 20 and training_seconds(timer.seconds) == 56


def test_two_processes_that_save_nothing_are_accounted_for(process, spend):
    """They resume from the same checkpoint; the third process goes on, and the one after it finds all saved."""
    timer = process(steps=3)
    saved = newest = record(timer)
    for lost in (2, 1):
        spend(100)
        newest = record(process(saved, newest, steps=lost))
    spend(100)
    timer = process(saved, newest, steps=1)
    assert timer.seconds == {
        **{"train": 8, "input": 6, "report": 2, "start": 20, "compile": 40}, "lost": 12, "not_running": 300,
    }  # fmt: skip
    assert (timer.step, timer.lost_steps) == (4, 3)
    saved = record(timer)
    spend(50)
    timer = process(saved, saved, steps=0)
    assert timer.seconds["lost"] == 12 and timer.seconds["not_running"] == 350 and timer.lost_steps == 3


def test_process_without_any_checkpoint_counts_from_the_first_start(process, spend):
    newest = record(process(steps=2))
    spend(7)
    timer = process({}, newest, steps=1)
    expected = {"train": 2, "input": 1.5, "report": 0.5, "start": 10, "compile": 20, "lost": 8, "not_running": 7}
    assert timer.seconds == expected and (timer.step, timer.lost_steps, timer.images) == (1, 2, 100)


def test_rollback_loses_steps_in_the_middle_of_a_process(process, spend):
    """Go back from step 5 to 3; a process that is killed after that loses what it trained since, and no more."""
    timer = process(steps=3)
    saved = record(timer)
    process.take(timer, 2)
    timer.resume(saved, timer.metadata())
    assert timer.seconds == {"start": 5, "compile": 10, "train": 6, "input": 4.5, "report": 1.5} | {
        "lost": 8, "not_running": 0,
    }  # fmt: skip
    assert (timer.step, timer.lost_steps, timer.images) == (3, 2, 300)
    process.take(timer, 1)
    timer = process(saved, record(timer), steps=4)
    assert timer.seconds["lost"] == 12 and timer.seconds["train"] == 14 and (timer.step, timer.lost_steps) == (7, 3)


def test_after_a_power_loss_the_time_since_the_checkpoint_was_not_running(process, spend):
    """The file that the process left last is gone, or is older than the checkpoint."""
    timer = process(steps=1)
    older = record(timer)
    process.take(timer, 2)
    timer.lost_steps, timer.seconds["lost"] = 5, 3.0
    spend(3)  # so long
    saved = record(timer)
    spend(17)
    for newest in ({}, older):
        begun = process(saved, newest, steps=0)
        assert begun.seconds["train"] == 6 and begun.seconds["lost"] == 3 and begun.lost_steps == 5
    assert begun.seconds["not_running"] == 17 + 15  # the second one started after the first one


def test_run_of_an_earlier_version_has_no_goodput(process):
    saved = {"seconds": {"train": 6.0, "start": 5.0}, "images": 300, "step": 3}
    timer = process(saved, {}, steps=1)
    assert timer.seconds["train"] == 8 and timer.images == 400 and "not_running" not in timer.seconds
    assert timer.summary()["goodput"] is None and timer.metadata()["first_start"] is None


def test_clock_that_was_set_back_does_not_count_backwards(process, spend):
    saved = record(process(steps=3))
    spend(-1000)
    assert process(saved, saved, steps=1).seconds["not_running"] == 0
