"""A 2-D convolution in the forms that are fastest on CPUs, equal to TensorFlow's up to rounding.

Winograd's algorithm rounds about ten times as much, which is still a hundred times less than bfloat16 does.
"""

from collections.abc import Sequence

import tensorflow as tf

from cifar_towers.hardware import processor_features
from cifar_towers.models import winograd

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
    """`tf.nn.conv2d` of [B, H, W, C] with [h, w, C, F], in a faster form on CPUs.

    Many 3x3 filters of many channels are applied in float32 by `winograd.conv2d`.

    TensorFlow's gradient to the kernel reaches half the speed of the forward pass there, in bfloat16 and in float32
    with AVX2. For kernels of odd size with stride 1 it is computed as h matrix products instead, one for each row of
    the kernel: the images, shifted by that row and by each of its w pixels side by side, times the gradient of the
    output. With a `Padding`, which is for strides of 1, the gradient to the images is a convolution with the turned
    kernel: TensorFlow's takes up to four times as long there.
    """
    padding = padding.upper() if isinstance(padding, str) else padding
    same = padding in ("SAME", even_padding(images.shape, kernel.shape)) and None not in images.shape[1:]
    suitable = same and strides == 1 and _on_cpu(images)
    if suitable and _suits_winograd(images, kernel):
        height, width = images.shape[1:3] if padding == "SAME" else (side - side % 2 for side in images.shape[1:3])
        return winograd.conv2d(images, kernel, height, width)
    faster = suitable and _suits_products(images, kernel)
    if isinstance(padding, str) and not faster:
        return tf.nn.conv2d(images, kernel, strides, padding)

    @tf.custom_gradient
    def convolve(images, kernel):
        def gradient(upstream):
            to_images = _image_gradient(images, upstream, kernel, padding)
            if faster:
                return to_images, _kernel_gradient(images, upstream, kernel.shape, padding)
            padded = tf.pad(images, padding)  # oneDNN has no EXPLICIT form: 60 times as long in bfloat16
            return to_images, tf.raw_ops.Conv2DBackpropFilter(
                input=padded, filter_sizes=kernel.shape, out_backprop=upstream, strides=[1] * 4, padding="VALID"
            )

        return tf.nn.conv2d(images, kernel, 1, padding), gradient

    return convolve(images, kernel)


def _image_gradient(images: tf.Tensor, upstream: tf.Tensor, kernel: tf.Tensor, padding: Padding | str) -> tf.Tensor:
    """Gradient of a convolution with stride 1 to its images."""
    if padding == "SAME":
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(images), filter=kernel, out_backprop=upstream, strides=[1] * 4, padding=padding
        )
    turned = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
    sides = [
        (size - 1 - before, side - computed + before)
        for size, side, computed, (before, _) in zip(
            kernel.shape[:2], images.shape[1:3], upstream.shape[1:3], padding[1:3], strict=True
        )
    ]
    return tf.nn.conv2d(upstream, turned, 1, [(0, 0), *sides, (0, 0)])


def _kernel_gradient(
    images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape, padding: Padding | str
) -> tf.Tensor:
    """Gradient of a convolution with stride 1 to its kernel, as matrix products."""
    high, wide, channels, filters = shape
    above_and_below, beside = [(size // 2, size // 2) for size in (high, wide)] if padding == "SAME" else padding[1:3]
    height, width = upstream.shape[1:3]
    # rows are the first axis: a shift by a row is a slice without a copy
    rows = tf.pad(tf.transpose(images, [1, 0, 2, 3]), [above_and_below, (0, 0), beside, (0, 0)])
    rows = tf.concat([rows[:, :, column : column + width] for column in range(wide)], -1)
    outputs = tf.reshape(tf.transpose(upstream, [1, 0, 2, 3]), [-1, filters])  # a tenth faster as the first factor
    products = [
        tf.matmul(outputs, tf.reshape(rows[row : row + height], [-1, wide * channels]), transpose_a=True)
        for row in range(high)
    ]
    return tf.reshape(tf.transpose(tf.stack(products), [0, 2, 1]), shape)


def _suits_winograd(images: tf.Tensor, kernel: tf.Tensor) -> bool:
    """Whether Winograd's algorithm is faster on a processor: for so many channels and filters that its products are
    most of its work, by measurement with 512 images of 2x2 to 15x15 pixels. In bfloat16 it would lose most digits.
    """
    *size, channels, filters = kernel.shape
    if size != [3, 3] or images.dtype != tf.float32 or "avx2" not in processor_features():
        return False
    enough = 64 * 256 if "avx512f" in processor_features() else 64 * 128
    return min(images.shape[1:3]) > 1 and min(channels, filters) >= 64 and channels * filters >= enough


def _suits_products(images: tf.Tensor, kernel: tf.Tensor) -> bool:
    """Whether matrix products are faster for the gradient to the kernel on a processor, by measurement: not for few
    channels or filters.
    """
    high, wide, channels, filters = kernel.shape
    if high % 2 == 0 or wide % 2 == 0:
        return False
    if images.dtype == tf.bfloat16:
        return channels >= 128
    slow = "avx2" in processor_features() and "avx512f" not in processor_features()
    return images.dtype == tf.float32 and slow and channels >= 24 and filters >= 64


def _on_cpu(images: tf.Tensor) -> bool:
    return "CPU" in images.device if images.device else not tf.config.list_logical_devices("GPU")
