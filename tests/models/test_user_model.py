"""Models of users: those that train on towers, and those that are refused."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.data import synthetic
from cifar_towers.errors import UsageError
from cifar_towers.models import user_model
from cifar_towers.models.keras_models import variable_values
from cifar_towers.models.layers import BatchNorm, synchronize
from cifar_towers.towers import run_on_towers_synchronized, split_batch
from cifar_towers.training import build

L = keras.layers


def net(*layers, image_size=24, classes=10, activation=None):
    images = L.Input((image_size, image_size, 3))
    flat = L.Flatten(name="flat")
    head = L.Dense(classes, activation, name="head")
    return keras.Sequential([images, *layers, flat, head])


class Scaled(L.Layer):
    """A user's layer with a weight and a counter."""

    def __init__(self, dtype_of_counter="int32", **kwargs):
        super().__init__(**kwargs)
        self.dtype_of_counter = dtype_of_counter

    def build(self, shape):
        self.factor = self.add_weight(name="factor", shape=shape[-1:], initializer="ones")
        kind = {"dtype": self.dtype_of_counter, "trainable": False}
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", **kind)

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


class Subclassed(keras.Model):
    def __init__(self, classes=10):
        super().__init__()
        self.flat = L.Flatten()
        self.head = L.Dense(classes, kernel_initializer="zeros")

    def call(self, x):
        return self.head(self.flat(x))


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


def of_levels():
    """Return a model that takes integers, and normalizes them itself."""
    images = L.Input((24, 24, 3), dtype="uint8")
    return keras.Model(images, L.Dense(10)(L.Flatten()(L.Rescaling(1 / 255)(images))))


def cut_off(**options):
    """Return a model with a convolution whose weights have no gradient, except that of a
    regularizer.
    """
    images = L.Input((24, 24, 3))
    stopped = Computes(tf.stop_gradient)(L.Conv2D(2, 3, name="stopped", **options)(images))
    decayed = Computes(tf.stop_gradient)(
        L.Conv2D(2, 3, use_bias=False, kernel_regularizer="l2")(images)
    )
    return keras.Model(images, L.Dense(10)(L.Flatten()(stopped + decayed)))


def mean_of_softmaxes():
    images = L.Input((24, 24, 3))
    flat = L.Flatten()(images)
    return keras.Model(images, (L.Dense(10, "softmax")(flat) + L.Dense(10, "softmax")(flat)) / 2)


def with_own_variable():
    offset = tf.Variable(1.0, trainable=False)
    return net(Computes(lambda x: x + offset, name="memory"))


def with_two_of_a_name():
    images = L.Input((24, 24, 3))
    return net(*[keras.Model(images, L.Conv2D(3, 1, name="same")(images)) for _ in range(2)])


class Stage(L.Layer):
    """A user's layer that holds another."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = L.Conv2D(3, 1, name="conv")

    def call(self, x):
        return self.conv(x)


def centered(x):
    """Subtract the mean over the batch, in evaluations too."""
    return x - keras.ops.mean(x, 0, keepdims=True)


def mixes(**options):
    images = L.Input((24, 24, 3))
    x = Computes(centered)(L.Conv2D(4, 3)(images))
    return keras.Model(images, L.Dense(10, **options)(L.Flatten()(x)))


def checked(make, policy="float32", **options):
    model = user_model.build_model(make, 24, 10, policy)
    user_model.check_model(model, 24, 10, **options)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: net(L.Conv2D(4, 3), L.BatchNormalization(), L.ReLU(), L.Dropout(0.5), Scaled()),
        lambda: net(L.GaussianNoise(0.1), L.RandomFlip(), L.RandomRotation(0.1), L.Conv2D(4, 3)),
        lambda: net(L.GroupNormalization(3), activation="relu"),
        lambda: cut_off(trainable=False),
        Subclassed,
    ],
)
def test_models_that_towers_can_train(make):
    model = checked(make)
    assert model(np.zeros((2, 24, 24, 3), "f4")).shape == (2, 10)


@pytest.mark.parametrize(
    ("make", "options", "mentions"),
    [
        (with_own_variable, {}, "memory"),
        (lambda: net(Computes(partial(keras.random.dropout, rate=0.5), name="drops")), {}, "drops"),
        (lambda: net(classes=7), {}, r"\(None, 7\), not \(None, 10\)"),
        (lambda: Subclassed(7), {}, r"\(None, 7\), not \(None, 10\)"),
        (lambda: net(activation="softmax"), {}, "probabilities"),
        (mean_of_softmaxes, {"policy": "mixed_bfloat16"}, "probabilities"),
        (cut_off, {}, "stopped/kernel, stopped/bias; set trainable=False"),
        (of_levels, {}, "integers"),
        (lambda: net(L.Conv2D(2, 3, dtype="bfloat16", name="narrow")), {}, "narrow/kernel"),
        (
            lambda: net(L.Conv2D(2, 3, dtype="bfloat16", name="frozen", trainable=False)),
            {},
            "frozen/kernel",
        ),
        (with_two_of_a_name, {}, "same.kernel"),
        (
            lambda: net(Stage(name="stage1"), L.Conv2D(3, 1, name="stage1.conv")),
            {},
            "stage1.conv.kernel",
        ),
        (mixes, {}, "rest of the batch"),
        (
            partial(mixes, kernel_initializer="zeros"),
            {"policy": "mixed_bfloat16"},
            "rest of the batch",
        ),
        (lambda: net(L.Conv2D(2, 3, bias_constraint="non_neg", name="ruled")), {}, "ruled/bias"),
        (lambda: net(L.SpectralNormalization(L.Conv2D(2, 3))), {}, "kernel"),
        (Trained, {}, "train_step"),
        (
            lambda: net(L.BatchNormalization(synchronized=True, name="norm")),
            {},
            "norm.*--batch_statistics",
        ),
        (lambda: net(Scaled("float32", name="own")), {"synchronized": True}, "own/calls"),
    ],
)
def test_models_that_towers_would_train_wrongly_are_refused(make, options, mentions):
    with pytest.raises(UsageError, match=f"^--(model|batch_statistics).*{mentions}"):
        checked(make, **options)


def test_a_training_checks_its_net_and_a_restored_one_is_not_checked(tmp_path):
    (tmp_path / "nets.py").write_text(
        "import keras\n\ndef probable():\n    return keras.Sequential([keras.Input((20, 20, 3)), "
        "keras.layers.Flatten(), keras.layers.Dense(10, 'softmax')])\n"
    )
    config = TrainConfig(model=f"{tmp_path}/nets.py:probable", crop=20)
    examples = synthetic.make(20, 0, 0)
    with pytest.raises(UsageError, match="--model returns probabilities"):
        build.make_model(config, "float32", examples.info, examples)
    build.make_model(config, "float32", examples.info)


def test_a_net_that_an_earlier_run_may_have_trained_is_refused():
    """Also a part of one, and one that gets its variables in the first call."""
    whole = net()
    backbone = L.Conv2D(2, 3, name="backbone")
    part = lambda: net(backbone)  # noqa: E731
    checked(part)
    for make, variable in ((lambda: whole, "head/kernel"), (part, "backbone/kernel")):
        with pytest.raises(UsageError, match=variable):
            checked(make)


def test_arguments_are_passed_by_name():
    def make(num_classes, image_size, width=3):
        return net(L.Conv2D(width, 3), image_size=image_size, classes=num_classes)

    model = user_model.build_model(make, 20, 7, "mixed_bfloat16")
    assert model.output_shape == (None, 7)
    assert model.layers[1].compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"


def test_a_sequential_model_becomes_a_graph_of_its_layers():
    """Stages, activations and the features before the last layer need this graph, and checkpoints
    the names.
    """
    made = []

    def make():
        made.append(net(L.Conv2D(4, 3, name="first")))
        return made[0]

    model = checked(make)
    assert [layer.name for layer in model.layers[1:]] == ["first", "flat", "head"]
    assert [v.path for v in model.variables] == [v.path for v in made[0].variables]


def test_a_model_with_a_graph_is_trained_with_its_own_call():
    """Training and evaluation rebuild models with more outputs."""
    model = checked(OwnCall)
    rebuilt = keras.Model(model.input, model.output)
    images = np.random.default_rng(0).random((2, 24, 24, 3), "f4")
    kernel, bias = model.trainable_variables
    expected = 2 * images.reshape(2, -1) @ kernel.numpy() + bias.numpy()

    np.testing.assert_allclose(rebuilt(images), expected, atol=1e-5)
    assert {v.path for v in rebuilt.variables} == {v.path for v in model.variables}


class Narrow(L.BatchNormalization):
    """A user's subclass of Keras's norm."""


@pytest.mark.parametrize("kind", [L.BatchNormalization, Narrow, BatchNorm])
def test_all_kinds_of_batch_norms_are_synchronized(towers, kind):
    """Two towers, on halves with different moments, compute what one tower computes on the whole
    batch.
    """
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 3)).astype("f4")
    images = images * np.repeat([1, 3], 4)[:, None, None, None]
    keras.utils.set_random_seed(0)
    model = user_model.build_model(lambda: net(kind(name="norm"), image_size=6), 6, 10, "float32")
    synchronize(model)
    weights, statistics = variable_values(model)

    @tf.function(autograph=False)
    def run(count):
        def call(tower, shard):
            return model.stateless_call(weights, statistics, shard, training=True)

        shards = split_batch(tf.constant(images), towers(count))
        results = run_on_towers_synchronized(call, towers(count), shards)
        logits = tf.concat([logits for logits, _ in results], 0)
        return logits, [values for _, values in results]

    one, _ = run(1)
    two, new_statistics = run(2)
    for by_tower in zip(*new_statistics, strict=True):
        np.testing.assert_allclose(*by_tower, rtol=1e-6)

    np.testing.assert_allclose(two, one, atol=1e-5)
