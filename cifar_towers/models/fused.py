"""Fusion of a function's operations by XLA."""

from collections.abc import Callable

import tensorflow as tf

from cifar_towers.hardware import xla_runs


def fused(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """`function` of tensors in few passes through memory, where XLA runs. It is compiled for each new input shape."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    return lambda *tensors: (compiled if xla_runs() else function)(*tensors)
