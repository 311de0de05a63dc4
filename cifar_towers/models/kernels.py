"""Special kernels: each does what one TensorFlow operation does, to rounding, faster on some device."""

import tensorflow as tf

LEAST_CHANNELS = 128  # below, a product of matrices is too thin to gain


def conv2d(images: tf.Tensor, kernel: tf.Tensor, strides: int = 1, padding: str = "SAME") -> tf.Tensor:
    """`tf.nn.conv2d` of [B, H, W, C] with [h, w, C, F], with a faster gradient for bfloat16 on CPUs.

    TensorFlow's backward pass to the filter reaches half the speed of the forward pass there. For odd kernels moved
    one pixel at a time it is taken as h x w products of matrices instead: each tap of the kernel is the product of
    the images, shifted by that tap, with the gradient of the output.
    """
    if not _gains(images, kernel, strides, padding):
        return tf.nn.conv2d(images, kernel, strides, padding.upper())

    @tf.custom_gradient
    def convolve(images, kernel):
        def gradient(upstream):
            to_images = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(images), filter=kernel, out_backprop=upstream, strides=[1] * 4, padding="SAME"
            )
            return to_images, _to_kernel(images, upstream, kernel.shape)

        return tf.nn.conv2d(images, kernel, 1, "SAME"), gradient

    return convolve(images, kernel)


def _to_kernel(images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Gradient of a SAME convolution to its kernel, tap by tap."""
    high, wide, channels, filters = shape
    height, width = upstream.shape[1:3]
    padded = tf.pad(images, [[0, 0], [high // 2, high // 2], [wide // 2, wide // 2], [0, 0]])
    outputs = tf.reshape(upstream, [-1, filters])
    taps = [
        tf.matmul(
            tf.reshape(padded[:, row : row + height, column : column + width], [-1, channels]),
            outputs,
            transpose_a=True,
        )
        for row in range(high)
        for column in range(wide)
    ]
    return tf.reshape(tf.stack(taps), shape)


def _gains(images: tf.Tensor, kernel: tf.Tensor, strides: int, padding: str) -> bool:
    high, wide, channels, _ = kernel.shape
    fits = strides == 1 and padding.upper() == "SAME" and high % 2 == wide % 2 == 1 and channels >= LEAST_CHANNELS
    return fits and images.dtype == tf.bfloat16 and None not in images.shape[1:] and _on_cpu(images)


def _on_cpu(tensor: tf.Tensor) -> bool:
    """Whether the operation that makes a tensor was placed on a CPU, or can only be."""
    if tensor.device:
        return "CPU" in tensor.device
    return not tf.config.list_logical_devices("GPU")
