import pytest

from cifar_towers.reporting import phase_timer
from cifar_towers.reporting.phase_timer import PhaseTimer


@pytest.fixture
def spend(monkeypatch):
    """spend(seconds): advances the clock that a timer reads."""
    now = [100.0]
    monkeypatch.setattr(phase_timer.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_seconds_by_phase_and_images_per_second(spend):
    timer = PhaseTimer()
    timer.resume({"train": 3.0, "save": 1.0}, images=300)
    for phase, seconds, compiled in (("compile", 50, False), ("input", 1, True), ("input", 1, True)):
        spend(seconds)
        timer.end_phase(phase)
        spend(2)
        timer.end_step(100, compiled)
    spend(7)
    timer.end_phase("evaluate")
    assert timer.seconds == {"compile": 52, "input": 2, "train": 7, "evaluate": 7, "save": 1}
    assert timer.images == 500 and timer.images_per_sec() == 500 / 9 and timer.training_seconds == 61
    assert timer.recent_images_per_sec() == pytest.approx(200 / 6)
    assert timer.recent_input_wait() == pytest.approx(2 / 6)


def test_rates_are_unknown_until_a_step_is_timed(spend):
    timer = PhaseTimer()
    assert timer.images_per_sec() is None
    timer.resume({"train": 3.0}, images=300)
    spend(2)
    timer.end_step(100, compiled=False)
    assert timer.recent_images_per_sec() is None and timer.recent_input_wait() is None
    assert timer.images_per_sec() == 100  # of the start before


def test_phase_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="phase evaluation: one of start, train, input"):
        PhaseTimer().end_phase("evaluation")
