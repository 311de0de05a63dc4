"""Models of users: those that train on towers, and those that are rejected by the layer's name."""

import logging
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.errors import UsageError
from cifar_towers.models import user_model
from cifar_towers.models.layers import BatchNorm, synchronize
from cifar_towers.towers import run_on_towers_synchronized, split_batch
from cifar_towers.user_code import log_once
from tests.nets import OwnNorm

L = keras.layers


def net(*layers, image_size=24, classes=10, head=True):
    made = [L.Input((image_size, image_size, 3)), *layers]
    return keras.Sequential([*made, L.Flatten(name="flat"), L.Dense(classes, name="head")] if head else made)


class Scaled(L.Layer):
    """A user's layer with a weight and a counter."""

    def build(self, shape):
        self.factor = self.add_weight(name="factor", shape=shape[-1:], initializer="ones")
        self.calls = self.add_weight(name="calls", shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x * self.factor


class Computes(L.Layer):
    """A user's layer that computes a function of its input."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def noisy(x, seed=None):
    return x + tf.random.normal(tf.shape(x), seed=seed)


def drawn_once(x):
    return x + np.random.normal(size=x.shape[1:]).astype("f4")


class Stateful(L.Layer):
    """A layer with a variable that is not one of its weights."""

    def __init__(self, writes, **kwargs):
        super().__init__(**kwargs)
        self.writes, self.offset = writes, tf.Variable(1.0, trainable=False)

    def call(self, x):
        if self.writes:
            self.offset.assign_add(1.0)
            return x
        return x + self.offset


class Once(L.Layer):
    called = 0

    def call(self, x, training=False):
        if training:
            self.called += 1
            if self.called > 1:
                raise RuntimeError("I can be called once")
        return x


class Subclassed(keras.Model):
    def __init__(self, classes=10, first=None):
        super().__init__()
        self.first, self.flat = first or L.Flatten(), L.Flatten()
        self.head = L.Dense(classes, name="logits", kernel_initializer="zeros")

    def call(self, x):
        return self.head(self.flat(self.first(x)))


class OwnCall(keras.Model):
    """A model with a graph, whose call does more than the graph."""

    def __init__(self):
        images = L.Input((24, 24, 3))
        super().__init__(images, L.Dense(10)(L.Flatten()(images)))
        self.flip = L.RandomFlip()

    def call(self, x, training=False):
        return super().call(2 * self.flip(x, training=training), training=training)


class Trained(Subclassed):
    def train_step(self, data):
        return {}


class Measured(Subclassed):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {}


class Penalized(L.Layer):
    """A layer that adds a function of its input as a loss, by default the sum, not the mean over images."""

    def __init__(self, function=tf.reduce_sum, in_training_only=False):
        super().__init__()
        self.function, self.in_training_only = function, in_training_only

    def call(self, x, training=False):
        if training or not self.in_training_only:
            self.add_loss(self.function(x))
        return x


def of_levels():
    """Return a model that takes integers, and normalizes them itself."""
    images = L.Input((24, 24, 3), dtype="uint8")
    return keras.Model(images, L.Dense(10)(L.Flatten()(L.Rescaling(1 / 255)(images))))


def with_positions():
    """Return a model with a layer whose output is a table, not a row for each image."""
    images = L.Input((24, 24, 3))
    table = Computes(lambda x: tf.ones([5, 24, 24, 3]))(images)
    pooled = Computes(lambda pair: pair[0] + tf.reduce_mean(pair[1], 0))([images, table])
    return keras.Model(images, L.Dense(10)(L.Flatten()(pooled)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: net(L.Conv2D(4, 3), L.BatchNormalization(), L.ReLU(), L.Dropout(0.5), Scaled()),
        lambda: net(L.GaussianNoise(0.1), L.RandomFlip(), L.RandomRotation(0.1), L.Conv2D(4, 3)),
        lambda: net(Computes(lambda x: x + tf.ones([1, 24, 1, 1])), L.GroupNormalization(3), L.UnitNormalization()),
        lambda: with_positions(),
        Subclassed,
    ],
)
def test_models_that_towers_can_train(make):
    model = user_model.build_model(make, 24, 10, "float32")
    assert model(np.zeros((2, 24, 24, 3), "f4")).shape == (2, 10)


def test_weights_without_a_gradient_are_named(caplog):
    """A regularizer gives its kernel one."""

    def make():
        images = L.Input((24, 24, 3))
        stopped = Computes(tf.stop_gradient)(L.Conv2D(2, 3, name="stopped")(images))
        decayed = Computes(tf.stop_gradient)(L.Conv2D(2, 3, name="decayed", kernel_regularizer="l2")(images))
        return keras.Model(images, L.Dense(10)(L.Flatten()(stopped + decayed)))

    with caplog.at_level(logging.INFO, "cifar_towers"):
        user_model.build_model(make, 24, 10, "float32")
    assert "not trained, as they have no gradient: stopped/kernel, stopped/bias, decayed/bias" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "cifar_towers"):
        user_model.build_model(lambda: net(L.Conv2D(4, 3), L.BatchNormalization()), 24, 10, "float32")
    assert not caplog.text


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (lambda: L.Rescaling(1 / 255, name="to_one"), "and to_one would normalize them again: leave that out"),
        (lambda: keras.Sequential([L.Normalization(name="moments")]), "and moments would normalize them again"),
        (lambda: Penalized(in_training_only=True), "a layer adds a loss in training only, so it is not checked"),
    ],
)
def test_what_is_not_refused_is_logged(caplog, layer, line):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "cifar_towers"):
        user_model.build_model(lambda: net(layer()), 24, 10, "float32")
    assert len(caplog.messages) == 1 and line in caplog.text


def test_a_scale_behind_the_first_weights_is_not_logged(caplog):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, "cifar_towers"):
        user_model.build_model(lambda: net(L.Conv2D(4, 3), L.Rescaling(1 / 9)), 24, 10, "float32")
    assert not caplog.text


NOT_A_WEIGHT = "uses a variable that is not a weight of the model"
UNSEEDED = "returns other values in a second call .* draws random numbers without a seed"
HEAD_OF_PROBABILITIES = L.Dense(10, "softmax", name="shares")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: net(Computes(noisy, name="grain")), f"layer grain {UNSEEDED}"),
        (lambda: net(Computes(partial(noisy, seed=3), name="grain")), f"layer grain {UNSEEDED}"),
        (lambda: net(Computes(noisy, name="grain"), Scaled(name="grain_1")), f"layer grain {UNSEEDED}"),
        (lambda: net(Scaled(), Computes(drawn_once, name="print")), f"layer print {UNSEEDED}"),
        (lambda: Subclassed(first=Computes(noisy)), f"layer subclassed.* {UNSEEDED}"),
        (lambda: net(Computes(partial(keras.random.dropout, rate=0.5), name="drop")), f"layer drop {NOT_A_WEIGHT}"),
        (lambda: net(Stateful(True, name="counter")), f"layer counter {NOT_A_WEIGHT}"),
        (lambda: net(Stateful(False, name="memory")), f"layer memory {NOT_A_WEIGHT}"),
        (lambda: net(Once(name="once")), "two towers cannot call it on 24x24 images: .*I can be called once"),
        (lambda: net(classes=7), r"layer head has an output of shape \(7,\) per image; 10 classes need \(10,\)"),
        (lambda: Subclassed(7), r"layer logits has an output of shape \(7,\) per image"),
        (
            lambda: net(L.Conv2D(9, 3, name="last"), head=False),
            r"layer last has an output of shape \(22, 22, 9\) per image",
        ),
        (lambda: net(L.Flatten(), HEAD_OF_PROBABILITIES, head=False), "layer shares ends in softmax"),
        (
            lambda: net(Computes(lambda x: x - tf.reduce_mean(x, 0), name="center")),
            "layer center depends on how a batch",
        ),
        (lambda: net(Penalized()), "a loss that a layer adds depends on how a batch is split"),
        (lambda: net(Penalized(lambda x: tf.reduce_mean(x, [1, 2, 3]))), "a loss that a layer adds depends on how"),
        (of_levels, "its keras.Input is uint8, and images come normalized, as floats; leave out dtype="),
        (lambda: net(L.Conv2D(2, 3, dtype="bfloat16", name="narrow")), "narrow/kernel is bfloat16, .* leave out the"),
        (lambda: net(L.Conv2D(2, 3, dtype="float16", name="narrow")), "narrow/kernel is float16, .* --precision"),
        (lambda: net(L.SpectralNormalization(L.Conv2D(2, 3))), "conv2d.*/kernel is trainable and also written"),
        (lambda: Measured(), "it overrides compute_metrics, which towers would not run"),
        (lambda: Trained(), "it overrides train_step, which towers would not run; leave it out"),
        (lambda: net(image_size=32), r"expected shape=\(None, 32, 32, 3\)"),
        (lambda: net(L.Flatten(), L.Lambda(lambda x: x[:, :10]), head=False), "it has no weights to train"),
        (lambda: 3, "it returns int, not a Keras model"),
        (lambda: 1 / 0, "the model cannot be built: test_user_model.py, line .*ZeroDivisionError"),
    ],
)
def test_models_that_towers_cannot_train_are_rejected_in_one_line(make, message):
    with pytest.raises(UsageError, match=message) as caught:
        user_model.build_model(make, 24, 10, "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda: net(Computes(noisy)), lambda: net(Stateful(False)), Trained])
def test_a_model_that_is_not_to_be_trained_is_not_checked(make):
    """Load a run of a model that was accepted when it was trained."""
    model = user_model.build_model(make, 24, 10, "float32", to_train=False)
    assert model(np.zeros((2, 24, 24, 3), "f4")).shape == (2, 10)


def test_arguments_are_passed_by_name():
    def make(num_classes, image_size, width=3):
        return net(L.Conv2D(width, 3), image_size=image_size, classes=num_classes)

    model = user_model.build_model(make, 20, 7, "mixed_bfloat16")
    assert model.output_shape == (None, 7) and model.layers[1].compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"


def test_a_sequential_model_becomes_a_graph_of_its_layers():
    """Stages, activations and the features before the last layer need this graph."""
    sequential = net(L.Conv2D(4, 3, name="first"))
    model = user_model.build_model(lambda: sequential, 24, 10, "float32")
    assert [layer.name for layer in model.layers[1:]] == ["first", "flat", "head"]
    names = [variable.path for variable in sequential.variables]
    assert [variable.path for variable in model.variables] == names  # as in checkpoints


def test_a_model_with_a_graph_is_trained_with_its_own_call():
    """Training and evaluation rebuild models with more outputs."""
    own = OwnCall()
    model = user_model.build_model(lambda: own, 24, 10, "float32")
    rebuilt, images = keras.Model(model.input, model.output), np.random.default_rng(0).random((2, 24, 24, 3), "f4")
    kernel, bias = (variable.numpy() for variable in own.trainable_variables)
    np.testing.assert_allclose(rebuilt(images), 2 * images.reshape(2, -1) @ kernel + bias, atol=1e-5)
    assert {v.path for v in rebuilt.variables} == {v.path for v in own.variables}


def test_adds_losses():
    assert user_model.adds_losses(net(L.Conv2D(2, 3, kernel_regularizer="l2")), 24)
    assert not user_model.adds_losses(net(L.Conv2D(2, 3), L.Dropout(0.1)), 24)


def test_statistics_of_own_layers_are_found():
    mixed = net(OwnNorm(name="own"), L.BatchNormalization(), L.Dropout(0.1))
    (path,) = user_model.own_statistics(mixed, 24)
    assert path.endswith("own/mean")
    assert not user_model.own_statistics(net(L.BatchNormalization(), BatchNorm(), Scaled(), L.Normalization()), 24)


class Narrow(L.BatchNormalization):
    """A user's subclass of Keras's norm."""


@pytest.mark.parametrize(
    "kind", [L.BatchNormalization, partial(L.BatchNormalization, synchronized=True), Narrow, BatchNorm]
)
def test_all_kinds_of_batch_norms_are_synchronized(towers, kind):
    """Two towers, on halves with different moments, compute what one tower computes on the whole batch."""
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 3)).astype("f4") * np.repeat([1, 3], 4)[:, None, None, None]
    keras.utils.set_random_seed(0)
    model = user_model.build_model(lambda: net(kind(name="norm"), image_size=6), 6, 10, "float32")
    synchronize(model)
    kinds = model.trainable_variables, model.non_trainable_variables
    weights, statistics = ([v.value for v in variables] for variables in kinds)

    @tf.function(autograph=False)
    def run(count):
        def call(tower, shard):
            return model.stateless_call(weights, statistics, shard, training=True)

        results = run_on_towers_synchronized(call, towers(count), split_batch(tf.constant(images), towers(count)))
        return tf.concat([logits for logits, _ in results], 0), [values for _, values in results]

    (one, _), (two, new_statistics) = run(1), run(2)
    for by_tower in zip(*new_statistics, strict=True):
        np.testing.assert_allclose(*by_tower, rtol=1e-6)
    np.testing.assert_allclose(two, one, atol=1e-5)
