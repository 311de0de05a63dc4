"""The calls of the training step, each with its learning rates and image size; metrics are read a step late."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.data.batches import Batch
from cifar_towers.errors import CorruptedError, RunError, UsageError
from cifar_towers.towers import Tower
from cifar_towers.towers.placement import HOST
from cifar_towers.training.optimizers import Optimizer
from cifar_towers.training.results import StepMetrics, to_numpy


class FinishedStep(NamedTuple):
    """A step that has run, its inputs and its metrics."""

    step: int  # number of finished steps, this one included
    batch: Batch
    learning_rates: dict[str, float]  # by parameter group; without the groups that are frozen
    image_size: int  # pixels
    metrics: StepMetrics  # NumPy values; tensors until `StepRunner` has read them
    error: RunError | None = None  # why the step is not applied, although all its numbers are finite


@dataclasses.dataclass
class StepRunner:
    """Runs steps. The metrics of a step are read after the next step has started, so that a GPU is never idle."""

    train_step: tf.types.experimental.PolymorphicFunction  # as `build.make_training` returns it
    optimizer: Optimizer
    image_size_at: Callable[[int], int]  # step -> image size in pixels
    verify_every_steps: int = 0  # 0: never; verified steps are returned at once
    towers: Sequence[Tower] = ()
    value_names: Sequence[str] = ()  # names of the values that `step.to_bytes` returns
    again: str = "the same command"  # that resumes the run, in messages
    # kinds of steps that have run, each traced once: (image size, towers of a verified step, active parameter groups)
    traced: set[tuple] = dataclasses.field(default_factory=set)
    _unread: list[FinishedStep] = dataclasses.field(default_factory=list)  # the last step, its metrics still tensors

    @property
    def is_up_to_date(self) -> bool:
        """Whether all steps that were started have been returned."""
        return not self._unread

    def needs_compilation(self, step: int) -> bool:
        """Return whether no step of this kind has run: of this image size, with these parameter groups active."""
        return self._kind(step) not in self.traced

    def trace(self, step: int, batch: Batch, **options: Any) -> tf.types.experimental.ConcreteFunction:
        """Trace and compile a step without running it. Options are those of `start`."""
        return self.train_step.get_concrete_function(**self._arguments(step, batch, **options))

    def start(self, step: int, batch: Batch, **options: Any) -> list[FinishedStep]:
        """Start step number `step + 1`; return earlier steps that were not returned, and this one if it is verified.

        Options:
          rate_factor: multiplies the learning rates.
          collect_diagnostics: whether the metrics have diagnostics.
          stop_signal: in a cluster, the number of the signal that this process has received, or 0.
        """
        arguments = self._arguments(step, batch, **options)
        metrics = self.train_step(**arguments)
        error = self._find_error(step, metrics, **arguments) if "expected" in arguments else None
        if not options["collect_diagnostics"]:
            metrics = metrics._replace(diagnostics=None)
        self.traced.add(self._kind(step))
        rates = self.optimizer.learning_rates(step, options["rate_factor"])
        finished = self._read([FinishedStep(step + 1, batch, rates, self.image_size_at(step), metrics, error)])
        return finished + self.finish() if "expected" in arguments else finished

    def finish(self) -> list[FinishedStep]:
        """Wait for the step that was started last, and return it, unless it has been returned."""
        return self._read([])

    def skipped_last(self) -> bool:
        """Wait for the step that was started last; return whether it was skipped."""
        return any(was_skipped(each.metrics) for each in self._unread)

    def discard(self) -> None:
        """Forget the steps that were not returned, as the run goes back."""
        self._unread = []

    def _read(self, started: list[FinishedStep]) -> list[FinishedStep]:
        finished, self._unread = self._unread, started
        return [each._replace(metrics=to_numpy(each.metrics)) for each in finished]

    def _kind(self, step: int) -> tuple:
        return (self.image_size_at(step), self._pair(step), *self.optimizer.learning_rates(step))

    def _pair(self, step: int) -> tuple[int, int] | None:
        """Return the indices (owner, other) of the towers of a verified step: `other` repeats the work of `owner`.

        All pairs take turns; a single tower repeats its own work. Return None if step `step + 1` is not verified.
        """
        if not self.verify_every_steps or (step + 1) % self.verify_every_steps:
            return None
        rounds, owner = divmod(step // self.verify_every_steps, len(self.towers))
        return owner, (owner + 1 + rounds % max(1, len(self.towers) - 1)) % len(self.towers)

    def _find_error(self, step: int, metrics: StepMetrics, expected: tuple, **arguments: Any) -> RunError | None:
        """Return an error if the repetition of a tower's work gave other bytes; otherwise None.

        Before an error, compute both again without an update: TensorFlow may have compiled them differently.
        """
        same = metrics.original == expected[1]
        index = int(tf.argmin(same))  # of the first difference, if there is one
        if same[index]:
            return None
        owner, other = (self.towers[tower] for tower in self._pair(step) or ())
        again = self.train_step(**arguments, expected=(expected[0], tf.zeros_like(expected[1]))).original[index]
        by_other, by_owner = (self.train_step(**arguments, repeat=(owner.index, t.index))[0] for t in (other, owner))
        recurs = again == metrics.original[index] and by_other[index] == expected[1][index]
        name = f"{self.value_names[index]} of {owner.name}"
        if recurs and ("CPU" in owner.device or by_owner[index] == by_other[index]):
            return UsageError(f"{name} has other bits where TensorFlow compiles it alone; leave verify_every_steps")
        return CorruptedError(
            f"step {step + 1} is not applied: {name} ({owner.device}) has other bits if {other.name} ({other.device}) "
            f"repeats it, so one of them made an error; {self.again} resumes from the last checkpoint"
        )

    def _arguments(
        self, step: int, batch: Batch, rate_factor: float, collect_diagnostics: bool, stop_signal: int | None = None
    ) -> dict[str, Any]:
        rates = self.optimizer.learning_rates(step, rate_factor)
        with tf.device(HOST):
            tensors = {name: tf.constant(rate, tf.float32) for name, rate in rates.items()}
            arguments = {"batch": batch, "learning_rates": tensors, "image_size": self.image_size_at(step)}
            arguments["collect_diagnostics"] = tf.constant(collect_diagnostics)
            arguments |= {} if stop_signal is None else {"stop_signal": tf.constant(stop_signal, tf.float32)}
        if pair := self._pair(step):
            arguments["expected"] = tf.constant(pair[0]), self.train_step(**arguments, repeat=pair)[0]
        return arguments


def was_skipped(metrics: StepMetrics) -> bool:
    """Return whether the step, or that of its proxy, was skipped because a number was not finite."""
    selected = metrics.hard_examples
    return not metrics.updated or bool(selected and not selected.proxy.updated)
