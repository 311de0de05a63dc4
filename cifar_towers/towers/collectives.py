"""Towers that must meet inside the forward pass, as batch norm over the whole batch does.

Each tower is traced in a thread of its own, and only one of them traces at a time: tower 0 until it comes to a
meeting, then tower 1 until it comes there too, and so on round. The graph is the same in every process.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.devices import Tower

_here = threading.local()


def run_on_towers_synchronized(
    fn: Callable[[Tower, Any], Any], towers: Sequence[Tower], shards: Sequence[Any]
) -> list[Any]:
    """As `run_on_towers`, for an `fn` that calls `all_reduce_mean` on its way, forward or backward.

    Only inside a `tf.function`. Every tower must come to the same meetings in the same order.
    """
    graph = tf.compat.v1.get_default_graph()
    graph.switch_to_thread_local()  # every thread has its own device and name scopes
    outer_scope = graph.get_name_scope()
    meeting = _TraceBarrier(len(towers))
    results: list[Any] = [None] * len(towers)

    def trace(seat: int) -> None:
        tower = towers[seat]
        scope = f"{outer_scope}/{tower.name}" if outer_scope else tower.name
        with graph.as_default(), tf.device(tower.device), tf.name_scope(f"{scope}/"):
            results[seat] = fn(tower, shards[seat])

    seats = range(len(towers))
    threads = [
        threading.Thread(target=meeting.attend, args=(seat, functools.partial(trace, seat)), daemon=True)
        for seat in seats
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.error:
        raise meeting.error
    return results


def all_reduce_mean(tensor: tf.Tensor) -> tf.Tensor:
    """The mean of `tensor` over all towers, on each of them, with its gradient; where there is one tower, `tensor`.

    Call it inside `run_on_towers_synchronized` or, with replicas for towers, inside `tf.distribute.Strategy.run`.
    If tower k's loss is L_k, then the gradients that the towers take of their own losses average to the gradient of
    mean(L_k).
    """

    @tf.custom_gradient
    def mean(tensor):
        return _mean(tensor), _mean

    return mean(tensor)


def num_replicas() -> int:
    """Number of towers inside `run_on_towers_synchronized`, or of replicas inside a strategy."""
    if _replica():
        return tf.distribute.get_strategy().num_replicas_in_sync
    meeting = getattr(_here, "meeting", None)
    return meeting.count if meeting else 1


def _replica():
    """The replica of a strategy that the code is traced for; None outside `tf.distribute.Strategy.run`."""
    return tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None


def _mean(tensor: tf.Tensor) -> tf.Tensor:
    if _replica():
        return _replica().all_reduce(tf.distribute.ReduceOp.MEAN, tensor)
    if num_replicas() == 1:
        return tensor
    return tf.add_n(_here.meeting.gather(_here.index, tensor)) / _here.meeting.count


class _TraceBarrier:
    """Hands the turn to trace round the towers."""

    def __init__(self, count: int):
        self.count = count
        self.error: BaseException | None = None
        self._tracing = list(range(count))  # the towers that have not ended
        self._turns = [threading.Semaphore(int(index == 0)) for index in range(count)]
        self._brought: list[Any] = [None] * count

    def attend(self, index: int, trace: Callable[[], None]) -> None:
        """A tower's tracing, in its turns. An error ends that of all; `run_on_towers_synchronized` raises it."""
        try:
            self._wait(index)
            _here.meeting, _here.index = self, index
            trace()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._hand_over(index)
            self._tracing.remove(index)

    def gather(self, index: int, value: Any) -> list[Any]:
        """What all towers bring to this meeting, in their order."""
        brought = self._brought
        brought[index] = value
        if index == self.count - 1:
            self._brought = [None] * self.count  # for the next meeting
        self._hand_over(index)
        self._wait(index)
        if any(value is None for value in brought):
            raise RuntimeError("the towers did not all come to the same meetings; they must all trace the same code")
        return brought

    def _wait(self, index: int) -> None:
        self._turns[index].acquire()
        if self.error:
            raise self.error

    def _hand_over(self, index: int) -> None:
        after = self._tracing[self._tracing.index(index) + 1 :] or self._tracing
        for tower in self._tracing if self.error else after[:1]:
            self._turns[tower].release()
