"""Models of users: those that train on towers, and those that are refused."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.errors import UsageError
from cifar_towers.models import user_model
from cifar_towers.models.layers import BatchNorm, synchronize
from cifar_towers.towers import run_on_towers_synchronized, split_batch
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


class Penalized(L.Layer):
    """A layer that adds a loss."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


def of_levels():
    """Return a model that takes integers, and normalizes them itself."""
    images = L.Input((24, 24, 3), dtype="uint8")
    return keras.Model(images, L.Dense(10)(L.Flatten()(L.Rescaling(1 / 255)(images))))


def cut_off(**options):
    """Return a model with a convolution whose weights have no gradient, except that of a regularizer."""
    images = L.Input((24, 24, 3))
    stopped = Computes(tf.stop_gradient)(L.Conv2D(2, 3, name="stopped", **options)(images))
    decayed = Computes(tf.stop_gradient)(L.Conv2D(2, 3, use_bias=False, kernel_regularizer="l2")(images))
    return keras.Model(images, L.Dense(10)(L.Flatten()(stopped + decayed)))


class Recomputed(L.Layer):
    """A layer around one whose weights `tf.recompute_grad` does not see."""

    def build(self, shape):
        self.inner = L.Dense(4)
        self.inner.build(shape)

    def call(self, x):
        return tf.recompute_grad(lambda y: self.inner(y))(x)


def mean_of_softmaxes():
    images = L.Input((24, 24, 3))
    flat = L.Flatten()(images)
    return keras.Model(images, (L.Dense(10, "softmax")(flat) + L.Dense(10, "softmax")(flat)) / 2)


def normalized():
    return net(L.Flatten(), L.Dense(10, "relu"), Computes(lambda x: x / tf.reduce_sum(x, 1, keepdims=True)), head=False)


def checked(make, policy="float32", **options):
    model = user_model.build_model(make, 24, 10, policy)
    user_model.check_model(model, 24, 10, **options)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: net(L.Conv2D(4, 3), L.BatchNormalization(), L.ReLU(), L.Dropout(0.5), Scaled()),
        lambda: net(L.GaussianNoise(0.1), L.RandomFlip(), L.RandomRotation(0.1), L.Conv2D(4, 3)),
        lambda: net(L.GroupNormalization(3), L.Flatten(), L.Dense(10, "relu", kernel_initializer="zeros"), head=False),
        lambda: cut_off(trainable=False),
        Subclassed,
    ],
)
def test_models_that_towers_can_train(make):
    model = checked(make)
    assert model(np.zeros((2, 24, 24, 3), "f4")).shape == (2, 10)


NOT_A_WEIGHT = "uses a variable that is not a weight, and towers would share it: see .*"
PROBABILITIES = "returns probabilities, and the loss takes logits"
SYNCHRONIZED = {"synchronized": True}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: net(Stateful(True, name="counter")), {}, NOT_A_WEIGHT + "counter"),
        (lambda: net(Stateful(False, name="memory")), {}, NOT_A_WEIGHT + "memory"),
        (lambda: net(Computes(partial(keras.random.dropout, rate=0.5))), {}, NOT_A_WEIGHT),
        (lambda: net(classes=7), {}, r"output shape \(None, 7\), not \(None, 10\) of logits"),
        (lambda: Subclassed(7), {}, r"output shape \(None, 7\), not \(None, 10\) of logits"),
        (lambda: net(L.Conv2D(9, 3), head=False), {}, r"output shape \(None, 22, 22, 9\)"),
        (lambda: net(L.Flatten(), L.Dense(10, "softmax"), head=False), {}, PROBABILITIES),
        (mean_of_softmaxes, {}, PROBABILITIES),
        (mean_of_softmaxes, {"policy": "mixed_bfloat16"}, PROBABILITIES),
        (normalized, {}, PROBABILITIES),
        (cut_off, {}, "weights without a gradient: stopped/kernel, stopped/bias; set trainable=False"),
        (lambda: net(Recomputed()), {}, "weights without a gradient: .*kernel, .*bias"),
        (of_levels, {}, "takes integers, and images come normalized"),
        (lambda: net(L.Conv2D(2, 3, dtype="bfloat16", name="narrow")), {}, "narrow/kernel to 16 bits"),
        (lambda: net(L.SpectralNormalization(L.Conv2D(2, 3))), {}, "trains .*kernel and also changes it"),
        (lambda: Trained(), {}, "overrides train_step, which towers would not run; leave it out"),
        (lambda: net(L.BatchNormalization(synchronized=True, name="norm")), {}, "synchronized layer norm"),
        (lambda: net(OwnNorm(name="own")), SYNCHRONIZED, "does not reach .*own/mean, of no BatchNormalization"),
    ],
)
def test_models_that_towers_would_train_wrongly_are_refused(make, options, message):
    with pytest.raises(UsageError, match=f"^--(model|batch_statistics).*{message}"):
        checked(make, **options)


def test_a_net_that_an_earlier_run_may_have_trained_is_refused():
    """Also a part of one, and one that gets its variables in the first call."""
    whole, backbone = net(), L.Conv2D(2, 3, name="backbone")
    part = lambda: net(backbone)  # noqa: E731
    checked(part)
    for make, variable in ((lambda: whole, "head/kernel"), (part, "backbone/kernel")):
        with pytest.raises(UsageError, match=f"must make a new net in each call, and .*{variable} was made before"):
            checked(make)


def test_arguments_are_passed_by_name():
    def make(num_classes, image_size, width=3):
        return net(L.Conv2D(width, 3), image_size=image_size, classes=num_classes)

    model = user_model.build_model(make, 20, 7, "mixed_bfloat16")
    assert model.output_shape == (None, 7) and model.layers[1].compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"


def test_a_sequential_model_becomes_a_graph_of_its_layers():
    """Stages, activations and the features before the last layer need this graph."""
    made = []

    def make():
        made.append(net(L.Conv2D(4, 3, name="first")))
        return made[0]

    model = checked(make)
    assert [layer.name for layer in model.layers[1:]] == ["first", "flat", "head"]
    assert [v.path for v in model.variables] == [v.path for v in made[0].variables]  # as in checkpoints


def test_a_model_with_a_graph_is_trained_with_its_own_call():
    """Training and evaluation rebuild models with more outputs."""
    model = checked(OwnCall)
    rebuilt, images = keras.Model(model.input, model.output), np.random.default_rng(0).random((2, 24, 24, 3), "f4")
    kernel, bias = (variable.numpy() for variable in model.trainable_variables)
    np.testing.assert_allclose(rebuilt(images), 2 * images.reshape(2, -1) @ kernel + bias, atol=1e-5)
    assert {v.path for v in rebuilt.variables} == {v.path for v in model.variables}


def test_adds_losses():
    for layer, adds in ((L.Conv2D(2, 3, kernel_regularizer="l2"), True), (Penalized(), True), (L.Dropout(0.1), False)):
        assert user_model.adds_losses(net(layer), 24) == adds


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
