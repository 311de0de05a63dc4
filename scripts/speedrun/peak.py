"""Peak rate of this machine for convolutions and matrix products."""

import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from scripts.speedrun import operations

# images and kernels of the speednets' second and third group, which do most of the work
CONVOLUTIONS = (((256, 15, 15, 64), (3, 3, 64, 256)), ((512, 7, 7, 256), (3, 3, 256, 256)))
MATRIX_SIZE = 2048
MIN_TIMED_RUNS = 3
MIN_TIMED_SECONDS = 0.05  # a single call on a GPU takes less time than reading its result


def measure(precision: str, seconds: float = 5.0, gpus: int = 1) -> dict[str, float]:
    """Measure the peak on all cores or the first GPU, in 10^9 operations per second. A multiply-add is two operations.

    Args:
      seconds: about how long to measure in all; at least `MIN_TIMED_RUNS` runs are made.
      gpus: factor by which the rate of the first GPU is multiplied.

    Returns:
      `convolution`: the rate of the fastest 3x3 forward convolution; `matmul`: the rate of a square matrix product.
    """
    share, square = seconds / (len(CONVOLUTIONS) + 1), (MATRIX_SIZE, MATRIX_SIZE)
    return {
        "convolution": gpus * max(_rate(_convolve, shapes, precision, share) for shapes in CONVOLUTIONS),
        "matmul": gpus * _rate(_multiply, (square, square), precision, share),
    }


def _convolve(images: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(images, kernel, 1, "SAME")[0, 0, 0, 0]


def _multiply(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.matmul(x, y)[0, 0]


def _rate(operation: Callable, shapes: Sequence[tuple[int, ...]], precision: str, seconds: float) -> float:
    """Return 10^9 operations per second of the fastest run, after a warm-up."""
    inputs = [tf.cast(tf.random.stateless_normal(shape, seed=[0, 0]), precision) for shape in shapes]
    function = tf.function(operation, autograph=False)
    flops = sum(operations.count(function.get_concrete_function(*inputs)).values())

    def run_seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            last = function(*inputs)
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
