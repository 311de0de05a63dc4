"""When skipped steps end a run, and what names them."""

from types import SimpleNamespace

import numpy as np
import pytest

from cifar_towers.errors import DivergedError
from cifar_towers.towers import Tower
from cifar_towers.training.health import Health
from cifar_towers.training.results import HardExamples
from cifar_towers.training.step_runner import FinishedStep


def make_health(proxy=None):
    """Return (health, the lines that it logs)."""
    lines = []
    state = SimpleNamespace(weight_names=["w"], update_names=["w"], proxy=proxy)
    return Health(state, [Tower(0, "/CPU:0")], lines.append), lines


def finished(step, finite, proxy_finite=None):
    """Return a step whose loss is finite, or not; with a proxy if `proxy_finite` is given."""

    def metrics(finite, hard_examples=None):
        return SimpleNamespace(
            updated=finite, hard_examples=hard_examples, losses={"total_loss": 0.0}, nonfinite_update=-1,
            nonfinite_towers=np.array([-1 if finite else 0]),
        )  # fmt: skip

    selected = None if proxy_finite is None else HardExamples(np.array([0]), metrics(proxy_finite))
    return FinishedStep(step, np.array([7, 8]), {}, 32, metrics(finite, selected))


def test_the_third_skipped_step_in_a_row_ends_a_run():
    health, lines = make_health()
    for step, finite in ((6, True), (7, False), (8, True), (9, False), (10, False)):
        health.check(finished(step, finite))
    assert lines[0] == "step 7 was skipped (1 in a row, 3 end the run): total_loss of tower_0 is not finite"
    with pytest.raises(DivergedError, match=r"step 11 was skipped \(3 in a row"):
        health.check(finished(11, False))
    assert health.metadata() == {"skipped_steps": 4, "skipped_in_a_row": 3}
    later, _ = make_health()
    later.restore({"skipped_steps": 4, "skipped_in_a_row": 2, "step": 20})
    with pytest.raises(DivergedError, match="step 21"):
        later.check(finished(21, False))


def test_a_step_of_the_proxy_counts_too():
    health, lines = make_health(proxy=SimpleNamespace(weight_names=["v"], update_names=["v"]))
    health.check(finished(1, True, proxy_finite=False))
    assert lines == ["step 1 was skipped (1 in a row, 3 end the run): proxy: total_loss of tower_0 is not finite"]
