"""Peak rate of this machine for convolutions and matrix products."""

import time
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.benchmark import operations

# images and kernels of the speednets' second and third group, which do most of the work
CONVOLUTIONS = (((256, 15, 15, 64), (3, 3, 64, 256)), ((512, 7, 7, 256), (3, 3, 256, 256)))
MATRIX_SIZE = 2048
MIN_TIMED_RUNS = 3
MIN_TIMED_SECONDS = 0.05  # a single call on a GPU takes less time than reading its result


class PeakFlops(NamedTuple):
    """10^9 operations per second; a multiply-add is two."""

    convolution: float
    matmul: float


def measure(precision: str, seconds: float = 5.0, gpus: int = 1) -> PeakFlops:
    """Rates of the fastest 3x3 forward convolution and of a square matrix product, on all cores or the first GPU.

    Args:
      seconds: about how long to measure in all; at least `MIN_TIMED_RUNS` runs are made.
      gpus: the rate of the first GPU is multiplied by this number.
    """
    share = seconds / (len(CONVOLUTIONS) + 1)
    convolve = tf.function(lambda x, kernel: tf.nn.conv2d(x, kernel, 1, "SAME")[0, 0, 0, 0], autograph=False)
    multiply = tf.function(lambda x, y: tf.matmul(x, y)[0, 0], autograph=False)
    inputs = [[_random(shape, precision) for shape in pair] for pair in CONVOLUTIONS]
    square = _random((MATRIX_SIZE, MATRIX_SIZE), precision)
    return PeakFlops(
        convolution=gpus * max(_rate(convolve, *tensors, share) for tensors in inputs),
        matmul=gpus * _rate(multiply, square, square, share),
    )


def _rate(function: Callable, x: tf.Tensor, y: tf.Tensor, seconds: float) -> float:
    """10^9 operations per second of the fastest run, after a warm-up."""
    flops = sum(operations.count(function.get_concrete_function(x, y)).values())

    def run_seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            last = function(x, y)
        last.numpy()  # waits for the result
        return time.perf_counter() - start

    calls = 1
    run_seconds(calls)
    while run_seconds(calls) < MIN_TIMED_SECONDS:
        calls *= 2
    times: list[float] = []
    while len(times) < MIN_TIMED_RUNS or sum(times) < seconds:
        times.append(run_seconds(calls))
    return flops * calls / min(times) / 1e9


def _random(shape: tuple[int, ...], precision: str) -> tf.Tensor:
    return tf.cast(tf.random.stateless_normal(shape, seed=[0, 0]), precision)
