"""Loss terms, and those that a model adds by itself, by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.models.layers import synchronize
from cifar_towers.towers import run_on_towers_synchronized, split_batch
from cifar_towers.training.losses import cross_entropy
from cifar_towers.training.state import call_in_training


def test_smoothed_cross_entropy_by_hand():
    logits = tf.constant([[2.0, 0.0, 0.0, 0.0]])
    log_p = np.log(np.exp([2.0, 0, 0, 0]) / np.exp([2.0, 0, 0, 0]).sum())
    expected = -(0.85 * log_p[0] + 0.05 * log_p[1:].sum())
    assert float(cross_entropy(tf.constant([0]), logits, 0.2)[0]) == pytest.approx(
        expected, rel=1e-6
    )


class VectorLoss(keras.layers.Layer):
    """A layer that adds a loss for each example."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x, [1, 2, 3]))
        return x


def test_every_call_of_a_layer_adds_its_losses():
    """By hand: 1e-3 times the sum of squares of both outputs over the batch size, and of the
    kernel; and a sum.
    """
    keras.utils.set_random_seed(0)
    penalty = keras.layers.ActivityRegularization(l2=1e-3)
    images = keras.Input([6, 6, 3])
    first = penalty(VectorLoss()(images))
    second = penalty(
        keras.layers.Conv2D(4, 3, kernel_regularizer=keras.regularizers.L2(1e-3), name="conv")(
            first
        )
    )
    model = keras.Model(images, keras.layers.Dense(10)(keras.layers.Flatten()(second)))
    given = tf.random.stateless_uniform([2, 6, 6, 3], (0, 1))
    outputs = given, model.get_layer("conv")(given)
    by_hand = [2 * np.mean(given), *(1e-3 * np.sum(np.square(output)) / 2 for output in outputs)]
    by_hand.append(1e-3 * np.sum(np.square(model.trainable_variables[0])))
    variables = [v.value for v in model.trainable_variables], []
    for _ in range(2):
        _, _, losses = call_in_training(model, *variables, given)
        np.testing.assert_allclose(losses, by_hand, rtol=1e-5)


def test_towers_that_meet_in_a_norm_keep_their_losses(towers):
    """The second tower calls each layer while the first one waits for it in the norm."""
    images = keras.Input([6, 6, 3])
    both = towers(2)
    penalized = keras.layers.ActivityRegularization(l2=1e-3)(images)
    model = keras.Model(images, keras.layers.BatchNormalization()(penalized))
    synchronize(model)
    variables = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )
    given = tf.random.stateless_uniform([4, 6, 6, 3], (0, 1))

    @tf.function(autograph=False)
    def run(batch):
        return run_on_towers_synchronized(
            lambda tower, shard: call_in_training(model, *variables, shard)[2], both, batch
        )

    losses = run(split_batch(given, both))
    np.testing.assert_allclose(
        losses, [[1e-3 * np.sum(np.square(half)) / 2] for half in np.split(given, 2)], rtol=1e-5
    )
