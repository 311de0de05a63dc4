"""The calls of the training step, each with its learning rates and image size; metrics are read a step late."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.data.batches import Batch
from cifar_towers.towers.placement import HOST
from cifar_towers.training.optimizers import Optimizer
from cifar_towers.training.results import StepMetrics, to_numpy, without_gradients


class FinishedStep(NamedTuple):
    """A step that has run, its inputs and its metrics."""

    step: int  # number of finished steps, this one included
    batch: Batch
    learning_rates: dict[str, float]  # by parameter group; without the groups that are frozen
    image_size: int  # pixels
    metrics: StepMetrics  # NumPy values; tensors until `StepRunner` has read them


@dataclasses.dataclass
class StepRunner:
    """Runs steps. The metrics of a step are read after the next step has started, so that a GPU is never idle."""

    train_step: tf.types.experimental.PolymorphicFunction  # as `build.make_training` returns it
    optimizer: Optimizer
    image_size_at: Callable[[int], int]  # step -> image size in pixels
    traced: set[tuple] = dataclasses.field(default_factory=set)  # kinds of steps that have run; see `_kind`
    _unread: list[FinishedStep] = dataclasses.field(default_factory=list)  # the last step, its metrics still tensors

    @property
    def is_up_to_date(self) -> bool:
        """Whether all steps that were started have been returned."""
        return not self._unread

    def needs_compilation(self, step: int) -> bool:
        """Return whether no step of this kind has run: of this image size, with these parameter groups active."""
        return self._kind(step) not in self.traced

    def trace(self, step: int, batch: Batch, stop_signal: int | None) -> tf.types.experimental.ConcreteFunction:
        """Trace and compile a step without running it. The arguments are those of `start`."""
        return self.train_step.get_concrete_function(**self._arguments(step, batch, stop_signal))

    def start(
        self, step: int, batch: Batch, stop_signal: int | None = None, keep_gradients: bool = False
    ) -> list[FinishedStep]:
        """Start step number `step + 1`; return the step before it, if it was not returned.

        Args:
          stop_signal: in a cluster, the number of the signal that this process has received, or 0.
          keep_gradients: whether the metrics have the step's gradients.
        """
        metrics = self.train_step(**self._arguments(step, batch, stop_signal))
        if not keep_gradients:
            metrics = without_gradients(metrics)
        self.traced.add(self._kind(step))
        rates = self.optimizer.learning_rates(step)
        return self._read([FinishedStep(step + 1, batch, rates, self.image_size_at(step), metrics)])

    def finish(self) -> list[FinishedStep]:
        """Wait for the step that was started last, and return it, unless it has been returned."""
        return self._read([])

    def _read(self, started: list[FinishedStep]) -> list[FinishedStep]:
        finished, self._unread = self._unread, started
        return [each._replace(metrics=to_numpy(each.metrics)) for each in finished]

    def _kind(self, step: int) -> tuple:
        """Return what a step is traced for: its image size and its active parameter groups."""
        return (self.image_size_at(step), *self.optimizer.learning_rates(step))

    def _arguments(self, step: int, batch: Batch, stop_signal: int | None) -> dict[str, Any]:
        rates = self.optimizer.learning_rates(step)
        with tf.device(HOST):
            tensors = {name: tf.constant(rate, tf.float32) for name, rate in rates.items()}
            signal = {} if stop_signal is None else {"stop_signal": tf.constant(stop_signal, tf.float32)}
        return {"batch": batch, "learning_rates": tensors, "image_size": self.image_size_at(step), **signal}


def was_skipped(metrics: StepMetrics) -> bool:
    """Return whether the step, or that of its proxy, was skipped because a number was not finite."""
    selected = metrics.hard_examples
    return not metrics.updated or bool(selected and not selected.proxy.updated)
