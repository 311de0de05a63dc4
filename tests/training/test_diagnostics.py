"""Diagnostics of a step against independent computations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.models.keras_models import variable_values
from cifar_towers.towers import split_batch
from cifar_towers.training import build, diagnostics
from cifar_towers.training.runner import FinishedStep
from cifar_towers.training.step import StepGradients
from tests.helpers.step_runs import StepRun

SETTINGS = {
    "model": "cifarnet",
    "crop": 24,
    "shift": 0,
    "standardize": "image",
    "batch_size": 24,
    "learning_rate": 0.1,
}


def make_run(towers, examples, **settings):
    """Return a run, and the function that computes its diagnostics."""
    run = StepRun(towers, examples, TrainConfig(**SETTINGS | settings))
    augmentation = build.make_training_augmentation(run.config, CIFAR10)
    diagnoser = diagnostics.Diagnoser(run.state.model, augmentation, run.towers)
    return run, augmentation, diagnoser.diagnose


@pytest.mark.parametrize(
    "count, settings",
    [(2, {}), (1, {"micro_batches": 2}), (2, {"strategy": "mirrored"})],
)
def test_gradients_and_images_are_those_of_their_step(towers, examples, count, settings):
    run, _, diagnose = make_run(towers(count), examples, **settings)
    reference, augmentation, _ = make_run(towers(count), examples)
    batch = run.batches.at(0)
    model = reference.state.model
    metrics = run.step(0, batch, image_size=32)
    found = diagnose(FinishedStep(1, batch, {}, 32, metrics, run.gradients))
    shards = split_batch(batch, run.towers)
    loss_fn = build.make_loss_fn(run.config, model)

    def gradients_of(shard):
        with tf.GradientTape() as tape:
            weights, statistics = variable_values(model)
            tape.watch(weights)
            images = augmentation.augment(shard.images, shard.draws)
            logits, _ = model.stateless_call(weights, statistics, images, training=True)
            loss = loss_fn(shard.labels, logits, weights)["total_loss"]
        return [gradient.numpy() for gradient in tape.gradient(loss, weights)]

    def flatten(gradients):
        return np.concatenate([gradient.ravel() for gradient in gradients])

    of_towers = [gradients_of(shard) for shard in shards]
    means = [np.mean(gradients, 0) for gradients in zip(*of_towers, strict=True)]
    flat = [flatten(gradients) for gradients in of_towers]
    mean = flatten(means)

    norms = [np.linalg.norm(gradient) for gradient in flat]
    np.testing.assert_allclose(found.tower_gradient_norm, norms, rtol=1e-4)

    products = [gradient @ mean for gradient in flat]
    cosines = np.array(products) / norms / np.linalg.norm(mean)
    np.testing.assert_allclose(found.tower_gradient_cosine, cosines, atol=1e-5)
    assert list(found.gradients) == [v.path for v in model.trainable_variables]

    for gradient, expected in zip(found.gradients.values(), means, strict=True):
        atol = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=atol)

    assert list(found.weights) == [v.path for v in model.trainable_variables]

    for weight, ours in zip(run.state.weights, found.weights.values(), strict=True):
        np.testing.assert_array_equal(ours, weight)
    images = augmentation.augment(shards[-1].images, shards[-1].draws).numpy()  # the final tower's

    np.testing.assert_allclose(found.images, images[: len(found.images)], atol=1e-5)
    np.testing.assert_array_equal(found.labels, shards[-1].labels[: len(found.labels)])


def test_images_are_those_that_the_model_saw(towers, examples, tmp_path, monkeypatch):
    """Also after a function of the user's that mixes the shard."""
    monkeypatch.setattr(diagnostics, "NUM_EXAMPLES", 6)
    monkeypatch.setattr(diagnostics, "NUM_IMAGES", 6)
    (tmp_path / "mine.py").write_text("def turn(images, draws):\n    return -images[::-1]\n")
    settings = {"augment": f"{tmp_path}/mine.py:turn", "batch_size": 8}
    run, augmentation, diagnose = make_run(towers(1), examples, **settings)
    batch = run.batches.at(0)
    metrics = run.step(0, batch)
    found = diagnose(FinishedStep(1, batch, {}, 32, metrics, run.gradients))
    images = -augmentation.augment(batch.images, batch.draws).numpy()[::-1][:6]

    np.testing.assert_allclose(found.images, images, atol=1e-5)
    np.testing.assert_array_equal(found.labels, batch.labels[:6])


def diagnose_model(model, towers, examples):
    """Diagnose a first step in which the model's gradients are its weights; return the diagnostics,
    and the images that the model is given.
    """
    run, augmentation, _ = make_run(towers, examples)
    batch = run.batches.at(0)
    weights = [variable.numpy() for variable in model.trainable_variables]
    gradients = StepGradients(weights, [weights])
    metrics = run.step(0, batch)
    diagnoser = diagnostics.Diagnoser(model, augmentation, towers)
    found = diagnoser.diagnose(FinishedStep(1, batch, {}, 24, metrics, gradients))
    return found, augmentation.augment(batch.images, batch.draws)


def test_nonlinear_layers_are_measured_also_of_a_reused_backbone(towers, examples):
    """`layer.output` of each is in the backbone's graph, which the net's input does not reach."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(4, 3, name="linear"), keras.layers.ReLU(name="relu")]
    layers.append(keras.layers.Conv2D(4, 3, activation="tanh", name="tanh"))
    backbone = keras.Sequential([keras.Input([8, 8, 3]), *layers])
    x = images = keras.Input([24, 24, 3])
    for layer in backbone.layers:
        x = layer(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(images, keras.layers.Dense(10, name="head")(x))
    found, given = diagnose_model(model, towers(1), examples)
    relu = tf.nn.relu(layers[0](given))

    assert list(found.activations) == ["relu", "tanh", "head"]

    for name, expected in (("relu", relu), ("tanh", layers[2](relu)), ("head", model(given))):
        np.testing.assert_allclose(found.activations[name], expected, rtol=1e-5, atol=1e-5)


def test_a_single_measured_layer_has_the_outputs_of_all_examples(towers, examples):
    images = keras.Input([24, 24, 3])
    x = keras.layers.GlobalAveragePooling2D()(images)
    model = keras.Model(images, keras.layers.Dense(10, name="head")(x))
    found, given = diagnose_model(model, towers(1), examples)
    np.testing.assert_allclose(found.activations["head"], model(given), rtol=1e-5, atol=1e-5)
