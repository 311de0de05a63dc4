"""When skipped steps end a run, where their tensors are looked for, and what rollbacks do to the learning rates."""

from types import SimpleNamespace

import numpy as np
import pytest

from cifar_towers.errors import DivergedError
from cifar_towers.towers import Tower
from cifar_towers.training.health import MAX_ROLLBACKS, Health
from cifar_towers.training.results import HardExamples
from cifar_towers.training.step_runner import FinishedStep


class Net:
    """The part of a `TrainState` that `Health` reads."""

    weight_names, update_names, proxy = ["w"], ["w"], None
    loss_scale = SimpleNamespace(can_shrink=lambda scale: False)


def make_health(max_in_a_row=2, state=None):
    """Return (health, the lines that it logs, the arguments of its calls of `locate`)."""
    lines, located = [], []

    def locate(*arguments):
        located.append(arguments)
        return "; located"

    return Health(max_in_a_row, state or Net(), [Tower(0, "/CPU:0")], locate, lines.append), lines, located


def finished(step, finite, proxy_finite=None):
    """Return a step whose loss is finite, or not; with a proxy if `proxy_finite` is given."""

    def metrics(finite, hard_examples=None):
        return SimpleNamespace(
            updated=finite, hard_examples=hard_examples, losses={"total_loss": 0.0}, loss_scale=1.0,
            tower_losses=np.array([1.0 if finite else np.nan]), nonfinite_towers=np.array([-1 if finite else 0]),
            nonfinite_update=-1,
        )  # fmt: skip

    selected = None if proxy_finite is None else HardExamples(np.array([0]), metrics(proxy_finite))
    return FinishedStep(step, np.array([7, 8]), {}, 32, metrics(finite, selected))


def test_too_many_skipped_steps_in_a_row_end_a_run():
    health, lines, _ = make_health(max_in_a_row=2)
    for step, finite in ((6, True), (7, False), (8, True), (9, False)):
        health.check(finished(step, finite))
    assert lines[0] == "step 7 was skipped (1 in a row, 2 end the run): total_loss of tower_0 is not finite; located"
    with pytest.raises(DivergedError, match=r"step 10 was skipped \(2 in a row"):
        health.check(finished(10, False))
    assert health.metadata() == {"skipped_steps": 3, "skipped_in_a_row": 2, "rollbacks": 0}
    assert health.last_good_step == 8


def test_tensors_are_looked_for_only_in_the_state_they_were_computed_from():
    health, lines, located = make_health(max_in_a_row=9)
    health.check(finished(1, False), later=[finished(2, False)])  # which was skipped too: the weights are the same
    health.check(finished(2, False))
    health.check(finished(3, False), later=[finished(4, True)])  # which moved the weights
    assert len(located) == 2 and [line.endswith("located") for line in lines] == [True, True, False]


def test_tensors_of_the_proxy_are_looked_for_in_its_own_state():
    state = Net()
    state.proxy = Net()
    health, lines, located = make_health(9, state)
    health.check(finished(1, True, proxy_finite=False), later=[finished(2, True, proxy_finite=False)])
    health.check(finished(2, True, proxy_finite=False), later=[finished(3, True, proxy_finite=True)])
    assert [arguments[0] for arguments in located] == [state.proxy] and "proxy: total_loss" in lines[0]


def test_every_rollback_halves_the_rates_up_to_a_limit():
    (health, _, _), error = make_health(), DivergedError("the last")
    for number in range(1, MAX_ROLLBACKS + 1):
        health.roll_back(error, "smaller rates")
        assert health.rate_factor == 0.5**number and health.in_a_row == 0
    with pytest.raises(DivergedError, match="the last; .* start again with --overwrite and smaller rates$"):
        health.roll_back(error, "smaller rates")
    later, _, _ = make_health()
    counts = {"skipped_steps": 4, "skipped_in_a_row": 1, "rollbacks": 2}  # killed before it was saved again
    later.restore(counts | {"step": 20})
    assert later.metadata() == counts and later.last_good_step == 19
