"""Diagnostics of a step against independent computations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.models.layers import synchronize
from cifar_towers.towers import run_on_towers_synchronized, split_batch
from cifar_towers.training import build, diagnostics, health, step
from cifar_towers.training.results import NUM_BUCKETS, TensorStats, to_numpy
from tests.training.runs import Run

SETTINGS = {"model": "cifarnet", "crop": 24, "shift": 0, "standardize": "image", "batch_size": 24, "learning_rate": 0.1}


def make_run(towers, examples, **settings):
    return Run(towers, examples, TrainConfig(**SETTINGS | settings))


def make_step(run, number=0, collect=True):
    return run.step(number, image_size=32, collect_diagnostics=tf.constant(collect))


def at(stats, index):
    """Return the statistics of one tensor."""
    return TensorStats(*(field[index] for field in stats))


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=(7, 11)),
        np.zeros(5),
        np.full(3, -2e8),
        np.array([0, 1, 1, np.nan, np.inf]),
        np.arange(60.0).reshape(3, 20) / 59,
    ],
)
def test_tensor_stats_agree_with_numpy(values):
    spread = at(to_numpy(diagnostics.tensor_stats([tf.constant(values, tf.float32)])), 0)
    finite = np.where(np.isfinite(values), values, 0).astype(np.float32)
    assert (spread.min, spread.max) == (finite.min(), finite.max())
    assert spread.zero_fraction == pytest.approx((finite == 0).mean())
    assert spread.norm == pytest.approx(np.linalg.norm(finite))
    assert spread.counts.sum() == values.size
    if spread.max > spread.min:
        expected, edges = np.histogram(finite, NUM_BUCKETS)
        ties = np.abs(finite.reshape(-1, 1) - edges).min(1) < 1e-6
        assert np.abs(spread.counts - expected).sum() <= 2 * ties.sum()


@pytest.mark.parametrize(
    "count, settings",
    [
        (2, {}),
        (1, {"micro_batches": 2}),
        (2, {"strategy": "mirrored"}),
        (2, {"parallelism": "model", "micro_batches": 2}),
    ],
)
def test_diagnostics_describe_their_own_step(towers, examples, count, settings):
    run, reference = make_run(towers(count), examples, **settings), make_run(towers(count), examples)
    before = [weight.numpy() for weight in run.state.weights]
    metrics = make_step(run)
    model, shards = reference.state.model, split_batch(run.batches.at(0), run.step_towers)
    loss_fn, _ = build.make_loss_fn(run.config, model)
    augment = build.make_augmentation(run.config, CIFAR10).augment

    def gradients_of(shard):
        with tf.GradientTape() as tape:
            weights, statistics = reference.state.read_variables()
            tape.watch(weights)
            logits, _ = model.stateless_call(weights, statistics, augment(shard.images, shard.draws), training=True)
            loss = loss_fn(shard.labels, logits, weights)["total_loss"]
        return [gradient.numpy() for gradient in tape.gradient(loss, weights)]

    towers_gradients = [gradients_of(shard) for shard in shards]
    means = [np.mean(of_one, 0) for of_one in zip(*towers_gradients, strict=True)]
    flat = [np.concatenate([g.ravel() for g in gradients]) for gradients in [*towers_gradients, means]]
    for norm, cosine, own in zip(
        metrics.diagnostics.tower_gradient_norm, metrics.diagnostics.tower_gradient_cosine, flat[:-1], strict=True
    ):
        assert norm == pytest.approx(np.linalg.norm(own), rel=1e-4)
        assert cosine == pytest.approx(own @ flat[-1] / np.linalg.norm(own) / np.linalg.norm(flat[-1]), abs=1e-5)

    update = metrics.diagnostics
    for index, moved in enumerate(update.update_norm):
        weight, gradient = at(update.weights, index), at(update.gradients, index)
        assert (weight.min, weight.max) == (before[index].min(), before[index].max())
        assert weight.counts.sum() == gradient.counts.sum() == before[index].size
        assert gradient.norm == pytest.approx(np.linalg.norm(means[index]), rel=1e-3)
        assert moved == pytest.approx(np.linalg.norm(run.state.weights[index].numpy() - before[index]), rel=1e-3)

    shard = shards[-1]  # the final tower's, and of that the last micro-batch
    parts = run.config.micro_batches
    images = augment(shard.images, shard.draws).numpy()[-(len(shard.labels) // parts) :]
    forward = metrics.diagnostics
    np.testing.assert_allclose(forward.images, images[: len(forward.images)], atol=1e-5)
    labels = shard.labels.numpy()[-(len(shard.labels) // parts) :]
    np.testing.assert_array_equal(forward.labels, labels[: len(forward.labels)])
    layers = diagnostics.activation_layers(model)
    assert [layer.name for layer in layers] == ["conv1", "conv2", "local3", "local4", "softmax_linear"]
    outputs = keras.Model(model.input, [layer.output for layer in layers])(images[: diagnostics.NUM_EXAMPLES])
    for index, output in enumerate(outputs):
        spread = at(forward.activations, index)
        assert spread.max == pytest.approx(output.numpy().max(), rel=1e-4)
        assert spread.zero_fraction == pytest.approx((output.numpy() == 0).mean(), abs=1e-3)
        assert spread.counts.sum() == output.shape.num_elements()


@pytest.mark.parametrize("strategy", ["towers", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_diagnostics_change_no_bit_of_training(towers, examples, strategy):
    digests = set()
    for collect in (True, False):
        run = make_run(towers(2), examples, strategy=strategy)
        for number in range(3):
            metrics = make_step(run, number, collect)
        digests.add(run.state.weights_sha256())
        assert metrics.diagnostics.update_norm.any() == collect
        assert metrics.diagnostics.activations.norm.any() == collect
    assert len(digests) == 1


def test_layers_of_a_reused_backbone_are_measured_in_the_calling_model():
    """`layer.output` of each is in the backbone's graph, which the net's input does not reach."""
    keras.utils.set_random_seed(0)
    into = keras.Input([8, 8, 3])
    backbone = keras.Model(into, keras.layers.ReLU(name="relu")(keras.layers.Conv2D(4, 3, name="convolution")(into)))
    images = keras.Input([18, 18, 3])
    x = images
    for layer in backbone.layers[1:]:
        x = layer(x)
    model = keras.Model(images, keras.layers.Dense(10, name="head")(keras.layers.GlobalAveragePooling2D()(x)))
    given = tf.random.stateless_uniform([2, 18, 18, 3], (0, 1)) - 0.5
    variables = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    logits, _, seen = step.stateless_call_with_activations(model)(*variables, given)
    assert [layer.name for layer in diagnostics.activation_layers(model)] == ["relu", "head"]
    np.testing.assert_allclose(seen[0], tf.nn.relu(model.get_layer("convolution")(given)), rtol=1e-6)
    np.testing.assert_array_equal(seen[1], logits)
    assert health.first_nonfinite_layer(model, given) == ""
    assert health.first_nonfinite_layer(model, given * np.inf).endswith("images")
    convolution = model.get_layer("convolution")
    convolution.kernel.assign(1e10 * convolution.kernel)
    assert health.first_nonfinite_layer(model, given * 1e35).endswith("output of convolution")


def test_every_call_of_a_layer_adds_its_losses():
    """By hand: 1e-3 times the sum of squares of both outputs over the batch size, and of the kernel."""
    keras.utils.set_random_seed(0)
    penalty = keras.layers.ActivityRegularization(l2=1e-3)
    images = keras.Input([6, 6, 3])
    first = penalty(images)
    second = penalty(keras.layers.Conv2D(4, 3, kernel_regularizer=keras.regularizers.L2(1e-3))(first))
    model = keras.Model(images, keras.layers.Dense(10)(keras.layers.Flatten()(second)))
    given = tf.random.stateless_uniform([2, 6, 6, 3], (0, 1))
    outputs = given, model.get_layer(index=2)(given)
    by_hand = [1e-3 * np.sum(np.square(output)) / 2 for output in outputs]
    by_hand.append(1e-3 * np.sum(np.square(model.trainable_variables[0])))
    variables = [v.value for v in model.trainable_variables], []
    for _ in range(2):
        losses = step.stateless_call_with_activations(model)(*variables, given)[3:]
        np.testing.assert_allclose(losses, by_hand, rtol=1e-5)


def test_a_loss_that_is_a_vector_is_summed():
    class Vector(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x, [1, 2, 3]) / 2)
            return x

    images = keras.Input([6, 6, 3])
    model = keras.Model(images, keras.layers.Dense(2)(keras.layers.Flatten()(Vector()(images))))
    given = tf.random.stateless_uniform([2, 6, 6, 3], (0, 1))
    variables = [v.value for v in model.trainable_variables], []
    (loss,) = step.stateless_call_with_activations(model)(*variables, given)[3:]
    np.testing.assert_allclose(loss, np.mean(given), rtol=1e-5)


def test_towers_that_meet_in_a_norm_keep_their_losses(towers):
    """The second tower calls each layer while the first one waits for it in the norm."""
    images, both = keras.Input([6, 6, 3]), towers(2)
    penalized = keras.layers.ActivityRegularization(l2=1e-3)(images)
    model = keras.Model(images, keras.layers.BatchNormalization()(penalized))
    synchronize(model)
    call = step.stateless_call_with_activations(model)
    variables = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    given = tf.random.stateless_uniform([4, 6, 6, 3], (0, 1))

    @tf.function(autograph=False)
    def run(batch):
        return run_on_towers_synchronized(lambda tower, shard: call(*variables, shard)[3:], both, batch)

    losses = run(split_batch(given, both))
    np.testing.assert_allclose(losses, [[1e-3 * np.sum(np.square(half)) / 2] for half in np.split(given, 2)], rtol=1e-5)


def test_diagnostics_of_a_nonfinite_step_are_finite(towers, examples):
    run = make_run(towers(2), examples)
    run.state.weights[0].assign(np.nan * run.state.weights[0])
    metrics = make_step(run)
    assert not metrics.updated
    assert all(
        np.isfinite(field).all()
        for stats in (metrics.diagnostics.weights, metrics.diagnostics.gradients)
        for field in stats
    )
