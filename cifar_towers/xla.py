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


def fused_moves(function: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return `fused(function)` for a function that only moves values.

    Half types are moved as integers, and then have no gradient: XLA's CPU code takes up to six
    times as long to move them as such.
    """

    def move(x: tf.Tensor) -> tf.Tensor:
        if x.dtype.size != 2:
            return function(x)
        return tf.bitcast(function(tf.bitcast(x, tf.int16)), x.dtype)

    return fused(move)


def wide(x: tf.Tensor) -> tf.Tensor:
    """Return half types as float32, to compute in a fused function.

    In half types XLA's CPU code rounds after each operation, at twice the time.
    """
    return tf.cast(x, tf.float32) if x.dtype.size == 2 else x


def narrow(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return what a fused function computed as `dtype`, the same as by `tf.cast`.

    float32 is rounded to bfloat16, to the nearest and to even, by integer operations: XLA's CPU
    code for the cast often takes longer than the rest of the function. A NaN stays a NaN, except
    those close to 0x7FFFFFFF and 0xFFFFFFFF, which arithmetic on bfloat16 values does not produce.
    """
    if dtype != tf.bfloat16 or x.dtype != tf.float32 or not xla_runs():
        return tf.cast(x, dtype)
    bits = tf.bitcast(x, tf.uint32)
    is_odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 16), tf.constant(1, tf.uint32))
    rounded = tf.bitwise.right_shift(bits + 0x7FFF + is_odd, 16)
    return tf.bitcast(tf.cast(rounded, tf.uint16), tf.bfloat16)
