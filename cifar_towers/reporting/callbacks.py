"""Callbacks: functions and objects of the user's that are told what a run does, such as a metrics tracker."""

import contextlib
import inspect
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cifar_towers.errors import RunError, UsageError
from cifar_towers.user_code import as_usage_errors

METHODS = ("on_start", "on_step", "on_evaluation", "on_end")


class CallbackError(RunError):
    """A callback raised an exception; the message has the place in the user's code."""


class Callbacks:
    """The callbacks of one training. After the first error in one of them only `on_end` is called.

    Args:
      callbacks: objects with any of `on_start(run)`, `on_step(step, metrics)`, `on_evaluation(step, evaluation)` and
        `on_end(run)`; classes are instantiated. A plain function is an `on_step`.
      run: the argument of `on_start` and `on_end`.

    Attributes:
      error: the first error in a callback.

    Raises:
      CallbackError: an object is no function and has none of the methods.
    """

    def __init__(self, callbacks: Sequence[Any] = (), run: Any = None):
        self.error: CallbackError | None = None
        self._run = run
        self._started: list[Any] = []  # callbacks that have been told of the start
        self._callbacks = [each() if inspect.isclass(each) else each for each in callbacks]
        for each in self._callbacks:
            if not (inspect.isroutine(each) or any(hasattr(each, method) for method in METHODS)):
                raise CallbackError(f"callback {each!r} is no function and has none of {', '.join(METHODS)}")

    def start(self) -> None:
        """Tell the callbacks that the run starts or resumes; a second call does nothing."""
        for callback in [] if self._started else self._callbacks:
            if not self.error:
                self._started.append(callback)
                self._call(callback, "on_start", self._run)

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Pass on a step's record of metrics.jsonl, as floats by name; a tower's values as `tower_0/loss`."""
        metrics = {name: float(value) for name, value in record.items() if isinstance(value, numbers.Real)}
        for name, values in record.get("towers", {}).items():
            metrics |= {f"tower_{tower}/{name}": value for tower, value in enumerate(values) if value is not None}
        self._call_each("on_step", step, metrics)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Pass on an evaluation's record of metrics.jsonl."""
        self._call_each("on_evaluation", step, record)

    @contextlib.contextmanager
    def until_end(self) -> Iterator["Callbacks"]:
        """Call `on_end` of every callback whose `on_start` was called, when the context ends.

        All of them are called, even if the training or another callback raises an error.

        Raises:
          CallbackError: a callback has failed in the last evaluation or at the end.
        """
        try:
            yield self
        finally:
            for callback in self._started:
                self._call(callback, "on_end", self._run)
        if self.error:
            raise CallbackError(f"{self.error}; the run is complete")

    def _call_each(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            if not self.error:
                self._call(callback, name, *arguments)

    def _call(self, callback: Any, name: str, *arguments: Any) -> None:
        method = callback if inspect.isroutine(callback) and name == "on_step" else getattr(callback, name, None)
        if not method:
            return
        try:
            with as_usage_errors(f"callback {getattr(callback, '__name__', type(callback).__name__)}, {name}"):
                method(*arguments)
        except UsageError as error:
            self.error = self.error or CallbackError(str(error))
