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


def finished(step, finite):
    """Return a step whose losses are finite, or not."""
    metrics = SimpleNamespace(updated=finite, tower_losses=np.array([0.0 if finite else np.nan]))
    return FinishedStep(step, np.array([7, 8]), {}, 32, metrics)


def test_skipped_steps_are_counted_in_all_and_in_a_row(towers):
    health = Health(towers(1))
    later = Health(towers(1))
    steps = (finished(6, True), finished(7, False), finished(8, True), finished(9, False))
    lines = [health.record(step) for step in steps]

    assert lines[0] == lines[2] == ""
    assert lines_with(lines[1], "step 7 ", "1 in a row", "loss of tower_0")
    assert lines_with(lines[3], "step 9 ", "1 in a row")
    assert health.metadata() == {"skipped_steps": 2, "skipped_in_a_row": 1}

    later.restore(health.metadata() | {"step": 20})
    assert lines_with(later.record(finished(21, False)), "step 21 ", "2 in a row")
    assert not later.has_diverged

    later.record(finished(22, False))
    assert later.has_diverged
    assert later.skipped_steps == 4
