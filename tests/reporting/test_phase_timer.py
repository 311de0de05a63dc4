import pytest

from cifar_towers.reporting import phase_timer
from cifar_towers.reporting.phase_timer import PhaseTimer, training_seconds


@pytest.fixture
def spend(monkeypatch):
    """spend(seconds): advances the clock that a timer reads."""
    now = [100.0]
    monkeypatch.setattr(phase_timer.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_seconds_by_phase_and_images_per_second(spend):
    """With those of the checkpoint that the run goes on from."""
    timer = PhaseTimer()
    timer.resume({"seconds": {"train": 3.0, "save": 1.0}, "images": 300})
    for phase, seconds, is_traced in (
        ("compile", 50, False),
        ("input", 1, True),
        ("input", 1, True),
    ):
        spend(seconds)
        timer.end_phase(phase)
        spend(2)
        timer.end_step(100, is_traced)
        spend(0.5)
        timer.end_phase("report")
    spend(7)
    timer.end_phase("evaluate")
    assert timer.metadata() == {
        "seconds": {"compile": 52, "input": 2, "train": 7, "report": 1.5, "evaluate": 7, "save": 1},
        "images": 500,
    }
    assert timer.images_per_sec() == 500 / 10.5 and training_seconds(timer.seconds) == 62.5
    assert timer.recent_rates() == pytest.approx(
        (200 / 7, 2 / 7)
    )  # with the logging before each of both steps
    assert timer.summary() == {"seconds": dict(timer.seconds), "images_per_sec": 500 / 10.5}


def test_rates_are_unknown_until_a_step_is_timed(spend):
    timer = PhaseTimer()
    assert timer.images_per_sec() is None
    timer.resume({"seconds": {"train": 3.0}, "images": 300})
    spend(2)
    timer.end_step(100, is_traced=False)
    assert timer.recent_rates() == (None, None)
    assert timer.images_per_sec() == 100  # of the start before
