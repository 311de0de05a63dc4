import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.models import kernels


def gradients(function, images, kernel, upstream):
    with tf.GradientTape() as tape:
        tape.watch([images, kernel])
        y = function(images, kernel)
    return y, *tape.gradient(y, [images, kernel], upstream)


@pytest.mark.parametrize(("side", "size"), [(7, 3), (3, 3), (5, 5)])
def test_the_gradient_tap_by_tap_is_tensorflows(side, size):
    random = np.random.default_rng(0)
    images = tf.cast(random.normal(size=(4, side, side, 128)), tf.bfloat16)
    kernel = tf.cast(random.normal(size=(size, size, 128, 32)), tf.bfloat16)
    upstream = tf.cast(random.normal(size=(4, side, side, 32)), tf.bfloat16)
    found = gradients(kernels.conv2d, images, kernel, upstream)

    def plain(x, k):
        return tf.nn.conv2d(x, k, 1, "SAME")

    tensorflows = gradients(plain, images, kernel, upstream)
    exact = gradients(plain, *(tf.cast(tensor, tf.float32) for tensor in (images, kernel, upstream)))
    for ours, theirs, true in zip(found, tensorflows, exact, strict=True):
        error, allowed = (np.abs(tf.cast(which, tf.float32) - true).max() for which in (ours, theirs))
        # some processors add up in bfloat16, and are themselves that far off
        assert error <= max(1.5 * allowed, 0.01 * np.abs(true).max())


def kinds(dtype, channels, device, strides=1, padding="SAME"):
    @tf.function
    def step(images, kernel):
        with tf.device(device):
            return gradients(lambda x, k: kernels.conv2d(tf.identity(x), k, strides, padding), images, kernel, None)

    arguments = tf.ones([1, 7, 7, channels], dtype), tf.ones([3, 3, channels, 8], dtype)
    return {op.type for op in step.get_concrete_function(*arguments).graph.get_operations()}


def test_it_is_taken_only_where_it_gains():
    assert "Conv2DBackpropFilter" not in kinds(tf.bfloat16, 128, "/CPU:1")
    for arguments in [
        (tf.float32, 128, "/CPU:1"),
        (tf.bfloat16, 64, "/CPU:1"),
        (tf.bfloat16, 128, "/GPU:0"),
        (tf.bfloat16, 128, "/CPU:1", 2),
        (tf.bfloat16, 128, "/CPU:1", 1, "VALID"),
    ]:
        assert "Conv2DBackpropFilter" in kinds(*arguments), arguments
