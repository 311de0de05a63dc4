"""Convolutions with their gradients, and the operations in their graphs."""

import tensorflow as tf

from cifar_towers.models import convolution


def gradients(function, images, kernel, upstream):
    with tf.GradientTape() as tape:
        tape.watch([images, kernel])
        y = function(images, kernel)
    return y, *tape.gradient(y, [images, kernel], upstream)


def processor(monkeypatch, *features):
    monkeypatch.setattr(convolution, "processor_features", lambda: {"sse2", *features})


def ops(dtype, channels, device, strides=1, padding="SAME", filters=64):
    @tf.function
    def step(images, kernel):
        with tf.device(device):
            return gradients(lambda x, k: convolution.conv2d(tf.identity(x), k, strides, padding), images, kernel, None)

    arguments = tf.ones([1, 7, 7, channels], dtype), tf.ones([3, 3, channels, filters], dtype)
    return step.get_concrete_function(*arguments).graph.get_operations()


def op_types(*arguments):
    return {op.type for op in ops(*arguments)}
