"""Calls the traced step with the learning rates and the image size that its step number asks for."""

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


class StepRunner:
    """Runs steps and returns their metrics as NumPy values.

    Args:
      train_step: from `build.make_training`.
      image_size_at: step -> side of the images in pixels.

    Attributes:
      traced: kinds of steps that have run, each compiled once.
    """

    def __init__(self, train_step: Callable, optimizer: Optimizer, image_size_at: Callable[[int], int]):
        self._train_step, self._optimizer, self.image_size_at = train_step, optimizer, image_size_at
        self.traced: set[tuple] = set()

    def inputs(self, step: int, rate_factor: float = 1.0) -> StepInputs:
        """The inputs of the step that makes `step` into `step + 1`, its rates multiplied by `rate_factor`."""
        return StepInputs(self._optimizer.learning_rates(step, rate_factor), self.image_size_at(step))

    def is_traced(self, inputs: StepInputs) -> bool:
        """Whether a step of this kind has been compiled: of this image size, with these groups moving."""
        return self._kind(inputs) in self.traced

    def trace(self, batch: Batch, inputs: StepInputs, **options):
        """Traces and compiles the step without running it; returns the `ConcreteFunction`."""
        return self._train_step.get_concrete_function(*self._arguments(batch, inputs, **options))

    def run(self, batch: Batch, inputs: StepInputs, **options) -> StepMetrics:
        """Makes one step.

        Args:
          options: `collect_diagnostics`, whether the metrics have them; `stop_signal`, in a cluster, the number of the
            signal that this process has received, or 0.
        """
        metrics = self._train_step(*self._arguments(batch, inputs, **options))
        if not options["collect_diagnostics"]:
            metrics = metrics._replace(diagnostics=None)
        self.traced.add(self._kind(inputs))
        return to_numpy(metrics)

    @staticmethod
    def _kind(inputs: StepInputs) -> tuple:
        return (inputs.image_size, *inputs.learning_rates)

    @staticmethod
    def _arguments(batch: Batch, inputs: StepInputs, collect_diagnostics: bool, stop_signal: int | None = None) -> list:
        with tf.device(HOST):
            rates = {name: tf.constant(rate, tf.float32) for name, rate in inputs.learning_rates.items()}
            arguments = [batch, rates, inputs.image_size, tf.constant(collect_diagnostics)]
            return arguments if stop_signal is None else [*arguments, tf.constant(stop_signal, tf.float32)]
