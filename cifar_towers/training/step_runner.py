"""Calls the traced step with the learning rates and the image size that its step number asks for; reads its metrics
once the next step has started."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.data.batches import Batch
from cifar_towers.towers.placement import HOST
from cifar_towers.training.optimizers import Optimizer
from cifar_towers.training.results import StepMetrics, to_numpy


class StepInputs(NamedTuple):
    """What a step takes beside its batch."""

    learning_rates: dict[str, float]  # by parameter group; without the groups that are frozen
    image_size: int  # pixels


class FinishedStep(NamedTuple):
    """A step and its metrics."""

    step: int  # steps that are done after it
    batch: Batch
    inputs: StepInputs
    metrics: StepMetrics  # NumPy values


class StepRunner:
    """Runs steps, and returns each once the next has started: so a GPU never waits for somebody to read its metrics.

    Args:
      train_step: from `build.make_training`.
      image_size_at: step -> side of the images in pixels.

    Attributes:
      traced: kinds of steps that have run, each compiled once.
    """

    def __init__(self, train_step: Callable, optimizer: Optimizer, image_size_at: Callable[[int], int]):
        self._train_step, self._optimizer, self.image_size_at = train_step, optimizer, image_size_at
        self.traced: set[tuple] = set()
        self._unread: list[FinishedStep] = []  # the last step, its metrics still tensors

    @property
    def steps_ahead(self) -> int:
        """How many steps have started and were not returned yet: 0 or 1."""
        return len(self._unread)

    def inputs(self, step: int, rate_factor: float = 1.0) -> StepInputs:
        """The inputs of the step that makes `step` into `step + 1`, its rates multiplied by `rate_factor`."""
        return StepInputs(self._optimizer.learning_rates(step, rate_factor), self.image_size_at(step))

    def is_traced(self, inputs: StepInputs) -> bool:
        """Whether a step of this kind has been compiled: of this image size, with these groups moving."""
        return self._kind(inputs) in self.traced

    def trace(self, batch: Batch, inputs: StepInputs, **options):
        """Traces and compiles the step without running it; returns the `ConcreteFunction`."""
        return self._train_step.get_concrete_function(*self._arguments(batch, inputs, **options))

    def start(self, step: int, batch: Batch, inputs: StepInputs, **options) -> list[FinishedStep]:
        """Starts the step that makes `step` into `step + 1`; returns the one before, unless it has been returned.

        Args:
          options: `collect_diagnostics`, whether the metrics have them; `stop_signal`, in a cluster, the number of the
            signal that this process has received, or 0.
        """
        metrics = self._train_step(*self._arguments(batch, inputs, **options))
        if not options["collect_diagnostics"]:
            metrics = metrics._replace(diagnostics=None)
        self.traced.add(self._kind(inputs))
        return self._read([FinishedStep(step + 1, batch, inputs, metrics)])

    def finish(self) -> list[FinishedStep]:
        """Waits for the step that was started last, and returns it, unless it has been returned."""
        return self._read([])

    def discard(self) -> int:
        """Forgets the steps that were not returned, as the run goes back; how many these were."""
        steps_ahead, self._unread = self.steps_ahead, []
        return steps_ahead

    def _read(self, started: list[FinishedStep]) -> list[FinishedStep]:
        finished, self._unread = self._unread, started
        return [each._replace(metrics=to_numpy(each.metrics)) for each in finished]

    @staticmethod
    def _kind(inputs: StepInputs) -> tuple:
        return (inputs.image_size, *inputs.learning_rates)

    @staticmethod
    def _arguments(batch: Batch, inputs: StepInputs, collect_diagnostics: bool, stop_signal: int | None = None) -> list:
        with tf.device(HOST):
            rates = {name: tf.constant(rate, tf.float32) for name, rate in inputs.learning_rates.items()}
            arguments = [batch, rates, inputs.image_size, tf.constant(collect_diagnostics)]
            return arguments if stop_signal is None else [*arguments, tf.constant(stop_signal, tf.float32)]
