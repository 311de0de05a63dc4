"""How fast this machine is at what nets are made of, at its best."""

import time
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.benchmark import operations

# images and kernels of the speednets' second and third group, where most of their work is
CONVOLUTIONS = (((256, 15, 15, 64), (3, 3, 64, 256)), ((512, 7, 7, 256), (3, 3, 256, 256)))
SIDE = 2048  # of the square matrices
FEWEST = 3  # timed runs of each
LONG = 0.05  # seconds of a timed run at least: a GPU's single call takes less than reading its result


class Ceilings(NamedTuple):
    """10^9 operations a second, of which a multiply-add is two."""

    convolution: float
    matmul: float


def measure(precision: str, seconds: float = 5.0, gpus: int = 1) -> Ceilings:
    """The best of several 3x3 forward convolutions, and of several products of square matrices.

    On all the cores that TensorFlow was given, or the first GPU. `precision` is `float32`, `bfloat16` or `float16`.

    Args:
      gpus: as many GPUs like the first count together.
      seconds: about how long it may take in all; on a slow machine, as long as the fewest runs take.
    """
    share = seconds / (len(CONVOLUTIONS) + 1)
    convolve = tf.function(lambda x, kernel: tf.nn.conv2d(x, kernel, 1, "SAME")[0, 0, 0, 0], autograph=False)
    multiply = tf.function(lambda x, y: tf.matmul(x, y)[0, 0], autograph=False)
    inputs = [[_random(shape, precision) for shape in pair] for pair in CONVOLUTIONS]
    square = _random((SIDE, SIDE), precision)
    return Ceilings(
        convolution=gpus * max(_rate(convolve, *tensors, share) for tensors in inputs),
        matmul=gpus * _rate(multiply, square, square, share),
    )


def _rate(function: Callable, x: tf.Tensor, y: tf.Tensor, seconds: float) -> float:
    """10^9 operations a second of the fastest run, after one that is not timed."""
    counted = sum(operations.count(function.get_concrete_function(x, y)).values())

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            last = function(x, y)
        last.numpy()  # one number of the result: it is there when that is
        return time.perf_counter() - start

    calls = 1
    timed(calls)
    while timed(calls) < LONG:
        calls *= 2
    times: list[float] = []
    while len(times) < FEWEST or sum(times) < seconds:
        times.append(timed(calls))
    return counted * calls / min(times) / 1e9


def _random(shape: tuple[int, ...], precision: str) -> tf.Tensor:
    return tf.cast(tf.random.stateless_normal(shape, seed=[0, 0]), precision)
