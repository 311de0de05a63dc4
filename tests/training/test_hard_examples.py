"""Training on the hardest part of each batch: which that is, and that nothing else is different."""

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.errors import UsageError
from cifar_towers.training import build
from cifar_towers.training.hard_examples import gather_rows
from tests.helpers.configs import TINY_NET
from tests.helpers.step_runs import StepRun

HARDEST = {"model": TINY_NET, "shift": 0, "batch_size": 16, "hard_example_pool": 32, "crop": 20}
HARDEST |= {"learning_rate": 0.5, "momentum": 0.8, "label_smoothing": 0.2}
STEPS = 3


def make_config(**settings):
    return TrainConfig(**HARDEST | settings)


def assert_same(one, other):
    """To rounding: another graph may add up in another order."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], 1e-5, 1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"micro_batches": 2}, 4),
        pytest.param({"batch_statistics": "synchronized"}, 1, marks=pytest.mark.slow),
    ],
)
def test_training_uses_the_examples_with_the_highest_proxy_losses(
    towers, examples, settings, parts
):
    """Step by step the same as two trainings apart: of the small net on all, of the large one on
    those alone whose losses, by the small net as it is before the step, are the highest.
    """
    both = StepRun(towers(2), examples, make_config(ema_decay=0.9, **settings))
    small = StepRun(towers(2), examples, build.proxy_config(both.config))
    alone = StepRun(
        towers(2), examples, make_config(hard_example_pool=0, ema_decay=0.9, **settings)
    )
    for number in range(STEPS):
        batch = both.batches.at(number)
        by_hand = losses(small, batch, parts)
        metrics = both.step(number)
        rows = both.selected.draws.example_index - batch.draws.example_index.numpy()[0]
        assert set(rows) == set(np.argsort(by_hand)[-16:])
        assert (np.diff(rows) > 0).all()
        assert metrics.updated
        assert both.proxy_metrics.updated
        results = small.step(number, batch)
        assert results.loss == pytest.approx(both.proxy_metrics.loss, rel=1e-5)
        results = alone.step(number, gather_rows(batch, rows))
        assert results.accuracy == metrics.accuracy
        assert results.loss == pytest.approx(metrics.loss, rel=1e-5)

    assert_same(both.values("proxy."), small.values())
    assert_same(
        {n: v for n, v in both.values().items() if not n.startswith("proxy.")}, alone.values()
    )


def losses(run, batch, num_parts):
    """Return the recipe's loss of each example by the state's net, whose batch norm sees one of so
    many parts.
    """
    images = build.make_augmentation(run.config, CIFAR10).augment(batch.images, batch.draws)
    variables = run.state.read_variables()
    logits = []
    for part in tf.split(images, num_parts):
        logits_of_part, _ = run.state.model.stateless_call(*variables, part, training=True)
        logits.append(logits_of_part)

    log_probabilities = tf.nn.log_softmax(tf.concat(logits, 0)).numpy()
    of_labels = log_probabilities[np.arange(len(log_probabilities)), batch.labels]
    smoothing = run.config.label_smoothing
    return -(1 - smoothing) * of_labels - smoothing * log_probabilities.mean(1)


def test_nonfinite_proxy_is_reported_and_not_updated(towers, examples):
    run = StepRun(towers(2), examples, make_config())
    kernel = run.hard_examples.proxy.weights[1]
    kernel.assign(tf.fill(kernel.shape, np.inf))
    before = run.values()
    metrics = run.step()

    assert metrics.updated
    assert not run.proxy_metrics.updated

    after = run.values()
    moved = {
        name
        for name, value in before.items()
        if not np.array_equal(after[name], value, equal_nan=True)
    }

    assert {"proxy.step", "step", "model.dense.kernel"} <= moved
    assert not [name for name in moved if name.startswith(("proxy.model", "proxy.optimizer"))]


@pytest.mark.parametrize(
    ("batch_size", "pool", "towers", "message"),
    [
        (16, 512, 0, "512.* 480"),  # more than there are examples
        (16, 30, 4, "hard_example_pool=30 .*4 .* 28 and 32"),
        (1000, 1500, 8, "hard_example_pool=1500 .*8 .* 1496 and 1504"),
        (1000, 1001, 2, "hard_example_pool=1001 .*2 .* 1002"),
    ],
)
def test_pools_that_cannot_be_drawn_or_shared_are_refused(
    examples, batch_size, pool, towers, message
):
    config = make_config(batch_size=batch_size, hard_example_pool=pool)
    with pytest.raises(UsageError, match=message):
        config.check_shares(towers) if towers else build.make_batches(config, examples)
