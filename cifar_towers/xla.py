"""Functions that XLA compiles: whole passes if the user asks for it (`xla_compiled`), and small
parts that would take many passes through memory (`fused`).
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from cifar_towers.hardware import xla_runs


def xla_compiled(function: Callable, jit_compile: bool) -> Callable[..., Any]:
    """Return a function that XLA compiles whole if `jit_compile`, otherwise the same function."""
    if not jit_compile:
        return function
    return tf.function(function, autograph=False, jit_compile=True)


def fused(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Return `function` of tensors compiled by XLA, where XLA runs, so that it takes few passes
    through memory.

    XLA compiles it for each new input shape.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)

    @functools.wraps(function)
    def call(*tensors: tf.Tensor) -> tf.Tensor:
        return compiled(*tensors) if xla_runs() else function(*tensors)

    return call
