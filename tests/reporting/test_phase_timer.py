import pytest

from cifar_towers.reporting import phase_timer
from cifar_towers.reporting.phase_timer import PhaseTimer, training_seconds


@pytest.fixture
def clock(monkeypatch):
    """Return the clock that a timer reads, with `now` and `spend(seconds)`."""

    class Clock:
        now = 100.0

        def spend(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(phase_timer.time, "monotonic", lambda: clock.now)
    return clock


def test_seconds_by_phase_and_images_per_second(clock):
    """With the seconds and images of the checkpoint that the run goes on from."""
    timer = PhaseTimer()
    clock.spend(4)
    timer.end_start()
    timer.restore({"seconds": {"train": 3.0, "save": 1.0}, "images": 300})

    def slow_batches():
        for index in range(3):
            clock.spend(1)
            yield index

    for index in timer.inputs(slow_batches()):
        if index == 0:
            with timer.phase("compile"):
                clock.spend(50)
            timer.end_compilation()
        else:
            with timer.phase("train"):
                timer.note_idle(None)
                clock.spend(2)
            timer.end_step(100)
        with timer.phase("report"):
            clock.spend(0.5)
    with timer.phase("evaluate"):
        clock.spend(7)

    seconds = {"start": 4, "compile": 50, "input": 3, "train": 7, "report": 1.5, "evaluate": 7}
    assert timer.metadata() == {"seconds": {**seconds, "save": 1}, "images": 500}
    assert timer.images_per_sec() == 500 / 11.5
    assert training_seconds(timer.seconds) == 61.5
    # with the logging before each of both steps
    assert timer.recent_rates() == pytest.approx((200 / 7, 2 / 7))
    assert timer.summary() == {"seconds": dict(timer.seconds), "images_per_sec": 500 / 11.5}


@pytest.mark.parametrize(
    ("step_ended", "idle"),
    [
        (None, 3.0),  # no step ran
        (90.0, 3.0),  # the step before had ended when the batch was asked for
        (101.0, 2.0),
        (105.0, 0.0),  # it still ran when the batch came
    ],
)
def test_the_device_is_idle_from_the_end_of_a_step_until_the_next_batch(clock, step_ended, idle):
    timer = PhaseTimer()

    def batches():
        clock.spend(3)
        yield "batch"

    for _ in timer.inputs(batches()):
        with timer.phase("train"):
            clock.spend(7)
            timer.note_idle(step_ended)
        timer.end_step(100)

    assert timer.recent_rates() == (100 / 10, idle / 10)


def test_rates_are_unknown_until_a_step_is_timed(clock):
    timer = PhaseTimer()

    assert timer.images_per_sec() is None

    timer.restore({"seconds": {"train": 3.0}, "images": 300})
    with timer.phase("compile"):
        clock.spend(2)
    timer.end_compilation()

    assert timer.recent_rates() == (None, None)
    assert timer.images_per_sec() == 100  # of the start before
