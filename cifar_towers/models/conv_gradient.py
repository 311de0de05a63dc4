"""A 2-D convolution with a faster gradient to its kernel on CPUs, equal to TensorFlow's up to rounding."""

from collections.abc import Sequence

import tensorflow as tf

from cifar_towers.towers.devices import processor_features

Padding = Sequence[tuple[int, int]]  # before and after each of the axes [B, H, W, C]


def even_padding(images: tf.TensorShape, kernel: tf.TensorShape) -> Padding | str:
    """The padding of a SAME convolution of odd kernel size, without the last row and column of an output of odd size.

    Args:
      images: [B, H, W, C]. "SAME" is returned if H or W is not known.
      kernel: [h, w, C, F].
    """
    if None in images[1:3]:
        return "SAME"
    sides = [(size // 2, size // 2 - side % 2) for size, side in zip(kernel[:2], images[1:3], strict=True)]
    return [(0, 0), *sides, (0, 0)]


def conv2d(images: tf.Tensor, kernel: tf.Tensor, strides: int = 1, padding: Padding | str = "SAME") -> tf.Tensor:
    """`tf.nn.conv2d` of [B, H, W, C] with [h, w, C, F], with a faster gradient to the kernel on CPUs.

    TensorFlow's reaches half the speed of the forward pass there, in bfloat16 and in float32 with AVX2. For kernels of
    odd size with stride 1 it is computed as h matrix products instead, one for each row of the kernel: the images,
    shifted by that row and by each of its w pixels side by side, times the gradient of the output.
    """
    if isinstance(padding, str):
        padding = padding.upper()
    if not _is_faster(images, kernel, strides, padding):
        return tf.nn.conv2d(images, kernel, strides, padding)
    if padding == "SAME":
        options = {"padding": "SAME"}
        padding = [(0, 0), *((size // 2, size // 2) for size in kernel.shape[:2]), (0, 0)]
    else:
        options = {"padding": "EXPLICIT", "explicit_paddings": sum(padding, ())}

    @tf.custom_gradient
    def convolve(images, kernel):
        def gradient(upstream):
            to_images = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(images), filter=kernel, out_backprop=upstream, strides=[1] * 4, **options
            )
            return to_images, _kernel_gradient(images, upstream, kernel.shape, padding)

        return tf.raw_ops.Conv2D(input=images, filter=kernel, strides=[1] * 4, **options), gradient

    return convolve(images, kernel)


def _kernel_gradient(images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape, padding: Padding) -> tf.Tensor:
    """Gradient of a padded convolution with stride 1 to its kernel."""
    high, wide, channels, filters = shape
    height, width = upstream.shape[1:3]
    # rows are the first axis: a shift by a row is a slice without a copy
    _, above_and_below, beside, _ = padding
    rows = tf.pad(tf.transpose(images, [1, 0, 2, 3]), [above_and_below, (0, 0), beside, (0, 0)])
    rows = tf.concat([rows[:, :, column : column + width] for column in range(wide)], -1)
    outputs = tf.reshape(tf.transpose(upstream, [1, 0, 2, 3]), [-1, filters])  # a tenth faster as the first factor
    products = [
        tf.matmul(outputs, tf.reshape(rows[row : row + height], [-1, wide * channels]), transpose_a=True)
        for row in range(high)
    ]
    return tf.reshape(tf.transpose(tf.stack(products), [0, 2, 1]), shape)


def _is_faster(images: tf.Tensor, kernel: tf.Tensor, strides: int, padding: Padding | str) -> bool:
    """Whether the matrix products are faster, by measurement: not for few channels or filters."""
    high, wide, channels, filters = kernel.shape
    if strides != 1 or padding == "VALID" or high % 2 == 0 or wide % 2 == 0 or None in images.shape[1:]:
        return False
    on_cpu = "CPU" in images.device if images.device else not tf.config.list_logical_devices("GPU")
    if not on_cpu:
        return False
    if images.dtype == tf.bfloat16:
        return channels >= 128
    slow = "avx2" in processor_features() and "avx512f" not in processor_features()
    return images.dtype == tf.float32 and slow and channels >= 24 and filters >= 64
