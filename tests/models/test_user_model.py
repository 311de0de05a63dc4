"""Nets of a user's own: what trains on towers, and what is refused by the layer's name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.models import user_model
from cifar_towers.models.layers import BatchNorm, synchronize
from cifar_towers.models.user_model import ModelError
from cifar_towers.towers import run_on_towers_synchronized, split_batch

L = keras.layers


def net(*layers, side=24, classes=10, head=True):
    made = [L.Input((side, side, 3)), *layers]
    return keras.Sequential([*made, L.Flatten(name="flat"), L.Dense(classes, name="head")] if head else made)


class Scaled(L.Layer):
    """A layer as users write them."""

    def build(self, shape):
        self.factor = self.add_weight(name="factor", shape=shape[-1:], initializer="ones")
        self.calls = self.add_weight(name="calls", shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return x * self.factor


class Noisy(L.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Unseeded(L.Layer):
    def call(self, x):
        return keras.random.dropout(x, 0.5)


class DrawnOnce(L.Layer):
    def call(self, x):
        return x + np.random.normal(size=x.shape[1:]).astype("f4")


class Counting(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class Remembering(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.offset = tf.Variable(1.0, trainable=False)

    def call(self, x):
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
    def __init__(self, classes=10):
        super().__init__()
        self.flat, self.head = L.Flatten(), L.Dense(classes, name="logits")

    def call(self, x):
        return self.head(self.flat(x))


class Trained(Subclassed):
    def train_step(self, data):
        return {}


@pytest.mark.parametrize(
    "make",
    [
        lambda: net(L.Conv2D(4, 3), L.BatchNormalization(), L.ReLU(), L.Dropout(0.5), Scaled()),
        lambda: net(
            L.GaussianNoise(0.1), L.RandomFlip(), L.RandomRotation(0.1), L.Conv2D(4, 3, kernel_regularizer="l2")
        ),
        Subclassed,
    ],
)
def test_nets_that_towers_can_train(make):
    model = user_model.make(make, 24, 10, "float32")
    assert model(np.zeros((2, 24, 24, 3), "f4")).shape == (2, 10)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: net(Noisy(name="grain")),
            "layer grain keeps something beside its weights, or draws random numbers without",
        ),
        (lambda: net(Unseeded(name="drop")), "layer drop keeps something beside its weights, or draws random numbers"),
        (lambda: net(Counting(name="counter")), "layer counter changes a variable of its own"),
        (lambda: net(Remembering(name="memory")), "layer memory keeps something beside its weights"),
        (lambda: net(Once(name="once")), "two towers cannot call it on 24x24 images: .*I can be called once"),
        (lambda: net(Noisy(name="grain"), Scaled(name="grain_1")), "layer grain keeps something"),
        (lambda: net(Scaled(), DrawnOnce(name="print")), "layer print has other constants in another call"),
        (lambda: net(classes=7), r"layer head gives an output of shape \(7,\) an image; 10 classes want \(10,\)"),
        (lambda: Subclassed(7), r"layer logits gives an output of shape \(7,\) an image"),
        (
            lambda: net(L.Conv2D(10, 3), L.MaxPooling2D(2, name="pool"), head=False),
            r"layer pool gives an output of shape \(11, 11, 10\) an image",
        ),
        (lambda: net(L.Flatten(), L.Dense(10, "softmax", name="shares"), head=False), "layer shares ends in softmax"),
        (lambda: Trained(), "it has a train_step of its own, which towers would not run; leave it out"),
        (lambda: net(side=32), r"expected shape=\(None, 32, 32, 3\)"),
        (lambda: net(L.Flatten(), L.Lambda(lambda x: x[:, :10]), head=False), "it has no weights to train"),
        (lambda: 3, "it returns int, not a Keras model"),
        (lambda: 1 / 0, "it cannot be made: test_user_model.py, line .*ZeroDivisionError"),
    ],
)
def test_nets_that_towers_cannot_train_are_told_in_a_line(make, told):
    with pytest.raises(ModelError, match=told) as caught:
        user_model.make(make, 24, 10, "float32")
    assert "\n" not in str(caught.value)


def test_a_function_is_handed_what_it_asks_for():
    def mine(num_classes, side, width=3):
        return net(L.Conv2D(width, 3), side=side, classes=num_classes)

    model = user_model.make(mine, 20, 7, "mixed_bfloat16")
    assert model.output_shape == (None, 7) and model.layers[1].compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"


def test_functions_are_found_in_files_and_modules(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text("import keras\n\ndef small():\n    return 3\n")
    (tmp_path / "broken.py").write_text("import keras\n\nraise OSError('no')\n")
    assert user_model.find(str(tmp_path / "mynets.py"), "small")() == 3
    monkeypatch.chdir(tmp_path)
    assert user_model.find("mynets", "small")() == 3
    for where, function, told in (
        ("nowhere.py", "small", "there is no file nowhere.py"),
        ("nosuchmodule", "small", "nosuchmodule cannot be imported: ModuleNotFoundError"),
        ("mynets", "large", "mynets has no function large; it has small"),
        ("broken.py", "small", "broken.py cannot be imported: broken.py, line 3: OSError: no"),
    ):
        with pytest.raises(ModelError, match=told):
            user_model.find(where, function)


def test_what_losses_a_net_adds_is_known():
    assert user_model.adds_losses(net(L.Conv2D(2, 3, kernel_regularizer="l2")), 24)
    assert not user_model.adds_losses(net(L.Conv2D(2, 3), L.Dropout(0.1)), 24)


class Narrow(L.BatchNormalization):
    """A norm as users derive it from Keras's."""


def test_all_kinds_of_batch_norms_are_synchronized(towers):
    """Of two towers, on halves with other moments: what each makes of its half is what one makes of the whole."""
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 3)).astype("f4") * np.repeat([1, 3], 4)[:, None, None, None]

    def outputs(kind, count):
        keras.utils.set_random_seed(0)
        model = user_model.make(lambda: net(kind(name="norm"), side=6), 6, 10, "float32")
        synchronize(model)
        weights, statistics = (
            [v.value for v in of] for of in (model.trainable_variables, model.non_trainable_variables)
        )

        @tf.function(autograph=False)
        def run():
            shards = split_batch([tf.constant(images)], towers(count))
            call = lambda tower, shard: model.stateless_call(weights, statistics, shard[0], training=True)  # noqa: E731
            results = run_on_towers_synchronized(call, towers(count), shards)
            return tf.concat([logits for logits, _ in results], 0), [changed for _, changed in results]

        logits, changed = run()
        for others in zip(*changed, strict=True):
            np.testing.assert_allclose(others[0], others[-1], rtol=1e-6)
        return logits

    for kind in (L.BatchNormalization, Narrow, BatchNorm):
        np.testing.assert_allclose(outputs(kind, 2), outputs(kind, 1), atol=1e-5, err_msg=kind.__name__)


def test_a_sequential_net_can_be_looked_into():
    """As one of layers: for stages, activations, and the features of the last layer."""
    mine = net(L.Conv2D(4, 3, name="first"))
    paths = [variable.path for variable in mine.variables]
    model = user_model.make(lambda: mine, 24, 10, "float32")
    assert [layer.name for layer in model.layers[1:]] == ["first", "flat", "head"]
    assert [variable.path for variable in model.variables] == paths  # by which checkpoints know them
