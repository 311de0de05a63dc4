"""Layers that Keras lacks or has only in a slower form."""

from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.models.convolution import conv2d, even_padding
from cifar_towers.towers import all_reduce_mean, num_replicas
from cifar_towers.xla import fused, narrow, wide

Shape: TypeAlias = tuple[int | None, ...]


def logits_dtype(dtype: str) -> str:
    """Return the type of the logits of a model with policy `dtype`: float32 or wider, for the
    loss.
    """
    return "float64" if dtype == "float64" else "float32"


@keras.saving.register_keras_serializable("cifar_towers")
class Conv2D(keras.layers.Conv2D):
    """Keras's layer, computed by `convolution.conv2d` where possible.

    Args:
      even_output: leave out the last row or column of an output of odd size, which a 2x2 pooling
        would discard. It is computed nevertheless if the size is not known when the step is traced.
        It is for SAME convolutions with odd kernels and stride 1.
    """

    def __init__(self, *args: Any, even_output: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.even_output = even_output

    def convolution_op(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        plain = self.groups == 1 and set(self.dilation_rate) == {1} and len(set(self.strides)) == 1
        if not plain or self.data_format != "channels_last":
            return super().convolution_op(inputs, kernel)
        # read the variable here, inside Keras's scopes: the gradient is taken outside them
        kernel = tf.convert_to_tensor(kernel)
        padding = even_padding(inputs.shape, kernel.shape) if self.even_output else self.padding
        return conv2d(inputs, kernel, self.strides[0], padding)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        shape = super().compute_output_shape(input_shape)
        if not self.even_output or None in shape[1:]:
            return shape
        batch, height, width, filters = shape
        return batch, height - height % 2, width - width % 2, filters

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"even_output": self.even_output}


@keras.saving.register_keras_serializable("cifar_towers")
class BatchNorm(keras.layers.Layer):
    """Batch normalization over [B, H, W] through TensorFlow's fused operation.

    The moments are float32 in any precision. In training, `stateless_call` returns the new moving
    statistics, from the mean and the unbiased variance of the batch.

    Args:
      momentum: fraction of the moving statistics that a step keeps.
      scale: train a scale for each channel, not only a shift.
      synchronized: use the moments of the whole batch, not of the tower's shard. This costs three
        all-reduces of at most two vectors of C numbers, two forward and one backward.
    """

    # added to the variance; the smallest that TensorFlow's fused operation takes
    epsilon = 1.001e-5

    def __init__(
        self, momentum: float = 0.9, scale: bool = True, synchronized: bool = False, **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.momentum = momentum
        self.scale = scale
        self.synchronized = synchronized

    def build(self, input_shape: Shape) -> None:
        channels = (input_shape[-1],)
        # autocast=False: the moments and the shift stay float32 where images are bfloat16
        options = {"shape": channels, "autocast": False}
        self.beta = self.add_weight(name="beta", initializer="zeros", **options)
        self.gamma = (
            self.add_weight(name="gamma", initializer="ones", **options) if self.scale else None
        )
        self.moving_mean = self.add_weight(
            name="moving_mean", initializer="zeros", trainable=False, **options
        )
        self.moving_variance = self.add_weight(
            name="moving_variance", initializer="ones", trainable=False, **options
        )

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        beta = tf.convert_to_tensor(self.beta.value)
        gamma = tf.ones_like(beta) if self.gamma is None else tf.convert_to_tensor(self.gamma.value)
        if not training:
            mean = tf.convert_to_tensor(self.moving_mean.value)
            variance = tf.convert_to_tensor(self.moving_variance.value)
            return _normalize(inputs, gamma, beta, mean, variance)
        if self.synchronized and num_replicas() > 1:
            normalized, mean, variance = _synchronized_batch_norm(inputs, gamma, beta)
        else:
            normalized, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                inputs, gamma, beta, epsilon=self.epsilon
            )
        self.moving_mean.assign(self.momentum * self.moving_mean + (1 - self.momentum) * mean)
        self.moving_variance.assign(
            self.momentum * self.moving_variance + (1 - self.momentum) * variance
        )
        return normalized


def _normalize(
    images: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> tf.Tensor:
    """Compute gamma (images - mean) / sqrt(variance + epsilon) + beta, per channel."""
    return tf.compat.v1.nn.fused_batch_norm(
        images,
        gamma,
        beta,
        mean=mean,
        variance=variance,
        epsilon=BatchNorm.epsilon,
        is_training=False,
    )[0]


@tf.custom_gradient
def _synchronized_batch_norm(
    images: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor
) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], Callable]:
    """Normalize a shard [B/K, H, W, C] by the moments of all towers' shards together.

    The gradient is that of the norm of the whole batch (S. Ioffe and C. Szegedy, arXiv 1502.03167,
    section 3), with its two sums over the batch averaged over the towers.

    Returns:
      The normalized shard, and the mean [C] and unbiased variance [C] of the batch.
    """
    positions = float(images.shape[:3].num_elements())  # values per channel
    mean, variance = _join_moments(*_moments(images))

    def gradient(upstream: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, ...]:
        to_images, to_gamma, to_beta, *_ = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=upstream,
            x=images,
            scale=gamma,
            reserve_space_1=mean,
            reserve_space_2=variance,
            reserve_space_3=tf.zeros([], tf.float32),
            epsilon=BatchNorm.epsilon,
            is_training=False,
        )
        sums = all_reduce_mean(tf.stack([to_beta, to_gamma])) / positions
        inverse_std = tf.math.rsqrt(variance + BatchNorm.epsilon)
        slope = gamma * tf.square(inverse_std) * sums[1]
        shift = gamma * inverse_std * sums[0] - slope * mean
        through_moments = tf.cast(tf.cast(images, tf.float32) * slope + shift, images.dtype)
        return to_images - through_moments, to_gamma, to_beta

    count = positions * num_replicas()
    unbiased = variance * (count / (count - 1))
    return (_normalize(images, gamma, beta, mean, variance), mean, unbiased), gradient


@fused
def _moments(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the mean and variance of each channel, in float32."""
    return tf.nn.moments(tf.cast(images, tf.float32), [0, 1, 2])


def _join_moments(local_mean: tf.Tensor, local_variance: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the moments of the whole batch from those of this tower's shard."""
    mean = all_reduce_mean(local_mean)
    return mean, all_reduce_mean(local_variance + tf.square(local_mean - mean))


BATCH_NORMS = (BatchNorm, keras.layers.BatchNormalization)


def synchronize(model: keras.Model) -> None:
    """Make all batch norms of a model use the moments of the whole batch: this module's, Keras's
    and its subclasses.

    Their configurations stay as they were, so a copy of the model is not synchronized.
    """
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, BatchNorm):
            layer.synchronized = True
        elif isinstance(layer, keras.layers.BatchNormalization):
            norm = type(layer)
            layer.__class__ = type(norm.__name__, (_SynchronizedMoments, norm), {})


class _SynchronizedMoments(keras.layers.BatchNormalization):
    """Keras's batch norm with the moments of the whole batch, not of the tower's shard."""

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return _join_moments(*super()._moments(inputs, mask))


@keras.saving.register_keras_serializable("cifar_towers")
class LocalResponseNorm(keras.layers.Layer):
    """x / (bias + alpha * sum of squares over the 2 radius + 1 nearest channels) ** beta.

    It equals `tf.nn.local_response_normalization`. The sum is computed as a product with a banded
    channels x channels matrix, in any float type, on any device, at the speed of a 1x1 convolution.
    The rest is one pass through memory forward, and two backward.
    """

    # the tutorial's; the functions below compute this beta only
    radius = 4
    bias = 1.0
    alpha = 0.001 / 9
    beta = 0.75

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return _local_response_norm(inputs)


@tf.custom_gradient
def _local_response_norm(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    channels = np.arange(x.shape[-1])
    near = np.abs(channels[:, None] - channels[None, :]) <= LocalResponseNorm.radius
    band = tf.constant(LocalResponseNorm.alpha * near, x.dtype)

    squares = tf.tensordot(tf.square(x), band, 1)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        to_squares = _gradient_to_squares(x, squares, upstream)
        return _gradient_to_inputs(x, squares, upstream, tf.tensordot(to_squares, band, 1))

    return _scale(x, squares), gradient


@fused
def _scale(x: tf.Tensor, squares: tf.Tensor) -> tf.Tensor:
    return tf.cast(wide(x) * _scale_of(squares), x.dtype)


@fused
def _gradient_to_squares(x: tf.Tensor, squares: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    slope = -LocalResponseNorm.beta * _scale_of(squares) / (LocalResponseNorm.bias + wide(squares))
    return tf.cast(wide(upstream) * wide(x) * slope, x.dtype)


@fused
def _gradient_to_inputs(
    x: tf.Tensor, squares: tf.Tensor, upstream: tf.Tensor, through_squares: tf.Tensor
) -> tf.Tensor:
    direct = wide(upstream) * _scale_of(squares)
    return tf.cast(direct + 2 * wide(x) * wide(through_squares), x.dtype)


def _scale_of(squares: tf.Tensor) -> tf.Tensor:
    """Compute (bias + squares) ** -3/4 by two roots, which are faster than a power."""
    root = tf.math.rsqrt(LocalResponseNorm.bias + wide(squares))
    return root * tf.sqrt(root)


@keras.saving.register_keras_serializable("cifar_towers")
class Activation(keras.layers.Layer):
    """GELU or SiLU, whose forward and backward pass XLA compiles to one pass through memory each,
    instead of five.
    """

    def __init__(self, function: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return COMPILED[self.function](inputs)


def _compiled(function: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return an elementwise function with forward and backward pass fused; only its input is stored
    in between.
    """

    @fused
    def forward(x: tf.Tensor) -> tf.Tensor:
        return narrow(function(wide(x)), x.dtype)

    @fused
    def backward(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        wide_x = wide(x)
        with tf.GradientTape() as tape:
            tape.watch(wide_x)
            y = function(wide_x)
        return narrow(tape.gradient(y, wide_x, wide(upstream)), x.dtype)

    @tf.custom_gradient
    def compiled(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return forward(x), lambda upstream: backward(x, upstream)

    return compiled


COMPILED = {
    "gelu": _compiled(lambda x: tf.nn.gelu(x, approximate=False)),
    "silu": _compiled(lambda x: x * tf.nn.sigmoid(x)),
}


@keras.saving.register_keras_serializable("cifar_towers")
class AddReLU(keras.layers.Layer):
    """ReLU of a sum of two tensors, in one pass through memory.

    It is returned twice, for a block and for the shortcut around it: their gradients are added and
    passed through the ReLU in one pass, too.
    """

    activation = staticmethod(keras.activations.relu)  # for those who look for nonlinear layers

    def call(self, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(_add_relu(*inputs))

    def compute_output_shape(self, input_shape: list[Shape]) -> list[Shape]:
        return input_shape


@tf.custom_gradient
def _add_relu(x: tf.Tensor, y: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable]:
    output = _relu_of_sum(x, y)

    def gradient(first: tf.Tensor, second: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        to_sum = _gradient_to_sum(output, first, second)
        return to_sum, to_sum

    return (output, tf.identity(output)), gradient


@fused
def _relu_of_sum(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return narrow(tf.nn.relu(wide(x) + wide(y)), x.dtype)


@fused
def _gradient_to_sum(output: tf.Tensor, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    upstream = wide(first) + wide(second)
    return narrow(tf.where(wide(output) > 0, upstream, tf.zeros_like(upstream)), output.dtype)


@keras.saving.register_keras_serializable("cifar_towers")
class PadChannels(keras.layers.Layer):
    """Shortcut A of residual nets: every `stride`-th pixel, and zeros for the new channels."""

    def __init__(self, channels: int, stride: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.channels = channels
        self.stride = stride

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        missing = self.channels - inputs.shape[-1]
        # as inputs[:, ::stride, ::stride], whose gradient is slow on CPUs
        thinned = tf.nn.max_pool2d(inputs, 1, self.stride, "VALID")
        return tf.pad(thinned, [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]])
