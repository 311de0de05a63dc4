"""Coordination of a cluster's workers outside the graph: exchange of values, heartbeats, and a common end.

Worker 0, the chief, holds a connection to every other worker. Each side sends a heartbeat every second. When a worker
is lost, all exit, each with a line that names it: a worker that came back alone would find the others in another step.
The launcher restarts all, and they resume from the last checkpoint.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cifar_towers.errors import Interrupted, RunError, UsageError, WorkerLostError, error_line, error_text, printable
from cifar_towers.multi_worker import messages, timeouts
from cifar_towers.multi_worker.cluster_spec import ClusterSpec
from cifar_towers.multi_worker.rendezvous import (
    Connections,
    connect_workers,
    first_difference,
)

_HEARTBEAT, _GATHER, _GATHERED, _END = b"b", b"g", b"a", b"e"


class Coordinator:
    """This worker's connection with the others. Of a single worker (see `single_worker`) all methods are trivial.

    Args:
      cluster: all workers.
      connections: by worker; the chief has one to each other worker, the others have one to the chief.
      end_process: called in another thread with a line and an exit code when the run cannot continue.

    Attributes:
      before_exit: called before `end_process`.
    """

    def __init__(self, cluster: ClusterSpec, connections: Connections, end_process: Callable[[str, int], None]):
        self.before_exit: Callable[[], None] = lambda: None
        self.cluster, self.index, self.size = cluster, cluster.index, cluster.size
        self._connections, self._end_process = connections, end_process
        self._received = {worker: queue.SimpleQueue() for worker in connections}
        self._send_locks = {worker: threading.Lock() for worker in connections}
        self._ending = threading.Lock()  # taken by the first thread that learns of an end
        self._closed = threading.Event()
        self._listeners = [threading.Thread(target=self._listen, args=(worker,), daemon=True) for worker in connections]
        for thread in self._listeners:
            thread.start()
        if connections:
            threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, the only one that reads and writes `train_dir`."""
        return self.index == 0

    def gather(self, value: Any) -> list:
        """The values of all workers, by worker; waits for all. Numbers, strings, lists, dicts and arrays."""
        if self.size == 1:
            return [value]
        values = self._exchange(value)
        self._send_gathered(values)
        return values

    def broadcast_from_chief(self, make: Callable[[], Any]) -> Any:
        """The result of `make` on the chief, for all workers."""
        return self.gather(make() if self.is_chief else None)[0]

    def assert_equal(self, values: Mapping[str, Any]) -> None:
        """Checks that all workers have the chief's values.

        Raises:
          UsageError: naming the first worker and the first value that differ; the same on all workers.
        """
        gathered = self.gather(dict(values))
        if difference := first_difference(enumerate(gathered)):
            worker, name = difference
            raise UsageError(
                f"{self.cluster.name(worker)} has {name} {gathered[worker].get(name)}, worker 0 has "
                f"{gathered[0][name]}; they must be equal on all workers"
            )

    def close(self) -> None:
        """Waits for all workers, then closes the connections; the chief last, so that no worker seems lost."""
        if self.size == 1:
            return
        values = self._exchange(None)
        self._closed.set()
        self._send_gathered(values)
        self._shut_down_connections()
        for thread in self._listeners if self.is_chief else ():
            thread.join(timeouts.EXIT_GRACE_SECONDS)

    def abort(self, line: str, code: int) -> None:
        """Ends the other workers with this worker's error line and exit code."""
        self._closed.set()
        self._send_end(f"{self.cluster.name(self.index)} ended: {line}", code)
        self._shut_down_connections()

    def wait_for_lost_worker(self) -> None:
        """After an error that a lost worker may have caused, gives the other threads time to detect it and exit."""
        self._closed.wait(timeouts.HEARTBEAT_TIMEOUT_SECONDS + 2 * timeouts.HEARTBEAT_INTERVAL_SECONDS)

    def _exchange(self, value: Any) -> list:
        """Sends this worker's value; the values of all."""
        if self.is_chief:
            return [value] + [self._received[worker].get() for worker in range(1, self.size)]
        self._send(0, _GATHER, value)
        return self._received[0].get()

    def _send_gathered(self, values: list) -> None:
        for worker in self._connections if self.is_chief else ():
            self._send(worker, _GATHERED, values)

    # Threads ----------------------------------------------------------------------------------------------------

    def _listen(self, worker: int) -> None:
        connection = self._connections[worker]
        try:
            while True:
                kind, value = messages.receive(connection)
                if kind == _END:
                    return self._end(*value)
                if kind in (_GATHER, _GATHERED):
                    self._received[worker].put(value)
        except TimeoutError:
            self._report_lost(worker, f"no heartbeat for {timeouts.HEARTBEAT_TIMEOUT_SECONDS:.0f} s")
        except (OSError, ValueError) as error:
            self._report_lost(worker, "its connection has closed" if isinstance(error, OSError) else str(error))

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(timeouts.HEARTBEAT_INTERVAL_SECONDS):
            for worker in self._connections:
                if not self._send_locks[worker].locked():  # a long message serves as a heartbeat
                    self._send(worker, _HEARTBEAT)

    def _send(self, worker: int, kind: bytes, value: Any = None) -> None:
        """Sends a message; the thread that listens to this worker detects a failure."""
        with self._send_locks[worker], contextlib.suppress(OSError):
            messages.send(self._connections[worker], kind, value)

    def _report_lost(self, worker: int, reason: str) -> None:
        line = f"lost: {self.cluster.name(worker)}: {reason}; restart all workers to resume from the last checkpoint"
        self._end(line, WorkerLostError.exit_code)

    def _end(self, line: str, code: int) -> None:
        """Ends the other workers, and this process unless its main thread exits by itself."""
        if self._closed.is_set() or not self._ending.acquire(blocking=False):
            return
        if self.is_chief:
            self._send_end(line, code)
        if not self._closed.wait(timeouts.EXIT_GRACE_SECONDS):
            with contextlib.suppress(OSError):
                self.before_exit()
            self._end_process(line, code)

    def _send_end(self, line: str, code: int) -> None:
        """Sends an end to all; waits briefly, as one of them may no longer read."""
        for worker, connection in self._connections.items():
            if self._send_locks[worker].acquire(timeout=timeouts.HEARTBEAT_INTERVAL_SECONDS):
                try:
                    connection.settimeout(timeouts.HEARTBEAT_INTERVAL_SECONDS)
                    messages.send(connection, _END, [line, code])
                except OSError:
                    pass
                finally:
                    self._send_locks[worker].release()

    def _shut_down_connections(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)


def single_worker() -> Coordinator:
    """The coordinator of a run in one process; opens no port."""
    return Coordinator(ClusterSpec(("",), 0), {}, lambda line, code: None)


@contextlib.contextmanager
def connect(cluster: ClusterSpec, settings: Mapping[str, Any], timeout_seconds: float) -> Iterator[Coordinator]:
    """Connects all workers of a cluster; an error inside the context ends all of them with its line.

    Args:
      settings: must be the same on all workers.
      timeout_seconds: how long to wait for the last worker.

    Raises:
      UsageError: settings, addresses or ports are in conflict.
      WorkerLostError: a worker did not connect in time.
    """
    stderr = os.dup(2)  # the terminal; file descriptor 2 is redirected while TensorFlow is imported
    connections = connect_workers(cluster, settings, timeout_seconds)
    coordinator = Coordinator(cluster, connections, lambda line, code: _end_process(stderr, line, code))
    try:
        yield coordinator
    except (RunError, Interrupted) as error:
        coordinator.abort(error_line(error), error.exit_code)
        raise
    except Exception as error:
        if type(error).__module__.startswith("tensorflow"):
            coordinator.wait_for_lost_worker()
        coordinator.abort(f"{type(error).__name__}: {error_text(error, 300)}", RunError.exit_code)
        raise
    coordinator.close()


def _end_process(stderr: int, line: str, code: int) -> None:
    """Exits from any thread, as the main thread may wait in TensorFlow for a lost worker."""
    with contextlib.suppress(OSError):
        os.write(stderr, (("\n" if os.isatty(stderr) else "") + printable(line) + "\n").encode())
    os._exit(code)
