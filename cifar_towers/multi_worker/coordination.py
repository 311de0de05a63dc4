"""The workers of a cluster, as one of them sees them: they meet, exchange values, watch over each other, and part.

Worker 0, the chief, holds a connection to every other. Each side sends a beat every second; who is not heard of for a
while is lost, and then all end, each with one line that names it: a worker that came back alone would find the others
waiting for something else. The supervisor starts all again, and they go on from the last checkpoint.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cifar_towers.errors import Interrupted, RunError, UsageError, WorkerLostError, error_line, error_text, printable
from cifar_towers.multi_worker import messages
from cifar_towers.multi_worker.cluster_spec import ClusterSpec
from cifar_towers.multi_worker.rendezvous import HEARTBEAT_TIMEOUT_SECONDS, Connections, first_difference, meet

HEARTBEAT_INTERVAL_SECONDS = 1.0  # seconds between signs of life
EXIT_GRACE_SECONDS = 3.0  # for the main thread to save, close its files and exit after another worker has ended
_BEAT, _BRING, _ALL, _END = b"b", b"g", b"a", b"e"


def _end_process(terminal: int, line: str, code: int) -> None:
    """Ends this process from whatever thread: its main thread may wait in TensorFlow for somebody who is gone."""
    with contextlib.suppress(OSError):
        os.write(terminal, (("\n" if os.isatty(terminal) else "") + printable(line) + "\n").encode())
    os._exit(code)


class Coordinator:
    """This worker's place among the others. `single_worker()` makes a team of one, with which everything is trivial.

    Args:
      connections: by worker; the chief has one to each other, the others have one to the chief.
      end: called with a line and an exit code, in another thread, when the run cannot go on.

    Attributes:
      before_exit: called right before that.
    """

    def __init__(self, cluster: ClusterSpec, connections: Connections, end: Callable[[str, int], None]):
        self.before_exit: Callable[[], None] = lambda: None
        self.cluster, self.index, self.size = cluster, cluster.index, cluster.size
        self._connections, self._end = connections, end
        self._brought = {worker: queue.SimpleQueue() for worker in connections}
        self._sending = {worker: threading.Lock() for worker in connections}
        self._ending = threading.Lock()  # taken by the first thread that hears of an end
        self._parted = threading.Event()
        self._listeners = [threading.Thread(target=self._listen, args=(worker,), daemon=True) for worker in connections]
        for thread in self._listeners:
            thread.start()
        if connections:
            threading.Thread(target=self._beat, daemon=True).start()

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which alone reads and writes the run's directory."""
        return self.index == 0

    def gather(self, value: Any) -> list:
        """What every worker brings, by worker; all must come. Numbers, texts, lists, dicts and arrays."""
        if self.size == 1:
            return [value]
        brought = self._bring(value)
        self._share(brought)
        return brought

    def broadcast_from_chief(self, make: Callable[[], Any]) -> Any:
        """What the chief makes, for all; the others wait for it."""
        return self.gather(make() if self.is_chief else None)[0]

    def assert_equal(self, facts: Mapping[str, Any]) -> None:
        """Holds everybody's facts against the chief's.

        Raises:
          UsageError: naming the first worker and the first fact that differ; on all workers the same.
        """
        brought = self.gather(dict(facts))
        if odd := first_difference(enumerate(brought)):
            worker, name = odd
            raise UsageError(
                f"{self.cluster.name(worker)} has {name} {brought[worker].get(name)}, worker 0 has {brought[0][name]}; "
                "they must be the same on all"
            )

    def close(self) -> None:
        """Waits for all others, and takes leave of them: the chief last, so that nobody seems lost."""
        if self.size == 1:
            return
        brought = self._bring(None)
        self._parted.set()
        self._share(brought)
        self._hang_up()
        for thread in self._listeners if self.is_chief else ():
            thread.join(EXIT_GRACE_SECONDS)

    def abort(self, line: str, code: int) -> None:
        """Tells the others why this worker ends, so that they do too."""
        self._parted.set()
        self._tell_all(f"{self.cluster.name(self.index)} ended: {line}", code)
        self._hang_up()

    def wait_for_lost_worker(self, seconds: float = HEARTBEAT_TIMEOUT_SECONDS + 2 * HEARTBEAT_INTERVAL_SECONDS) -> None:
        """Gives the other threads time to find who is lost, when something failed that a lost worker may be the cause
        of; they end the process then."""
        self._parted.wait(seconds)

    def _bring(self, value: Any) -> list:
        """On the chief what all brought, when all have; elsewhere what the chief then shares."""
        if self.is_chief:
            return [value] + [self._brought[worker].get() for worker in range(1, self.size)]
        self._send(0, _BRING, value)
        return self._brought[0].get()

    def _share(self, brought: list) -> None:
        for worker in self._connections if self.is_chief else ():
            self._send(worker, _ALL, brought)

    # What goes on beside the main thread ------------------------------------------------------------------------

    def _listen(self, worker: int) -> None:
        connection = self._connections[worker]
        try:
            while True:
                kind, value = messages.receive(connection)
                if kind == _END:
                    return self._leave(*value)
                if kind in (_BRING, _ALL):
                    self._brought[worker].put(value)
        except TimeoutError:
            self._lost(worker, f"nothing was heard of it for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s")
        except (OSError, ValueError) as error:
            self._lost(worker, "its connection has ended" if isinstance(error, OSError) else str(error))

    def _beat(self) -> None:
        while not self._parted.wait(HEARTBEAT_INTERVAL_SECONDS):
            for worker in self._connections:
                if not self._sending[worker].locked():  # a long message is a sign of life itself
                    self._send(worker, _BEAT)

    def _send(self, worker: int, kind: bytes, value: Any = None) -> None:
        """Sends; a failure is left to whoever listens to this worker."""
        with self._sending[worker], contextlib.suppress(OSError):
            messages.send(self._connections[worker], kind, value)

    def _lost(self, worker: int, why: str) -> None:
        name = self.cluster.name(worker)
        line = f"lost: {name}: {why}; start all workers again, and they go on from the last checkpoint"
        self._leave(line, WorkerLostError.exit_code)

    def _leave(self, line: str, code: int) -> None:
        """Tells the others, and ends the process unless its main thread is about to."""
        if self._parted.is_set() or not self._ending.acquire(blocking=False):
            return
        if self.is_chief:
            self._tell_all(line, code)
        if not self._parted.wait(EXIT_GRACE_SECONDS):
            with contextlib.suppress(OSError):
                self.before_exit()
            self._end(line, code)

    def _tell_all(self, line: str, code: int) -> None:
        """Does not wait long for those who do not listen: one of them may be the reason."""
        for worker, connection in self._connections.items():
            if self._sending[worker].acquire(timeout=HEARTBEAT_INTERVAL_SECONDS):
                try:
                    connection.settimeout(HEARTBEAT_INTERVAL_SECONDS)
                    messages.send(connection, _END, [line, code])
                except OSError:
                    pass
                finally:
                    self._sending[worker].release()

    def _hang_up(self) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)


def single_worker() -> Coordinator:
    """A team of one process, which opens no port."""
    return Coordinator(ClusterSpec(("",), 0), {}, lambda line, code: None)


@contextlib.contextmanager
def connect(cluster: ClusterSpec, settings: Mapping[str, Any], seconds: float) -> Iterator[Coordinator]:
    """The team of these cluster, once all have come and have the same settings. Whatever ends one of them inside ends
    all, with its line; who is done waits for the others.

    Raises:
      UsageError, LostError: somebody did not come in these seconds, or there is something wrong with the cluster.
    """
    terminal = os.dup(2)  # as it is now: while TensorFlow is imported, it is elsewhere
    team = Coordinator(cluster, meet(cluster, settings, seconds), lambda line, code: _end_process(terminal, line, code))
    try:
        yield team
    except (RunError, Interrupted) as error:
        team.abort(error_line(error), error.exit_code)
        raise
    except Exception as error:
        if type(error).__module__.startswith("tensorflow"):
            team.wait_for_lost_worker()
        team.abort(f"{type(error).__name__}: {error_text(error, 300)}", 1)
        raise
    team.close()
