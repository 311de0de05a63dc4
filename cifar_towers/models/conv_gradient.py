"""A 2-D convolution with a faster gradient to its kernel on CPUs, equal to TensorFlow's up to rounding."""

import tensorflow as tf

from cifar_towers.towers.devices import processor_features


def conv2d(images: tf.Tensor, kernel: tf.Tensor, strides: int = 1, padding: str = "SAME") -> tf.Tensor:
    """`tf.nn.conv2d` of [B, H, W, C] with [h, w, C, F], with a faster gradient to the kernel on CPUs.

    TensorFlow's reaches half the speed of the forward pass there, in bfloat16 and in float32 with AVX2. For kernels of
    odd size with stride 1 it is computed as h matrix products instead, one for each row of the kernel: the images,
    shifted by that row and by each of its w pixels side by side, times the gradient of the output.
    """
    if not _is_faster(images, kernel, strides, padding):
        return tf.nn.conv2d(images, kernel, strides, padding.upper())

    @tf.custom_gradient
    def convolve(images, kernel):
        def gradient(upstream):
            to_images = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(images), filter=kernel, out_backprop=upstream, strides=[1] * 4, padding="SAME"
            )
            return to_images, _kernel_gradient(images, upstream, kernel.shape)

        return tf.nn.conv2d(images, kernel, 1, "SAME"), gradient

    return convolve(images, kernel)


def _kernel_gradient(images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Gradient of a SAME convolution to its kernel."""
    high, wide, channels, filters = shape
    height, width = upstream.shape[1:3]
    # rows are the first axis: a shift by a row is a slice without a copy
    rows = tf.pad(tf.transpose(images, [1, 0, 2, 3]), [[high // 2] * 2, [0, 0], [wide // 2] * 2, [0, 0]])
    rows = tf.concat([rows[:, :, column : column + width] for column in range(wide)], -1)
    outputs = tf.reshape(tf.transpose(upstream, [1, 0, 2, 3]), [-1, filters])  # a tenth faster as the first factor
    products = [
        tf.matmul(outputs, tf.reshape(rows[row : row + height], [-1, wide * channels]), transpose_a=True)
        for row in range(high)
    ]
    return tf.reshape(tf.transpose(tf.stack(products), [0, 2, 1]), shape)


def _is_faster(images: tf.Tensor, kernel: tf.Tensor, strides: int, padding: str) -> bool:
    """Whether the matrix products are faster, by measurement: not for few channels or filters."""
    high, wide, channels, filters = kernel.shape
    if strides != 1 or padding.upper() != "SAME" or high % 2 == 0 or wide % 2 == 0 or None in images.shape[1:]:
        return False
    on_cpu = "CPU" in images.device if images.device else not tf.config.list_logical_devices("GPU")
    if not on_cpu:
        return False
    if images.dtype == tf.bfloat16:
        return channels >= 128
    slow = "avx2" in processor_features() and "avx512f" not in processor_features()
    return images.dtype == tf.float32 and slow and channels >= 24 and filters >= 64
