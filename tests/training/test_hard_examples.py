"""Training on the hardest part of each batch: which that is, and that nothing else is different."""

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.errors import UsageError
from cifar_towers.training import build
from cifar_towers.training.step import gather_rows
from tests.configs import TINY_NET
from tests.training.runs import Run

HARDEST = {"model": TINY_NET, "shift": 0, "batch_size": 16, "hard_example_pool": 32, "crop": 20}
HARDEST |= {"learning_rate": 0.5, "momentum": 0.8, "label_smoothing": 0.2, "whitening_images": 60}
STEPS = 3


def make_config(**settings):
    return TrainConfig(**HARDEST | settings)


def assert_same(one, other):
    """To rounding: another graph may add up in another order."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], 1e-5, 1e-7, err_msg=name)


@pytest.mark.parametrize(("count", "micro_batches"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_training_uses_the_examples_with_the_highest_proxy_losses(towers, examples, count, micro_batches):
    """Step by step the same as two trainings apart: of the small net on all, of the large one on those alone
    whose losses, by the small net as it is before the step, are the highest."""
    settings = {"ema_decay": 0.9, "micro_batches": micro_batches}
    both = Run(towers(count), examples, make_config(**settings))
    small = Run(towers(count), examples, build.proxy_config(both.config))
    alone = Run(towers(count), examples, make_config(hard_example_pool=0, **settings))
    for number in range(STEPS):
        batch = both.batches.at(number)
        by_hand = losses(small, batch, count * micro_batches)
        metrics = both.step(number)
        assert set(metrics.hard_examples) == set(np.argsort(by_hand)[-16:])
        assert (np.diff(metrics.hard_examples) > 0).all()
        assert metrics.updated and metrics.proxy.updated
        results = small.step(number, batch, both.rates(number))  # so that its whitening rests
        assert results.loss == pytest.approx(metrics.proxy.loss, rel=1e-5)
        results = alone.step(number, gather_rows(batch, metrics.hard_examples))
        assert results.accuracy == metrics.accuracy and results.loss == pytest.approx(metrics.loss, rel=1e-5)
    assert_same(both.values("proxy."), small.values())
    assert_same({n: v for n, v in both.values().items() if not n.startswith("proxy.")}, alone.values())


def losses(run, batch, parts):
    """Return the recipe's loss of each example by the state's net, whose batch norm sees one of so many parts."""
    images = build.make_augmentation(run.config, CIFAR10).augment(batch.images, batch.draws)
    parts = [
        run.state.model.stateless_call(*run.state.read_variables(), part, training=True)
        for part in tf.split(images, parts)
    ]
    chances = tf.nn.log_softmax(tf.concat([logits for logits, _ in parts], 0)).numpy()
    true = chances[np.arange(len(chances)), batch.labels]
    return -0.8 * true - 0.2 * chances.mean(1)


def test_two_towers_select_the_examples_one_selects(towers, examples):
    """Batch norm takes the whole batch's statistics in both, so that only the order of sums is different."""
    config = make_config(model="cifarnet", crop=24, batch_statistics="synchronized")
    one, two = (Run(towers(count), examples, config) for count in (1, 2))
    for number in range(STEPS):
        results = [run.step(number) for run in (one, two)]
        np.testing.assert_array_equal(*(metrics.hard_examples for metrics in results))
        assert results[0].loss == pytest.approx(results[1].loss, rel=1e-4)


def test_nonfinite_proxy_is_reported_and_not_updated(towers, examples):
    run = Run(towers(2), examples, make_config())
    kernel = run.state.proxy.weights[1]
    kernel.assign(tf.fill(kernel.shape, np.inf))
    before = run.values()
    metrics = run.step()
    assert metrics.updated and not metrics.proxy.updated and (metrics.nonfinite_towers == -1).all()
    after = run.values()
    moved = {name for name, value in before.items() if not np.array_equal(after[name], value, equal_nan=True)}
    assert {"proxy.step", "step", "model.dense.kernel"} <= moved
    assert not [name for name in moved if name.startswith(("proxy.model", "proxy.optimizer"))]


@pytest.mark.parametrize(
    ("settings", "towers", "message"),
    [
        ({"hard_example_pool": 30, "num_gpus": 4}, 0, "hard_example_pool=30 .*4 towers.* 28 and 32"),
        ({"strategy": "mirrored"}, 0, "is for strategy=towers"),
        ({"strategy": "stages"}, 0, "is for strategy=towers"),
        ({"hard_example_pool": 512}, 0, "a batch of 512 is more than the 480"),
        ({"batch_size": 1000, "hard_example_pool": 1500}, 8, "hard_example_pool=1500 .*8 towers.* 1496 and 1504"),
        ({"batch_size": 1000, "hard_example_pool": 1001}, 2, "hard_example_pool=1001 .*2 towers.* 1002"),
    ],
)
def test_unsupported_settings_are_refused(examples, settings, towers, message):
    with pytest.raises(UsageError, match=message):
        config = make_config(**settings)
        config.check_shares(towers) if towers else build.make_batches(config, examples)
