import itertools

import pytest

from cifar_towers.checkpointing import checkpoint, manager


class PhaseTimer:
    now = 0.0

    def monotonic(self):
        return self.now


class State:
    bad = ""

    def first_nonfinite_variable(self):
        return self.bad

    def named_variables(self):
        return {}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so; a save takes two seconds of it."""
    clock = PhaseTimer()
    monkeypatch.setattr(manager, "time", clock)
    monkeypatch.setattr(checkpoint, "save", lambda *_: setattr(clock, "now", clock.now + 2))
    return clock


def make(tmp_path, every=0):
    said = []
    return manager.CheckpointManager(tmp_path, State(), every, 3, said.append), said


def test_by_the_clock_saving_takes_a_hundredth_of_the_time(tmp_path, clock):
    kept, said = make(tmp_path)
    saved = []
    for step in range(1, 2000):
        clock.now += 1
        if kept.due(step, evaluated=step % 50 == 0):
            kept.save(step, {})
            saved.append(step)
    assert saved[0] == 30  # then 200 s of steps for a save of two seconds
    assert all(after - before == 200 for before, after in itertools.pairwise(saved))
    assert said[:2] == ["saved step 30", "saved step 230"]


def test_what_was_evaluated_is_saved_before_its_time(tmp_path, clock):
    kept, _ = make(tmp_path)
    clock.now += 1
    assert kept.due(1, evaluated=True) and not kept.due(1, evaluated=False)


def test_by_steps(tmp_path, clock):
    kept, _ = make(tmp_path, every=3)
    assert [step for step in range(1, 10) if kept.due(step, step == 4)] == [3, 6, 9]


def test_a_state_with_a_nan_is_not_saved(tmp_path, clock):
    kept, said = make(tmp_path)
    kept._state.bad = "model.head.kernel"
    assert not kept.save(7, {}) and kept.failed_saves == 1
    assert said == ["step 7 could not be saved (model.head.kernel is not finite); no checkpoint was written"]
