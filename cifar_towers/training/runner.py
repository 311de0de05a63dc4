"""The host's side of a step: trace it, start it in a thread, and return its metrics a step late."""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context, executor

from cifar_towers.data.batches import Batch
from cifar_towers.towers.placement import HOST
from cifar_towers.training.step import StepGradients, StepMetrics


class StepInput(NamedTuple):
    """The input of one step."""

    step: int  # number of finished steps before it
    batch: Batch
    rates: dict[str, float]  # learning rates by parameter group
    image_size: int  # pixels
    stop_signal: int | None = None  # on a cluster: the signal that this process received, or 0


class FinishedStep(NamedTuple):
    """A step that has run: its values are NumPy arrays."""

    step: int  # number of finished steps, this one included
    batch: Batch  # as tensors
    rates: dict[str, float]
    image_size: int
    metrics: StepMetrics
    gradients: StepGradients | None = None  # None unless they were asked for
    end: float = 0.0  # when the metrics had been read, by `time.monotonic`


class StepRunner:
    """Runs steps in a thread of TensorFlow's. The metrics of a step are returned after the next has
    started, so that a GPU has work while the host logs them. A second thread waits for them, so
    that `FinishedStep.end` is when they came, and not when the host asked.

    Args:
      train_step: the step as a `tf.function`; see `build.make_training`.
    """

    def __init__(self, train_step: Any):
        self.train_step = train_step
        # by image size
        self.traced: dict[int, tf.types.experimental.ConcreteFunction] = {}
        # a thread of Python's would first wait for the interpreter's lock
        self._steps = executor.new_executor(enable_async=True)
        self._metrics = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._unread: Future[FinishedStep] | None = None  # the step that was started last

    @property
    def is_up_to_date(self) -> bool:
        """Whether all steps that were started have been returned."""
        return self._unread is None

    def is_traced(self, inputs: StepInput) -> bool:
        """Return whether a step of this image size was traced."""
        return inputs.image_size in self.traced

    def trace(self, inputs: StepInput) -> tf.types.experimental.ConcreteFunction:
        """Trace a step without running it; return its function."""
        traced = self.train_step.get_concrete_function(**_arguments(inputs))
        self.traced[inputs.image_size] = traced
        return traced

    def start(self, inputs: StepInput, keep_gradients: bool) -> list[FinishedStep]:
        """Start a step, which must be traced. Then wait for the step before it, and return that
        one, or [] if it has been returned.
        """
        # calling the `tf.function` takes twice as long: it looks up what was traced
        traced = self.traced[inputs.image_size]
        with context.executor_scope(self._steps):  # calls return at once; reading raises errors
            metrics, gradients = traced(**_arguments(inputs))
        if not keep_gradients:  # they take the memory of several models
            gradients = None
        reading = self._metrics.submit(_read, inputs, metrics, gradients)
        previous = self.finish()
        self._unread = reading
        return previous

    def finish(self) -> list[FinishedStep]:
        """Wait for the step that was started last and return it, or [] if it has been returned.

        An error in a step is raised here, and again by each later call.
        """
        if self._unread is None:
            return []
        finished = self._unread.result()
        self._unread = None
        return [finished]

    def close(self) -> None:
        """Wait for steps that still run, and end the thread that reads."""
        self._metrics.shutdown(cancel_futures=True)
        with contextlib.suppress(tf.errors.OpError):  # `finish` raises it for whoever asks
            self._steps.wait()
        self._steps.clear_error()  # otherwise the thread would print it again at its end


def _read(inputs: StepInput, metrics: StepMetrics, gradients: StepGradients | None) -> FinishedStep:
    """Wait for a step, whose values are tensors, and return it."""
    return FinishedStep(
        step=inputs.step + 1,
        batch=inputs.batch,
        rates=inputs.rates,
        image_size=inputs.image_size,
        metrics=to_numpy(metrics),
        gradients=to_numpy(gradients),
        end=time.monotonic(),
    )


def _arguments(inputs: StepInput) -> dict[str, Any]:
    """Return the arguments of the traced function."""
    with tf.device(HOST):
        rates = {name: tf.constant(rate, tf.float32) for name, rate in inputs.rates.items()}
        arguments = {"batch": inputs.batch, "rates": rates, "image_size": inputs.image_size}
        if inputs.stop_signal is not None:
            arguments["stop_signal"] = tf.constant(inputs.stop_signal, tf.float32)
    return arguments


def to_numpy(values: Any) -> Any:
    """Return the same structure with NumPy arrays for tensors; None stays None."""
    return tf.nest.map_structure(lambda value: None if value is None else value.numpy(), values)
