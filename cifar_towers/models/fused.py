"""Functions whose operations XLA fuses into few passes through memory."""

import tensorflow as tf

from cifar_towers.towers.devices import xla_runs


def fused(function):
    """`function` of tensors, its operations fused by XLA where XLA runs."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return lambda *tensors: (compiled if xla_runs() else function)(*tensors)
