"""A step that XLA compiles: the same to rounding, few launches, and only operations that XLA has
for GPUs.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util import pywrap_xla_ops

from cifar_towers.config import TrainConfig
from tests.helpers import operations
from tests.helpers.configs import recipe
from tests.helpers.step_runs import StepRun

ALL_PARTS = {
    "model": f"{__file__}:without_dropout",
    "batch_size": 16,
    "ema_decay": 0.9,
    "lookahead": True,
}
ALL_PARTS |= {
    "optimizer": "muon",
    "learning_rate": 0.02,
    "label_smoothing": 0.1,
    "weight_decay": 0.01,
}
ALL_PARTS |= {"brightness": 8.0, "cutout": 4}


def without_dropout(image_size, num_classes):
    """Make a convolution, batch norm and a dense layer with weight loss. XLA draws other random
    numbers.
    """
    images = keras.Input((None, None, 3))
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, 2, use_bias=False)(images))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Activation("silu")(x))
    return keras.Model(images, keras.layers.Dense(num_classes, kernel_regularizer="l2")(x))


def without_norm(image_size, num_classes):
    images = keras.Input((image_size, image_size, 3))
    x = keras.layers.Flatten()(keras.layers.Conv2D(8, 5, 4, activation="silu")(images))
    return keras.Model(images, keras.layers.Dense(num_classes)(x))


def as_eager_code(images, draws):
    """Darken images, and turn the part around, by an operation that XLA lacks."""
    darkened = tf.numpy_function(
        lambda images, draws: (images - draws)[::-1], [images, draws[:, :1, None, None]], tf.float32
    )
    return tf.ensure_shape(darkened, images.shape)


def after_steps(towers, examples, precision="float32", **settings):
    """Return all variables after six steps, in which slow weights were taken once, and the last
    metrics.
    """
    run = StepRun(towers, examples, TrainConfig(**ALL_PARTS | settings), precision)
    metrics = [run.step(number) for number in range(6)]
    return run.values(), metrics[-1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (1, {}),
        (4, {}),
        pytest.param(2, {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "mirrored"}, marks=pytest.mark.slow),
        (
            1,
            {"optimizer": "adamw", "augment": f"{__file__}:as_eager_code", "micro_batches": 2},
        ),
    ],
)
def test_compiled_equals_not_compiled(towers, examples, count, settings):
    plain, metrics = after_steps(towers(count), examples, **settings)
    compiled, of_compiled = after_steps(towers(count), examples, **settings, jit_compile=True)

    assert plain.keys() == compiled.keys()

    for name, value in plain.items():
        np.testing.assert_allclose(
            compiled[name], value, rtol=1e-3, atol=1e-3 * np.abs(value).max(), err_msg=name
        )

    assert of_compiled.updated
    assert of_compiled.loss == pytest.approx(metrics.loss, rel=1e-4)
    assert of_compiled.gradient_norm == pytest.approx(metrics.gradient_norm, rel=1e-3)


@pytest.mark.gpu
def test_compiled_towers_equal_one_not_compiled(towers, examples):
    config = TrainConfig(model=f"{__file__}:without_norm", batch_size=24, learning_rate=0.05)
    one = StepRun(towers(1), examples, config)
    three = StepRun(towers(3), examples, dataclasses.replace(config, jit_compile=True))
    for number in range(3):
        losses = [run.step(number).loss for run in (one, three)]

    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    for name, value in one.values("model.").items():
        np.testing.assert_allclose(
            three.values("model.")[name], value, atol=1e-3 * np.abs(value).max(), err_msg=name
        )


def traced(towers, examples, name, precision="float32", **settings):
    """Return the traced function of a recipe's first image size."""
    config = recipe(name, batch_size=12, **settings)
    return StepRun(towers, examples, config, precision).traced()


@pytest.mark.parametrize("name", ["cifarnet", "speed94"])
def test_the_host_launches_few_operations(towers, examples, name):
    """One tower, on another device than the host's."""
    elsewhere = dataclasses.replace(towers(2)[1], index=0)
    plain = traced([elsewhere], examples, name)
    whole = traced([elsewhere], examples, name, jit_compile=True)
    before = operations.count_launched(plain)
    after = operations.count_launched(whole)
    print(f"{name}: {before} operations, {after} compiled whole")

    assert after <= 60
    assert before > 5 * after


@pytest.mark.parametrize(
    ("name", "precision", "settings"),
    [
        ("speed94", "bfloat16", {}),
        ("speed95", "float32", {"model": "speednet93"}),
        ("cifarnet", "float32", {"cutout": 4, "micro_batches": 2}),
        ("resnet20", "float32", {"optimizer": "adamw", "lookahead": True}),
    ],
)
def test_xla_has_every_compiled_operation_for_gpus(towers, examples, name, precision, settings):
    known = {*pywrap_xla_ops.get_gpu_kernel_names()}
    function = traced(towers(2)[1:], examples, name, precision, jit_compile=True, **settings)
    types = operations.compiled_types(function)
    assert len(types) > 50, types - known
    assert types <= known, types - known
