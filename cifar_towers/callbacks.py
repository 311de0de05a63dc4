"""Callbacks of the user's, such as a metrics tracker."""

import contextlib
import copy
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cifar_towers.errors import UsageError
from cifar_towers.reporting.records import tower_scalars


class Callbacks:
    """The callbacks of one training.

    Args:
      callbacks: objects with any of `on_start(run)`, `on_step(step, metrics)`,
        `on_evaluation(step, evaluation)` and `on_end(run)`. An object without `on_step` that can be
        called is an `on_step`.
      run: what `on_start` and `on_end` get.
    """

    METHODS = ("on_start", "on_step", "on_evaluation", "on_end")

    def __init__(self, callbacks: Sequence[Any] = (), run: Any = None):
        self._callbacks = list(callbacks)
        self._run = run
        self._started: list[Any] = []  # callbacks whose `on_start` was called
        for callback in self._callbacks:
            has_method = any(hasattr(callback, method) for method in self.METHODS)
            if not callable(callback) and not has_method:
                methods = ", ".join(self.METHODS)
                raise UsageError(
                    f"callback {callback!r} cannot be called and has none of {methods}"
                )

    def start(self) -> None:
        """Call `on_start` of every callback: the run starts or resumes."""
        for callback in self._callbacks:
            self._started.append(callback)
            self._call(callback, "on_start", self._run)

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Pass on a step's record of metrics.jsonl, as floats by name; a tower's values as
        `tower_0/loss`.
        """
        metrics = {
            name: float(value) for name, value in record.items() if isinstance(value, numbers.Real)
        }
        metrics |= tower_scalars(record)
        for callback in self._callbacks:
            self._call(callback, "on_step", step, dict(metrics))

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Pass on the scores of an evaluation."""
        for callback in self._callbacks:
            self._call(callback, "on_evaluation", step, copy.deepcopy(record))

    @contextlib.contextmanager
    def until_end(self) -> Iterator[None]:
        """At the end of the context, also after an error, call `on_end` of every started
        callback.
        """
        with contextlib.ExitStack() as stack:
            try:
                yield
            finally:
                for callback in reversed(self._started):  # the stack calls the last one first
                    stack.callback(self._call, callback, "on_end", self._run)

    def _call(self, callback: Any, name: str, *arguments: Any) -> None:
        method = getattr(callback, name, None)
        if method:
            method(*arguments)
        elif name == "on_step" and callable(callback):
            callback(*arguments)
