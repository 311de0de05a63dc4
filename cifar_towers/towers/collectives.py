"""Means over all towers inside the forward pass, as batch normalization over the whole batch needs.

Tracing a mean in tower 0 needs the tensors of the other towers, which are traced later. So each
tower is traced in its own thread, one thread at a time: tower 0 up to its first `all_reduce_mean`,
then tower 1 up to the same call, and so on in rounds. The order is fixed, so every process builds
the same graph. When the graph runs, there are no such threads.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.devices import Tower
from cifar_towers.towers.gradients import average_tensors

# .rounds and .index of the tower that this thread traces; .unsynchronized
_thread = threading.local()


def run_on_towers_synchronized(
    fn: Callable[[Tower, Any], Any], towers: Sequence[Tower], shards: Sequence[Any]
) -> list[Any]:
    """Run `fn` as `run_on_towers` does, and let it call `all_reduce_mean` in its forward or
    backward pass.

    Call it inside a `tf.function`, with shards of equal size. Every tower must make the same calls
    in the same order. `fn` must compute its gradients itself: the towers run in threads of their
    own, where a tape outside of `fn` records nothing.

    Raises:
      RuntimeError: it is called eagerly, where no graph is traced, or the towers call
        `all_reduce_mean` a different number of times.
      ValueError: there is not one shard per tower.
    """
    graph = tf.compat.v1.get_default_graph()
    graph.switch_to_thread_local()  # every thread has its own device and name scopes
    outer_scope = graph.get_name_scope()
    pairs = list(zip(towers, shards, strict=True))
    rounds = _Rounds(len(pairs))
    results: list[Any] = [None] * len(pairs)

    def trace(index: int) -> None:
        tower, shard = pairs[index]
        scope = f"{outer_scope}/{tower.name}" if outer_scope else tower.name
        with graph.as_default(), tf.device(tower.device), tf.name_scope(f"{scope}/"):
            results[index] = fn(tower, shard)

    threads = [
        threading.Thread(target=rounds.run, args=(index, trace), daemon=True)
        for index in range(len(pairs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if rounds.error:
        raise rounds.error
    return results


@tf.custom_gradient
def all_reduce_mean(tensor: tf.Tensor) -> tf.Tensor:
    """Return the mean of `tensor` over all towers, on each tower; with one tower, `tensor` itself.

    Call it inside `run_on_towers_synchronized`, or inside `tf.distribute.Strategy.run` to average
    over replicas. The tensor must have the same shape on every tower. The function is
    differentiable. If each tower differentiates its own loss L_k, the mean of the towers' gradients
    is the gradient of the mean loss. Where several towers do not meet, as in `run_on_towers`, it
    raises a RuntimeError.
    """
    return _mean(tensor), _mean


def num_replicas() -> int:
    """Return the number of replicas that run side by side.

    They are the towers inside `run_on_towers_synchronized`, or the replicas inside
    `tf.distribute.Strategy.run`.

    Raises:
      RuntimeError: several towers do not meet here, as in `run_on_towers`.
    """
    if _replica_context():
        return tf.distribute.get_strategy().num_replicas_in_sync
    rounds = getattr(_thread, "rounds", None)
    if rounds:
        return rounds.num_towers
    if getattr(_thread, "unsynchronized", False):
        raise RuntimeError(
            "the towers do not meet here for all_reduce_mean; call run_on_towers_synchronized"
        )
    return 1


@contextlib.contextmanager
def unsynchronized(num_towers: int) -> Iterator[None]:
    """Make `all_reduce_mean` and `num_replicas` raise an error inside this context, unless
    `num_towers` is 1.
    """
    before = getattr(_thread, "unsynchronized", False)
    _thread.unsynchronized = num_towers > 1
    try:
        yield
    finally:
        _thread.unsynchronized = before


def _mean(tensor: tf.Tensor) -> tf.Tensor:
    context = _replica_context()
    if context:
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, tensor)
    if num_replicas() == 1:
        return tensor
    return average_tensors(_thread.rounds.all_gather(_thread.index, tensor))


def _replica_context() -> tf.distribute.ReplicaContext | None:
    return tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None


class _Rounds:
    """The towers' threads, of which one traces at a time; they exchange one value per tower in each
    round.
    """

    def __init__(self, num_towers: int):
        self.num_towers = num_towers
        # the first error of any tower; ends the tracing of all
        self.error: BaseException | None = None
        self._tracing = list(range(num_towers))  # the unfinished towers
        self._turns = [threading.Semaphore(0) for _ in range(num_towers)]
        self._turns[0].release()  # tower 0 begins
        self._values: list[Any] = [None] * num_towers

    def run(self, index: int, trace: Callable[[int], None]) -> None:
        """Trace tower `index`, in this tower's thread."""
        try:
            self._wait_for_turn(index)
            _thread.rounds = self
            _thread.index = index
            trace(index)
        except BaseException as error:
            if not self.error:
                self.error = error
        finally:
            self._tracing.remove(index)
            self._pass_turn(index)

    def all_gather(self, index: int, value: Any) -> list[Any]:
        """Return the values of all towers, in their order, when each has called it."""
        values = self._values  # each waiting tower keeps the list of this round
        values[index] = value
        if index == len(values) - 1:
            self._values = [None] * len(values)  # the last tower starts the next round
        self._pass_turn(index)
        self._wait_for_turn(index)
        if any(value is None for value in values):
            raise RuntimeError(
                "the towers call all_reduce_mean a different number of times; make them all trace "
                "the same code"
            )
        return values

    def _wait_for_turn(self, index: int) -> None:
        self._turns[index].acquire()
        if self.error:
            raise self.error

    def _pass_turn(self, index: int) -> None:
        """Give the turn to the next unfinished tower; after an error wake all, so that their
        threads end.
        """
        if self.error:
            for tower in self._tracing:
                self._turns[tower].release()
            return
        if not self._tracing:
            return

        later = [tower for tower in self._tracing if tower > index]
        following = later[0] if later else self._tracing[0]
        self._turns[following].release()
