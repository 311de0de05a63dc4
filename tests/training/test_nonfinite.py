"""Steps that are not finite: the update is skipped, the step is counted, and the message names the
origin.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.runs.checkpoint import first_nonfinite
from cifar_towers.training.diagnostics import Health, describe_nonfinite
from cifar_towers.training.runner import FinishedStep
from tests.helpers.configs import TINY_NET, recipe
from tests.helpers.messages import lines_with
from tests.helpers.step_runs import StepRun

NET = recipe("smoke", crop=20, shift=0, batch_size=24, ema_decay=0.9, lookahead=True)
NET = replace(NET, model=TINY_NET)
WAYS = [{}, {"strategy": "mirrored"}]
WAYS += [pytest.param({"batch_statistics": "synchronized"}, marks=pytest.mark.slow)]


def same(before, after):
    return all(
        np.array_equal(value, after[name]) for name, value in before.items() if name != "step"
    )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())) or "towers")
def test_nonfinite_step_changes_nothing_and_names_its_tower(towers, examples, way):
    run = StepRun(towers(2), examples, replace(NET, **way))
    rates = run.rates(rate=0.01)
    batch = run.batches.at(0)

    assert run.step(0, batch, rates).updated

    before = run.values()
    for example in (3, 20):
        images = tf.cast(batch.images, tf.float32).numpy()
        images[example] = np.inf  # a single NaN could get lost: max pooling passes over it
        metrics = run.step(0, batch._replace(images=tf.constant(images)), rates)
        assert not metrics.updated
        assert same(before, run.values())
        assert not first_nonfinite(run.values())
        # synchronized norms spread it before any loss is taken
        is_everywhere = way.get("batch_statistics") == "synchronized"
        named = "tower_0 and tower_1" if is_everywhere else f"tower_{example // 12}"
        message = describe_nonfinite(metrics, run.towers)
        assert message == f"the loss of {named} is not finite"

    assert run.step(0, batch, rates).updated
    assert not same(before, run.values())
    assert run.state.step.numpy() == 4


def test_a_gradient_that_is_not_finite_is_named_by_its_norm(towers):
    metrics = SimpleNamespace(tower_losses=np.array([1.0, 2.0]))
    assert describe_nonfinite(metrics, towers(2)) == "the norm of the mean gradient is not finite"


def finished(step, finite, proxy_finite=True):
    """Return a step of a net and its proxy whose losses are finite, or not."""

    def metrics(finite):
        return SimpleNamespace(updated=finite, tower_losses=np.array([0.0 if finite else np.nan]))

    return FinishedStep(
        step, np.array([7, 8]), {}, 32, metrics(finite), proxy_metrics=metrics(proxy_finite)
    )


def test_skipped_steps_are_counted_in_all_and_in_a_row(towers):
    """A skipped update of the proxy is no skipped step, and its own row ends the run, too."""
    health = Health(towers(1))
    later = Health(towers(1))
    steps = (
        finished(6, True),
        finished(7, False),
        finished(8, True),
        finished(9, False),
        finished(10, True, False),
    )
    lines = [health.record(step) for step in steps]

    assert lines[0] == lines[2] == []

    (of_step_7,) = lines[1]
    (of_step_9,) = lines[3]
    (of_step_10,) = lines[4]
    assert lines_with(of_step_7, "step 7 ", "1 in a row", "loss of tower_0")
    assert lines_with(of_step_9, "step 9 ", "1 in a row")
    assert "proxy" not in of_step_9
    assert lines_with(of_step_10, "proxy's update of step 10 ", "1 in a row", "loss of tower_0")
    assert health.metadata() == {
        "skipped_steps": 2,
        "skipped_in_a_row": 0,
        "proxy_skipped_in_a_row": 1,
    }

    later.restore(health.metadata() | {"step": 20})
    assert len(later.record(finished(21, False, False))) == 2
    assert not later.has_diverged

    later.record(finished(22, True, False))
    assert later.has_diverged
    assert later.skipped_steps == 3
