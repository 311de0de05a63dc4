"""Diagnostics of a step against independent computations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.towers import split_batch
from cifar_towers.training import build, diagnostics
from cifar_towers.training.step import FinishedStep
from tests.training.runs import Run

SETTINGS = {"model": "cifarnet", "crop": 24, "shift": 0, "standardize": "image", "batch_size": 24, "learning_rate": 0.1}


def make_run(towers, examples, **settings):
    return Run(towers, examples, TrainConfig(**SETTINGS | settings))


@pytest.mark.parametrize(
    "count, settings",
    [
        (2, {}),
        (1, {"micro_batches": 2}),
        (2, {"strategy": "mirrored"}),
        (2, {"strategy": "stages", "micro_batches": 2}),
    ],
)
def test_diagnostics_describe_their_own_step(towers, examples, count, settings):
    run, reference = make_run(towers(count), examples, **settings), make_run(towers(count), examples)
    batch = run.batches.at(0)
    metrics = run.step(0, batch, image_size=32)
    model, shards = reference.state.model, split_batch(batch, run.step_towers)
    loss_fn, _ = build.make_loss_fn(run.config, model)
    augmentation = build.make_augmentation(run.config, CIFAR10)

    def gradients_of(shard):
        with tf.GradientTape() as tape:
            weights, statistics = reference.state.read_variables()
            tape.watch(weights)
            images = augmentation.augment(shard.images, shard.draws)
            logits, _ = model.stateless_call(weights, statistics, images, training=True)
            loss = loss_fn(shard.labels, logits, weights)["total_loss"]
        return [gradient.numpy() for gradient in tape.gradient(loss, weights)]

    of_towers = [gradients_of(shard) for shard in shards]
    means = [np.mean(of_one, 0) for of_one in zip(*of_towers, strict=True)]
    *flat, mean = [np.concatenate([g.ravel() for g in gradients]) for gradients in [*of_towers, means]]
    diagnose = diagnostics.make_diagnose_fn(run.state.model, augmentation, run.step_towers)
    found = diagnose(FinishedStep(1, batch, {}, 32, metrics))
    np.testing.assert_allclose(found.tower_gradient_norm, [np.linalg.norm(own) for own in flat], rtol=1e-4)
    cosines = [own @ mean / np.linalg.norm(own) / np.linalg.norm(mean) for own in flat]
    np.testing.assert_allclose(found.tower_gradient_cosine, cosines, atol=1e-5)
    assert list(found.gradients) == list(found.weights) == [v.path for v in model.trainable_variables]
    for weight, gradient, ours, expected in zip(
        run.state.weights, found.gradients.values(), found.weights.values(), means, strict=True
    ):
        np.testing.assert_array_equal(ours, weight)
        assert np.linalg.norm(gradient) == pytest.approx(np.linalg.norm(expected), rel=1e-3)

    images = augmentation.augment(shards[-1].images, shards[-1].draws).numpy()  # the final tower's
    np.testing.assert_allclose(found.images, images[: len(found.images)], atol=1e-5)
    np.testing.assert_array_equal(found.labels, shards[-1].labels[: len(found.labels)])
    layers = diagnostics.activation_layers(run.state.model)
    assert list(found.activations) == ["conv1", "conv2", "local3", "local4", "softmax_linear"]
    outputs = keras.Model(run.state.model.input, [layer.output for layer in layers])(images[: diagnostics.NUM_EXAMPLES])
    for activation, output in zip(found.activations.values(), outputs, strict=True):
        np.testing.assert_allclose(activation, output, rtol=1e-4, atol=1e-4)


def test_a_variable_without_a_gradient_is_left_out(towers, examples):
    """Frozen groups have none."""
    run = make_run(towers(2), examples)
    rates = {name: rate for name, rate in run.rates().items() if name != "biases"}
    batch = run.batches.at(0)
    metrics = run.step(0, batch, rates)
    augmentation = build.make_augmentation(run.config, CIFAR10)
    found = diagnostics.make_diagnose_fn(run.state.model, augmentation, towers(2))(
        FinishedStep(1, batch, {}, 32, metrics)
    )
    assert "conv1/kernel" in found.gradients and "conv1/bias" not in found.gradients
    assert (found.tower_gradient_norm > 0).all() and (found.tower_gradient_cosine > 0.5).all()


def test_layers_of_a_reused_backbone_are_measured_in_the_calling_model(towers, examples):
    """`layer.output` of each is in the backbone's graph, which the net's input does not reach."""
    keras.utils.set_random_seed(0)
    into = keras.Input([8, 8, 3])
    backbone = keras.Model(into, keras.layers.ReLU(name="relu")(keras.layers.Conv2D(4, 3, name="convolution")(into)))
    images = keras.Input([24, 24, 3])
    x = images
    for layer in backbone.layers[1:]:
        x = layer(x)
    model = keras.Model(images, keras.layers.Dense(10, name="head")(keras.layers.GlobalAveragePooling2D()(x)))
    run = make_run(towers(1), examples)
    batch, augmentation = run.batches.at(0), build.make_augmentation(run.config, CIFAR10)
    metrics = run.step(0, batch)._replace(gradients=[v.numpy() for v in model.trainable_variables])
    metrics = metrics._replace(tower_gradients=[metrics.gradients])
    found = diagnostics.make_diagnose_fn(model, augmentation, towers(1))(FinishedStep(1, batch, {}, 24, metrics))
    given = augmentation.augment(batch.images, batch.draws)
    assert list(found.activations) == ["relu", "head"]
    np.testing.assert_allclose(
        found.activations["relu"], tf.nn.relu(model.get_layer("convolution")(given)), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(found.activations["head"], model(given), rtol=1e-5, atol=1e-5)
