"""Non-finite steps: the update is skipped, and the message names the origin."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data import synthetic
from cifar_towers.data.batches import Batches
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.training import build, nonfinite
from cifar_towers.training.results import to_numpy

NET = {
    "model": "speednet93",
    "crop": 20,
    "shift": 0,
    "batch_size": 24,
    "whitening_images": 60,
    "whitening_epochs": 1,
    "ema_decay": 0.9,
    "lookahead": True,
}
WAYS = [
    {},
    {"strategy": "mirrored"},
    pytest.param({"batch_statistics": "synchronized", "optimizer": "adamw"}, marks=pytest.mark.slow),
    {"micro_batches": 2, "optimizer": "muon", "variable_placement": "round_robin"},
]


@pytest.fixture(scope="module")
def examples():
    return synthetic.make(240, 0, 0)


class Run:
    """A step on two towers, and a batch for it."""

    def __init__(self, towers, examples, precision="float32", **settings):
        self.config, self.towers = TrainConfig(**NET | settings), towers(2)
        self.batch = Batches(examples, 24, 0).at(0)
        self.state, self.call, _ = build.make_training(
            self.config, self.towers, precision, examples, RunLength(10, 100, 100)
        )

    def step(self, batch=None, rate=0.01):
        rates = {name: tf.constant(rate) for name in self.state.optimizer.learning_rates(0)}
        return to_numpy(self.call(batch or self.batch, rates))

    def values(self):
        named = self.state.named_variables().items()
        return {name: v.numpy() for name, v in named if name != "step"}

    def with_infinity(self, example):
        """The batch with one image that is not finite. (A single NaN could get lost: max pooling passes over it.)"""
        images = tf.cast(self.batch.images, tf.float32).numpy()
        images[example] = np.inf
        return self.batch._replace(images=tf.constant(images))

    def describe(self, metrics):
        return nonfinite.describe_nonfinite(metrics, self.towers, self.state.weight_names, self.state.update_names)


@pytest.fixture(scope="module")
def plain(towers, examples):
    """A run of shared variables on towers, for tests that leave it unchanged."""
    return Run(towers, examples)


def same(before, after):
    return all(np.array_equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())) or "towers")
def test_nonfinite_step_changes_nothing_and_names_its_tower(towers, examples, plain, way):
    run = Run(towers, examples, **way) if way else plain
    begun = run.state.step.numpy()
    assert run.step().finite
    before = run.values()
    for example in (3, 20):
        metrics = run.step(run.with_infinity(example))
        synchronized = way.get("batch_statistics") == "synchronized"  # there it spreads before any loss is taken
        assert not metrics.finite and same(before, run.values()) and not run.state.first_nonfinite_variable()
        assert run.describe(metrics) == f"cross_entropy of tower_{0 if synchronized else example // 12} is not finite"
        assert np.isfinite(list(metrics.smoothed_losses.values())).all()
    assert run.step().finite and not same(before, run.values())
    assert run.state.step.numpy() == begun + 4


def test_first_nonfinite_layer_is_named(towers, examples):
    run = Run(towers, examples)
    images = build.make_augmentation(run.config, CIFAR10).evaluate(run.batch.images)
    assert nonfinite.first_nonfinite_layer(run.state.model, images) == ""
    assert nonfinite.first_nonfinite_layer(run.state.model, tf.where(images > 1, np.inf, images)) == "the images"
    assert nonfinite.first_nonfinite_layer(run.state.model, images * 1e38) == "the output of whitening"
    run.state.model.get_layer("group2_norm1").beta.assign([np.nan] * 128)
    assert nonfinite.first_nonfinite_layer(run.state.model, images) == "variable group2_norm1/beta"
    assert run.state.first_nonfinite_variable() == "model.group2_norm1.beta"


def test_update_that_would_overflow_the_weights_is_skipped(plain):
    before = plain.values()
    metrics = plain.step(rate=np.inf)
    assert not metrics.finite and same(before, plain.values()) and (metrics.nonfinite_towers == -1).all()
    assert plain.describe(metrics).startswith("the new value of ")


def test_index_of_the_first_nonfinite_tensor():
    inputs = keras.Input([2])
    model = keras.Model(inputs, keras.layers.Dense(10)(inputs))
    assert nonfinite.first_nonfinite_layer(model, tf.ones([1, 2])) == ""
    assert (
        int(
            nonfinite.first_nonfinite_index(
                [tf.zeros(3), None, tf.constant([1, 2]), tf.constant([0.0, np.inf]), np.nan * tf.ones(2)]
            )
        )
        == 3
    )
    assert int(nonfinite.first_nonfinite_index([tf.zeros([0]), tf.ones([], tf.bfloat16)])) == -1
