"""The project's nets made of Keras's own layers alone, for where this package is not installed."""

from collections.abc import Callable

import keras
import numpy as np

from cifar_towers.models.layers import Activation, BatchNorm, Conv2D, LocalResponseNorm, PadChannels
from cifar_towers.models.speednet import Whitening

Made = tuple[keras.layers.Layer, list[np.ndarray]]  # a layer, and the weights it is to have once it is built


def plain(model: keras.Model) -> keras.Model:
    """A net that computes what `model` does in evaluation, by stock layers, with the same weights.

    A functional model, or one of a user's own without the layers of this project, which comes back as it is.
    """
    return (
        rebuild(model, STOCK_EQUIVALENTS) if any(type(layer) in STOCK_EQUIVALENTS for layer in model.layers) else model
    )


def rebuild(model: keras.Model, made: dict[type, Callable[..., Made]]) -> keras.Model:
    """A copy of `model`, with the same weights, of what `made` says of its kinds of layers, and of the same layer for
    all others."""
    weights = {}

    def clone(layer: keras.layers.Layer) -> keras.layers.Layer:
        new, weights[layer.name] = made.get(type(layer), as_it_is)(layer)
        return new

    copy = keras.models.clone_model(model, clone_function=clone)
    for layer in copy.layers:
        layer.set_weights(weights.get(layer.name, []))
    return copy


def as_it_is(layer: keras.layers.Layer) -> Made:
    """The same layer again."""
    return type(layer).from_config(_settings(layer)), layer.get_weights()


def _convolution(layer: Conv2D | Whitening) -> Made:
    return keras.layers.Conv2D.from_config(_settings(layer)), layer.get_weights()


def _batch_norm(layer: BatchNorm) -> Made:
    made = keras.layers.BatchNormalization(
        momentum=layer.momentum, epsilon=layer.epsilon, scale=layer.scale, **_common(layer)
    )
    weights = [layer.gamma] if layer.scale else []
    weights += [layer.beta, layer.moving_mean, layer.moving_variance]
    return made, [weight.numpy() for weight in weights]


def _activation(layer: Activation) -> Made:
    return keras.layers.Activation(layer.function, **_common(layer)), []


def _pad_channels(layer: PadChannels) -> Made:
    """A 1x1 convolution with a stride, whose kernel is ones and zeros."""
    channels = layer.input.shape[-1]
    missing = layer.channels - channels
    kernel = np.eye(channels, layer.channels, missing // 2, dtype="f4")
    made = keras.layers.Conv2D(layer.channels, 1, layer.stride, use_bias=False, **_common(layer))
    return made, [kernel[None, None]]


def _local_response_norm(layer: LocalResponseNorm) -> Made:
    """The sum over near channels as a 1x1 convolution of the squares."""
    shape = layer.input.shape[1:]
    places = np.arange(shape[-1])
    near = layer.alpha * (abs(places[:, None] - places) <= layer.radius)
    images = keras.Input(shape)
    squares = keras.layers.Conv2D(shape[-1], 1, use_bias=False, name=f"{layer.name}_sum")(keras.ops.square(images))
    made = keras.Model(images, images * keras.ops.power(layer.bias + squares, -layer.beta), name=layer.name)
    return made, [near[None, None].astype("f4")]


def _settings(layer: keras.layers.Layer) -> dict:
    """A layer's configuration without initializers, which might be the project's own; its weights follow."""
    settings = layer.get_config()
    return settings | {name: "zeros" for name in settings if name.endswith("_initializer")}


def _common(layer: keras.layers.Layer) -> dict:
    return {"name": layer.name, "dtype": layer.dtype_policy}


STOCK_EQUIVALENTS: dict[type, Callable[..., Made]] = {
    Conv2D: _convolution,
    Whitening: _convolution,
    BatchNorm: _batch_norm,
    Activation: _activation,
    PadChannels: _pad_channels,
    LocalResponseNorm: _local_response_norm,
}
