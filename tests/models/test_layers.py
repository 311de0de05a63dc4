import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar_towers import xla
from cifar_towers.models.layers import (
    COMPILED,
    AddReLU,
    BatchNorm,
    Conv2D,
    LocalResponseNorm,
    PadChannels,
)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("mixed_bfloat16", 0.05)])
def test_batch_norm_normalizes_and_returns_float32_averages(dtype, atol):
    x = np.random.default_rng(0).normal(3, 2, (8, 5, 5, 4)).astype("f4")
    layer = BatchNorm(momentum=0.6, dtype=dtype)
    layer.build(x.shape)
    weights = layer.trainable_variables
    statistics = layer.non_trainable_variables
    y, (mean, variance) = layer.stateless_call(
        weights, statistics, tf.cast(x, layer.compute_dtype), training=True
    )

    assert y.dtype == layer.compute_dtype
    assert mean.dtype == variance.dtype == "float32"

    expected = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + layer.epsilon)
    np.testing.assert_allclose(tf.cast(y, "float32"), expected, atol=atol)
    np.testing.assert_allclose(mean, 0.4 * x.mean((0, 1, 2)), rtol=0.1 * atol)
    np.testing.assert_allclose(variance, 0.6 + 0.4 * x.var((0, 1, 2), ddof=1), rtol=atol)
    np.testing.assert_array_equal(layer.moving_mean, [0] * 4)  # the call itself assigns nothing


def test_batch_norm_evaluates_with_moving_statistics():
    layer = BatchNorm(scale=False)
    layer.build((None, 2, 2, 1))
    layer.moving_mean.assign([4.0])
    layer.moving_variance.assign([9.0])

    normalized = layer(tf.fill([1, 2, 2, 1], 10.0))
    np.testing.assert_allclose(normalized, np.full((1, 2, 2, 1), 2.0), rtol=1e-5)
    assert layer.gamma is None
    assert [v.name for v in layer.trainable_variables] == ["beta"]


@pytest.mark.parametrize("xla_runs", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(tf.float32, 1e-4), (tf.float64, 1e-4), (tf.bfloat16, 0.02)]
)
def test_local_response_norm_and_its_gradient_equal_tensorflows(monkeypatch, dtype, rtol, xla_runs):
    monkeypatch.setattr(xla, "xla_runs", lambda: xla_runs)
    x = tf.cast(tf.cast(tf.random.normal([2, 4, 4, 64], seed=1) * 30, dtype), tf.float32)
    upstream = tf.cast(tf.cast(tf.random.normal(x.shape, seed=2), dtype), tf.float32)

    def output_and_gradient(norm, x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = norm(x)
        return y, tape.gradient(y, x, upstream)

    def theirs(x):
        return tf.nn.local_response_normalization(x, 4, bias=1.0, alpha=0.001 / 9, beta=0.75)

    ours = LocalResponseNorm(dtype=dtype.name)
    results = output_and_gradient(ours, tf.cast(x, dtype), tf.cast(upstream, dtype))
    witnesses = output_and_gradient(theirs, x, upstream)
    largest = np.abs(witnesses[1]).max()
    for result, witness, atol in zip(results, witnesses, (0, 0.1 * rtol * largest), strict=True):
        assert result.dtype == dtype
        np.testing.assert_allclose(tf.cast(result, tf.float32), witness, rtol, atol)


@pytest.mark.parametrize("xla_runs", [True, False])
@pytest.mark.parametrize(("name", "witness"), [("gelu", tf.nn.gelu), ("silu", tf.nn.silu)])
def test_compiled_activations_and_gradients(monkeypatch, name, witness, xla_runs):
    monkeypatch.setattr(xla, "xla_runs", lambda: xla_runs)
    traced = tf.function(COMPILED[name]).get_concrete_function(tf.TensorSpec([101]))

    assert ("_XlaMustCompile" in str(traced.graph.as_graph_def().library)) == xla_runs

    x = tf.linspace(-6.0, 6.0, 101)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        ours = COMPILED[name](x)
        theirs = witness(x)
    gradients = [tape.gradient(y, x, output_gradients=tf.cos(x)) for y in (ours, theirs)]

    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    np.testing.assert_allclose(*gradients, atol=1e-5)


def test_pad_channels_is_shortcut_a():
    x = tf.reshape(tf.range(16.0), [1, 4, 4, 1])
    y = PadChannels(3, 2)(x)
    np.testing.assert_array_equal(y[0, :, :, 1], [[0, 2], [8, 10]])
    assert tf.reduce_sum(y[..., 0]) == tf.reduce_sum(y[..., 2]) == 0


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_add_relu_returns_the_relu_of_a_sum_twice(dtype):
    x, y, *upstream = (
        tf.cast(tf.random.stateless_normal([2, 5, 5, 8], [0, seed]), dtype) for seed in range(4)
    )
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, y])
        ours = AddReLU(dtype=dtype.name)([x, y])
        theirs = tf.nn.relu(x + y)
    for output in ours:
        np.testing.assert_array_equal(output, theirs)
    for tensor in (x, y):
        np.testing.assert_array_equal(
            tape.gradient(ours, tensor, upstream),
            tape.gradient(theirs, tensor, upstream[0] + upstream[1]),
        )


def test_layers_deserialize_from_their_config():
    convolution = Conv2D(6, 3, padding="same", even_output=True)
    norm = BatchNorm(0.5, scale=False)
    for layer in (norm, LocalResponseNorm(), PadChannels(8, 2), AddReLU(), convolution):
        copy = keras.layers.deserialize(keras.layers.serialize(layer))
        assert copy.get_config() == layer.get_config()


@pytest.mark.parametrize(
    "options",
    [
        {"dilation_rate": 2},
        {"strides": (1, 2)},
        {"groups": 3},
        {"strides": 2},
        {"data_format": "channels_first"},
    ],
)
def test_conv2d_equals_keras_for_all_options(options):
    images = np.random.default_rng(0).normal(size=(2, 9, 9, 3)).astype("f4")
    ours = Conv2D(6, 3, **options)
    theirs = keras.layers.Conv2D(6, 3, **options)
    ours(images)
    theirs(images)
    theirs.set_weights(ours.get_weights())
    np.testing.assert_allclose(ours(images), theirs(images), atol=1e-5)


@pytest.mark.parametrize(("high", "wide"), [(7, 7), (5, 8), (8, 8)])
def test_conv2d_computes_no_row_that_pooling_discards(high, wide):
    """Pooled values and all gradients are those of the whole convolution, also where the size is
    not known.
    """
    images = tf.random.stateless_normal([2, high, wide, 24], [0, 1])
    even = Conv2D(64, 3, padding="same", even_output=True)
    whole = Conv2D(64, 3, padding="same", even_output=False)
    even_size = even(images).shape[1:3]
    whole_size = whole(images).shape[1:3]

    assert even_size == even.compute_output_shape(images.shape)[1:3]
    assert even_size == tuple(size - size % 2 for size in whole_size)

    even.set_weights(whole.get_weights())
    weight = tf.random.stateless_normal([2, even_size[0] // 2, even_size[1] // 2, 64], [2, 3])

    def values(layer, inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            pooled = tf.nn.max_pool2d(layer(inputs), 2, 2, "VALID")
            loss = tf.reduce_sum(weight * pooled)
        return pooled, *tape.gradient(loss, [inputs, layer.kernel.value, layer.bias.value])

    unknown = tf.function(values).get_concrete_function(even, tf.TensorSpec([2, None, None, 24]))
    for ours, of_unknown, expected in zip(
        values(even, images), unknown(images), values(whole, images), strict=True
    ):
        np.testing.assert_allclose(ours, expected, atol=2e-4)
        np.testing.assert_allclose(of_unknown, expected, atol=2e-4)
