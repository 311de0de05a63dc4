"""Which steps count as skipped, and the line that says why."""

from types import SimpleNamespace

import numpy as np
import pytest

from cifar_towers.towers import Tower
from cifar_towers.training.diagnostics import Health
from cifar_towers.training.step import FinishedStep


def make_health(proxy=None):
    state = SimpleNamespace(weight_names=["w"], update_names=["w"], proxy=proxy)
    return Health(state, [Tower(0, "/CPU:0")])


def finished(step, finite, proxy_finite=None):
    """Return a step whose loss is finite, or not; with a proxy if `proxy_finite` is given."""

    def metrics(finite, proxy=None):
        return SimpleNamespace(
            updated=finite, proxy=proxy, losses={"total_loss": 0.0}, nonfinite_update=-1,
            nonfinite_towers=np.array([-1 if finite else 0]),
        )  # fmt: skip

    proxy = None if proxy_finite is None else metrics(proxy_finite)
    return FinishedStep(step, np.array([7, 8]), {}, 32, metrics(finite, proxy))


def test_skipped_steps_are_counted_in_all_and_in_a_row():
    health = make_health()
    steps = ((6, True), (7, False), (8, True), (9, False), (10, False))
    lines = [health.record(finished(step, finite)) for step, finite in steps]
    assert lines[1] == "step 7 was skipped (1 in a row, 3 end the run): total_loss of tower_0 is not finite"
    assert lines[0] == lines[2] == "" and lines[4].startswith("step 10 was skipped (2 in a row")
    assert health.metadata() == {"skipped_steps": 3, "skipped_in_a_row": 2}
    later = make_health()
    later.restore(health.metadata() | {"step": 20})
    assert later.record(finished(21, False)).startswith("step 21 was skipped (3 in a row")


@pytest.mark.parametrize("finite", [True, False])
def test_a_step_of_the_proxy_counts_too(finite):
    health = make_health(proxy=SimpleNamespace(weight_names=["v"], update_names=["v"]))
    origin = "proxy: total_loss" if finite else "total_loss"
    line = f"step 1 was skipped (1 in a row, 3 end the run): {origin} of tower_0 is not finite"
    assert health.record(finished(1, finite, proxy_finite=False)) == line
