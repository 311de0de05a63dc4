"""Coordination of a cluster's workers outside the step: how they meet, exchange values, and end together.

Everything travels through TensorFlow's server, one port for each worker. Values are gathered by a collective. When a
worker dies, stops or fails, TensorFlow's coordination service aborts the collectives of all others. Then every
worker exits with a line that names the lost one, because a worker that restarted alone would be at another step than
the others. The launcher restarts all workers, and they resume from the last checkpoint.
"""

import contextlib
import ctypes
import pickle
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

from cifar_towers.errors import Interrupted, RunError, UsageError, WorkerLostError, error_line, error_text, printable
from cifar_towers.multi_worker.cluster_spec import ALONE, ClusterSpec, Workers, split_address

WAIT_SECONDS = 60.0  # for all workers at the start
HEARTBEAT_TIMEOUT_SECONDS = 10  # a worker that is silent for so long is lost
POLL_SECONDS = 0.1  # between checks for signals while this worker waits for others
PROBE_SECONDS = 2.0  # longest wait for a worker's port to answer; also the wait before silent workers are named
EXIT_GRACE_SECONDS = 1.0  # for an error to reach the other workers before this one closes its connections
JOB = "worker"
TASK = re.compile(rf"/job:{JOB}/(?:replica:0/)?task:(\d+)")
SERVICE = "/tensorflow.CoordinationService/"  # in errors of workers that no longer reach worker 0, where it runs
END = re.compile(r"exit code (\d+): ([^\n]*)")


@contextlib.contextmanager
def connect(cluster: ClusterSpec | None, make_devices: Callable[[], Any]) -> Iterator[tuple[Workers, Any]]:
    """Join the workers of a cluster, or work alone without one. An error of one worker ends all with the same line.

    Yield the workers and this worker's `Devices` from `make_devices`; their `strategy` joins all workers. The last
    worker has `timeout_seconds` to come. Signals are handled during the wait.

    Raises:
      UsageError: this worker's port is in use.
      WorkerLostError: a worker did not come in time, or was lost later.
      RunError: another worker ended with an error; with its exit code.
    """
    if not cluster:
        yield ALONE, make_devices()
        return
    try:
        devices = _start(cluster, make_devices, WAIT_SECONDS)
        gather = _make_gather(devices.strategy)
        workers = Workers(cluster, gather)
        cluster.log("has joined; worker 0 logs the run")
        yield workers, devices
        workers.gather(None)  # a worker that finishes early waits for the others
        cluster.log("has finished")
    except (Exception, Interrupted) as error:
        cause = _explain(cluster, error)
        line = str(cause) if cause else f"{cluster.name(cluster.index)} ended: {error_line(error)}"
        code = getattr(cause or error, "exit_code", RunError.exit_code)
        _report_error(f"exit code {code}: {printable(line)}")  # ends the others with both
        time.sleep(EXIT_GRACE_SECONDS)
        if cause:
            raise cause from error
        raise


def run_until(deadline: float, function: Callable[[], Any]) -> Any:
    """Run `function` in another thread and return its result, while this thread handles signals.

    Raises:
      TimeoutError: it has not returned by `deadline`, on the monotonic clock.
    """
    outcome: Future = Future()

    def run():
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while True:
        is_done = wait([outcome], POLL_SECONDS).done
        if is_done:
            return outcome.result()
        if time.monotonic() > deadline:
            raise TimeoutError


# A run of several workers ---------------------------------------------------------------------------------------------


def worker_train_dir(workers: Workers, train_dir: str) -> contextlib.AbstractContextManager[str]:
    """Return a context with the directory that this worker writes: `train_dir` on worker 0, else a temporary one."""
    if workers.is_chief:
        return contextlib.nullcontext(train_dir)
    return tempfile.TemporaryDirectory(prefix=f"cifar_towers-worker{workers.index}-", ignore_cleanup_errors=True)


# The start and the end ------------------------------------------------------------------------------------------------


def _start(cluster: ClusterSpec, make_devices: Callable[[], Any], seconds: float) -> Any:
    """Make the devices, which waits for all workers."""
    name, (_, port) = cluster.name(cluster.index), split_address(cluster.addresses[cluster.index])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = error_text(error).lower()
        raise UsageError(
            f"{name} cannot listen at port {port}: {reason}; give it another port, or end the process that has it: "
            "there may be two with one worker_index"
        ) from error
    _configure_service(cluster.size)
    notice = threading.Timer(PROBE_SECONDS, lambda: cluster.log(f"waits for {_silent_workers(cluster) or 'others'}"))
    notice.daemon = True
    notice.start()
    try:
        with _startup_in_threads():
            devices = run_until(time.monotonic() + seconds, make_devices)
        own = ",".join(cluster.addresses)
        expected = _broadcast_text("workers", own if cluster.index == 0 else None)
        if own != expected:
            raise UsageError(f"{name} has the workers {own}, worker 0 has {expected}; give all workers the same")
        return devices
    except TimeoutError:
        if silent := _silent_workers(cluster):
            line = f"{silent} did not answer within {seconds:g} s; start it with the same workers and its worker_index"
        else:
            line = f"{name} met no common cluster within {seconds:g} s, though every port answers; give all workers "
            line += f"the same list, {','.join(cluster.addresses)}, and each a worker_index of its own"
        raise WorkerLostError(line) from None
    except tf.errors.OpError as error:
        raise _explain(cluster, error) or WorkerLostError(
            f"{name} cannot join the others: {error_text(error)}; give all workers the same list"
        ) from error
    finally:
        notice.cancel()


def _silent_workers(cluster: ClusterSpec) -> str:
    """Return the names of the other workers at whose ports nothing listens."""
    silent = []
    for index, address in enumerate(cluster.addresses):
        try:
            if index != cluster.index:
                socket.create_connection(split_address(address), PROBE_SECONDS).close()
        except OSError:
            silent.append(cluster.name(index))
    return ", ".join(silent)


def _explain(cluster: ClusterSpec, error: BaseException) -> RunError | None:
    """Return how another worker ended, if an error of TensorFlow's is about that; otherwise None."""
    text = str(error) if isinstance(error, tf.errors.OpError) else ""
    if end := END.search(text):
        ended = WorkerLostError(end[2]) if int(end[1]) == WorkerLostError.exit_code else RunError(end[2])
        ended.exit_code = int(end[1])
        return ended
    task = TASK.search(text)
    unreachable = "failed to connect" in text  # then the text may be about this worker, as others see it
    index = int(task[1]) if task else 0 if SERVICE in text else cluster.size
    if index >= cluster.size or (index == cluster.index and not unreachable):
        return None
    silent = "heartbeat" in text
    reason = f"sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS} s" if silent else "cannot be reached"
    advice = "start all of them again with the same list to resume from the last checkpoint"
    return WorkerLostError(f"{cluster.name(index)} {reason}; launch.py restarts the workers; without it, {advice}")


# Values ---------------------------------------------------------------------------------------------------------------


def _make_gather(strategy: tf.distribute.Strategy) -> Callable[[Any], list]:
    """Return a function that gathers a value from every worker; it returns the list in the order of the workers.

    All replicas take part in the all-gather. The first replica of a worker sends the worker's value, the others send
    nothing.

    Values travel pickled, in words of 64 bits, because GPUs exchange no bytes. Pickle adds no danger: who can send to
    these ports can run code there anyway.
    """
    num_local = len(strategy.extended.worker_devices)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)
    def gather(words):
        def on_replica():
            replica = tf.distribute.get_replica_context()
            is_first = tf.get_static_value(replica.replica_id_in_sync_group) % num_local == 0
            mine = tf.identity(words if is_first else words[:0])  # on the device of this replica
            return replica.all_gather(mine, 0), replica.all_gather(tf.size(mine, tf.int64)[None], 0)

        return strategy.run(on_replica)

    def gather_values(value: Any) -> list:
        content = pickle.dumps(value)
        words = np.frombuffer(content + bytes(-len(content) % 8), np.int64)
        joined, sizes = (strategy.experimental_local_results(result)[0] for result in gather(words))
        return [pickle.loads(part.numpy().tobytes()) for part in tf.split(joined, sizes)[::num_local]]

    return gather_values


# TensorFlow's coordination service: these parts of TensorFlow 2.21 have no public API ---------------------------------


def _configure_service(num_workers: int) -> None:
    """Enable the service, with its heartbeats, for the strategy that is made next."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{JOB}/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_TIMEOUT_SECONDS,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name=JOB, num_tasks=num_workers)],
    )


def _broadcast_text(name: str, value: str | None) -> str:
    """Return the text of worker 0 on all workers, before they can gather values; the others pass None."""
    if value is not None:
        context.context().set_config_key_value(name, value)
    return context.context().get_config_key_value(name, 1000 * HEARTBEAT_TIMEOUT_SECONDS)


def _report_error(message: str) -> None:
    """Abort the collectives of all workers with this message, unless this worker is cut off."""
    with contextlib.suppress(tf.errors.OpError, ValueError):
        context.context().report_error_to_cluster(tf.errors.ABORTED, message)


@contextlib.contextmanager
def _startup_in_threads() -> Iterator[None]:
    """Let TensorFlow's server wait for the other workers without holding Python's interpreter lock.

    `TFE_EnableCollectiveOps` waits. TensorFlow's binding holds the lock meanwhile, so that neither a signal handler nor
    another thread would run until the last worker has come. A call through `ctypes` releases the lock.
    """
    library = ctypes.CDLL(str(Path(tf.__file__).parent / "libtensorflow_cc.so.2"))
    library.TF_NewStatus.restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p
    library.TF_Message.argtypes = library.TF_GetCode.argtypes = library.TF_DeleteStatus.argtypes = [ctypes.c_void_p]
    library.TFE_EnableCollectiveOps.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
    capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def enable_collective_ops(handle, server_def: bytes) -> None:
        status = library.TF_NewStatus()
        library.TFE_EnableCollectiveOps(capsule_pointer(handle, None), server_def, len(server_def), status)
        code, message = library.TF_GetCode(status), library.TF_Message(status).decode()
        library.TF_DeleteStatus(status)
        if code:
            raise tf.errors.exception_type_from_error_code(code)(None, None, message)

    original = pywrap_tfe.TFE_EnableCollectiveOps
    pywrap_tfe.TFE_EnableCollectiveOps = enable_collective_ops
    try:
        yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = original
