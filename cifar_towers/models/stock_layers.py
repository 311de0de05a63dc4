"""Copies of the project's models in stock Keras layers and operations, which load without this package.

The converters to LiteRT and ONNX know them too, but neither XLA's compiled functions nor `Erfc` of TensorFlow's GELU.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from cifar_towers.models.layers import Activation, BatchNorm, Conv2D, LocalResponseNorm, PadChannels
from cifar_towers.models.speednet import Whitening

LayerAndWeights = tuple[keras.layers.Layer, list[np.ndarray]]  # the weights are set once the layer is built


def to_stock_layers(model: keras.Model) -> keras.Model:
    """Return a model of stock layers with the same weights and outputs in evaluation; `model` itself if it is one."""
    if not any(type(layer) in STOCK_EQUIVALENTS for layer in model.layers):
        return model
    weights: dict[str, list[np.ndarray]] = {}

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        copy, weights[layer.name] = STOCK_EQUIVALENTS.get(type(layer), _same_layer)(layer)
        return copy

    copy = keras.models.clone_model(model, clone_function=clone)
    for layer in copy.layers:
        layer.set_weights(weights.get(layer.name, []))
    return copy


def _same_layer(layer: keras.layers.Layer) -> LayerAndWeights:
    """Return Keras's layer of the same configuration, and the weights of `layer`.

    Initializers become zeros, because they may be the project's.
    """
    settings = layer.get_config()
    settings |= {name: "zeros" for name in settings if name.endswith("_initializer")}
    settings.pop("even_output", None)  # the pooling behind it discards the rest
    kind = keras.layers.Conv2D if isinstance(layer, (Conv2D, Whitening)) else type(layer)
    return kind.from_config(settings), layer.get_weights()


def _batch_norm(layer: BatchNorm) -> LayerAndWeights:
    copy = keras.layers.BatchNormalization(
        momentum=layer.momentum, epsilon=layer.epsilon, scale=layer.scale, **_common(layer)
    )
    weights = [layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance]
    return copy, [weight.numpy() for weight in weights if weight is not None]


def _pad_channels(layer: PadChannels) -> LayerAndWeights:
    """Return a 1x1 convolution with a stride, whose kernel is ones and zeros."""
    channels = layer.input.shape[-1]
    kernel = np.eye(channels, layer.channels, (layer.channels - channels) // 2, dtype="f4")
    copy = keras.layers.Conv2D(layer.channels, 1, layer.stride, use_bias=False, **_common(layer))
    return copy, [kernel[None, None]]


def _local_response_norm(layer: LocalResponseNorm) -> LayerAndWeights:
    """Return a model that sums the squares of neighboring channels by a 1x1 convolution."""
    shape = layer.input.shape[1:]
    channels = np.arange(shape[-1])
    kernel = layer.alpha * (abs(channels[:, None] - channels) <= layer.radius)
    images = keras.Input(shape)
    sum_squares = keras.layers.Conv2D(shape[-1], 1, use_bias=False, name=f"{layer.name}_sum", dtype="float32")
    squares = sum_squares(keras.ops.square(images))
    copy = keras.Model(images, images * keras.ops.power(layer.bias + squares, -layer.beta), name=layer.name)
    return copy, [kernel[None, None].astype("f4")]


def _activation(layer: Activation) -> LayerAndWeights:
    if layer.function != "gelu":
        return keras.layers.Activation(layer.function, **_common(layer)), []
    x = keras.Input(layer.input.shape[1:])
    return keras.Model(x, 0.5 * x * (1 + keras.ops.erf(x * 0.5**0.5)), name=layer.name), []


def _common(layer: keras.layers.Layer) -> dict[str, Any]:
    return {"name": layer.name, "dtype": layer.dtype_policy}


STOCK_EQUIVALENTS: dict[type, Callable[..., LayerAndWeights]] = {
    Conv2D: _same_layer,
    Whitening: _same_layer,
    BatchNorm: _batch_norm,
    Activation: _activation,
    PadChannels: _pad_channels,
    LocalResponseNorm: _local_response_norm,
}
