"""Worker processes of the benchmark. Must not import TensorFlow, which a process configures before it imports it."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from cifar_towers.benchmark.settings import BenchmarkConfig
from cifar_towers.errors import RunError


@contextmanager
def open_worker(config: BenchmarkConfig, num_towers: int, initializer: Callable[[], None]) -> Iterator[Callable]:
    """A process with `num_towers` towers, as a function that sends a request (if given) and returns the response.

    `initializer` is called in the process before anything imports TensorFlow.
    """
    spawn = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
    connection, worker_connection = spawn.Pipe()
    arguments = (config, num_towers, worker_connection, initializer)
    process = spawn.Process(target=serve_worker, args=arguments, daemon=True)
    # Ctrl-C is handled by this process, which ends the worker
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    worker_connection.close()
    try:
        yield make_request_fn(connection, num_towers)
        with suppress(ConnectionError):  # it has already ended
            connection.send(None)
        process.join(10)
    finally:  # after an error or a signal it may be in the middle of a step
        process.terminate()


def make_request_fn(connection: Connection, num_towers: int) -> Callable:
    """A function that sends a request (if given) to the process of `num_towers` towers and returns the response.

    Raises:
      RunError: the response is one, or the process has ended.
    """

    def request(message: tuple | None = None):
        try:
            if message:
                connection.send(message)
            response = connection.recv()
        except (EOFError, ConnectionError):
            raise RunError(f"the process of {num_towers} towers has ended; see its last output above") from None
        if isinstance(response, RunError):
            raise response
        return response

    return request


def serve_worker(
    config: BenchmarkConfig, num_towers: int, connection: Connection, initializer: Callable[[], None]
) -> None:
    """Main function of a worker process."""
    initializer()
    from cifar_towers.benchmark import worker

    worker.serve(config, num_towers, connection)
