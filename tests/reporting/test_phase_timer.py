import json
import random

import pytest

from cifar_towers.config.schedules import ImageSizeSchedule, RunLength
from cifar_towers.reporting import phase_timer
from cifar_towers.reporting.phase_timer import FORWARD_SHARE, MIN_STEPS, PhaseTimer, TimeLeft, training_seconds


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


LENGTH = RunLength(50, 400, 400)
STEP_SECONDS = {24: 2.0, 32: 3.9}  # the larger images take 10 % more than their pixels say
COMPILE_SECONDS, EVALUATE_SECONDS = 14.0, 17.0
EVALUATE_EVERY, IMAGES, VIEWS = 100, 10_000, 6


def images_left(step):
    """Count evaluations of the 10,000 images at steps 100, 200 and 300, and of six views of each at the end."""
    return IMAGES * (sum(due >= step for due in (100, 200, 300)) + VIEWS)


class Run:
    """A simulated run: `estimates[step]` and `clock[step]` in seconds."""

    def __init__(self, first_step=0, earlier=()):
        rng = random.Random(0)
        self.timer, size_at = PhaseTimer(), ImageSizeSchedule("0=24,50%=32", 32).at(LENGTH)
        self.timer.resume({"seconds": dict(earlier)}, {})
        estimate = TimeLeft(LENGTH, 1000, self.timer, size_at, images_left)
        self.estimates, self.clock, seconds, compiled = {}, {}, 0.0, set()
        for step in range(first_step + 1, LENGTH.last + 1):
            size = size_at(step - 1)
            phase = "train" if size in compiled else "compile"
            took = STEP_SECONDS[size] * rng.uniform(0.9, 1.1) + COMPILE_SECONDS * (phase == "compile")
            compiled.add(size)
            self.timer.seconds[phase] += took
            seconds += took
            estimate.end_step(step, phase == "train")
            self.estimates[step], self.clock[step] = estimate.seconds(), seconds
            if step % EVALUATE_EVERY == 0 and step < LENGTH.last:
                self.timer.seconds["evaluate"] += EVALUATE_SECONDS
                seconds += EVALUATE_SECONDS
        self.total = seconds + VIEWS * EVALUATE_SECONDS


@pytest.mark.parametrize(("first_step", "earlier"), [(0, {}), (130, {"train": 5000.0, "evaluate": 900.0})])
def test_estimate_is_within_15_percent(first_step, earlier):
    """From a tenth of the run on, though later images are larger; also where the run was resumed."""
    run = Run(first_step, earlier)
    for step, left in run.estimates.items():
        if step >= first_step + 40:
            actual = run.total - run.clock[step]
            assert left == pytest.approx(actual, rel=0.15), step


def test_no_estimate_before_enough_steps():
    estimates = Run().estimates
    assert [step for step, left in estimates.items() if left is None] == list(range(1, MIN_STEPS + 1))


def test_evaluation_is_estimated_at_its_own_image_size_before_it_was_timed():
    """A run of 20 of 400 steps ends with smaller images than those it is evaluated on."""
    timer, length = PhaseTimer(), LENGTH._replace(last=20)
    size_at = ImageSizeSchedule("0=24,50%=32", 32).at(length)
    estimate = TimeLeft(length, 1000, timer, size_at, lambda step: 60_000)
    for step in range(1, MIN_STEPS + 1):
        timer.seconds["train"] += 1.8
        estimate.end_step(step, is_traced=True)
    evaluation = 60 * FORWARD_SHARE * 1.8 * 1024 / 576  # the pixels of 32x32 and 24x24
    assert estimate.seconds() == pytest.approx(15 * 1.8 + evaluation)


def test_first_estimate_is_announced_once():
    """Also where steps that compile follow it, which are not timed."""
    timer = PhaseTimer()
    estimate = TimeLeft(RunLength(10, 40, 40), 10, timer, lambda step: 32, lambda step: 0)
    announced = []
    for step in range(1, 13):
        timer.seconds["compile" if step in (1, 7, 8) else "train"] += 1.0
        announced += [step] * estimate.end_step(step, step not in (1, 7, 8))
    assert announced == [1 + MIN_STEPS]


def test_rollback_counts_steps_again():
    timer = PhaseTimer()
    estimate = TimeLeft(RunLength(10, 40, 40), 10, timer, lambda step: 32, lambda step: 0)
    for step in (*range(1, 21), *range(11, 16)):
        timer.seconds["train"] += 1.0
        estimate.end_step(step, is_traced=True)
    assert estimate.seconds() == pytest.approx(25.0)
