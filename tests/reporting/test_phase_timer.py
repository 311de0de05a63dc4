import random

import pytest

from cifar_towers.config.schedules import ImageSizeSchedule, RunLength
from cifar_towers.reporting import phase_timer
from cifar_towers.reporting.phase_timer import FORWARD_SHARE, MIN_STEPS, PhaseTimer, TimeLeft


@pytest.fixture
def spend(monkeypatch):
    """spend(seconds): advances the clock that a timer reads."""
    now = [100.0]
    monkeypatch.setattr(phase_timer.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_seconds_by_phase_and_images_per_second(spend):
    timer = PhaseTimer()
    timer.resume({"train": 3.0, "save": 1.0}, images=300)
    for phase, seconds, is_traced in (("compile", 50, False), ("input", 1, True), ("input", 1, True)):
        spend(seconds)
        timer.end_phase(phase)
        spend(2)
        timer.end_step(100, is_traced)
    spend(7)
    timer.end_phase("evaluate")
    assert timer.seconds == {"compile": 52, "input": 2, "train": 7, "evaluate": 7, "save": 1}
    assert timer.images == 500 and timer.images_per_sec() == 500 / 9 and timer.training_seconds == 61
    assert timer.recent_rates() == pytest.approx((200 / 6, 2 / 6))


def test_rates_are_unknown_until_a_step_is_timed(spend):
    timer = PhaseTimer()
    assert timer.images_per_sec() is None
    timer.resume({"train": 3.0}, images=300)
    spend(2)
    timer.end_step(100, is_traced=False)
    assert timer.recent_rates() == (None, None)
    assert timer.images_per_sec() == 100  # of the start before


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
        self.timer.resume(dict(earlier), 0)
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
