"""Non-finite steps: the update is skipped, and the message names the origin."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.checkpointing.checkpoint import first_nonfinite
from cifar_towers.training import diagnostics, state
from tests.configs import TINY_NET, recipe
from tests.training.runs import Run

NET = recipe("smoke", crop=20, shift=0, batch_size=24, whitening_images=60, ema_decay=0.9, lookahead=True)
NET = replace(NET, model=TINY_NET)
WAYS = [
    {},
    {"strategy": "mirrored"},
    pytest.param({"batch_statistics": "synchronized", "optimizer": "adamw"}, marks=pytest.mark.slow),
    {"model": "speednet_proxy", "micro_batches": 2, "optimizer": "muon", "variable_placement": "round_robin"},
]


@pytest.fixture(scope="module")
def plain(towers, examples):
    """Make a run of shared variables on towers, for tests that leave it unchanged."""
    return Run(towers(2), examples, NET)


def make_step(run, batch=None, rate=0.01):
    return run.step(0, batch, run.rates(rate=rate))


def describe(run, metrics):
    return diagnostics.describe_nonfinite(metrics, run.towers, run.state.weight_names, run.state.update_names)


def same(before, after):
    return all(np.array_equal(value, after[name]) for name, value in before.items() if name != "step")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())) or "towers")
def test_nonfinite_step_changes_nothing_and_names_its_tower(towers, examples, plain, way):
    run = Run(towers(2), examples, replace(NET, **way)) if way else plain
    begun = run.state.step.numpy()
    assert make_step(run).updated
    before = run.values()
    for example in (3, 20):
        batch = run.batches.at(0)
        images = tf.cast(batch.images, tf.float32).numpy()
        images[example] = np.inf  # a single NaN could get lost: max pooling passes over it
        metrics = make_step(run, batch._replace(images=tf.constant(images)))
        synchronized = way.get("batch_statistics") == "synchronized"  # there it spreads before any loss is taken
        assert not metrics.updated and same(before, run.values()) and not first_nonfinite(run.values())
        assert f"cross_entropy of tower_{0 if synchronized else example // 12} " in describe(run, metrics)
        assert np.isfinite(list(metrics.smoothed_losses.values())).all()
    assert make_step(run).updated and not same(before, run.values())
    assert run.state.step.numpy() == begun + 4


def test_update_that_would_overflow_the_weights_is_skipped(plain):
    before = plain.values()
    metrics = make_step(plain, rate=np.inf)
    assert not metrics.updated and same(before, plain.values()) and (metrics.nonfinite_towers == -1).all()
    assert describe(plain, metrics).startswith("the new value of ")


def test_index_of_the_first_nonfinite_tensor():
    tensors = [tf.zeros(3), None, tf.constant([1, 2]), tf.constant([0.0, np.inf]), np.nan * tf.ones(2)]
    assert int(state.first_nonfinite_index(tensors)) == 3
    assert int(state.first_nonfinite_index([tf.zeros([0]), tf.ones([], tf.bfloat16)])) == -1
