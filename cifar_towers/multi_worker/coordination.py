"""Coordination of a cluster's workers outside the step: how they meet, exchange values, and end
together.

Everything travels through TensorFlow's server, one port for each worker. Values are gathered by a
collective. When a worker dies, stops or fails, TensorFlow's coordination service aborts the
collectives of all others. Then every worker exits with a line that names the lost one, because a
worker that restarted alone would be at another step than the others. The launcher restarts all
workers, and they resume from the last checkpoint.
"""

import contextlib
import dataclasses
import math
import pickle
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from cifar_towers.errors import Interrupted, RunError, WorkerLostError, error_line, printable
from cifar_towers.multi_worker.cluster_spec import ALONE, Workers

JOIN_TIMEOUT_SECONDS = 60  # for the last worker to come
HEARTBEAT_TIMEOUT_SECONDS = 10  # a worker that is silent for so long is lost
# for an error to reach the other workers before this one closes its connections
EXIT_GRACE_SECONDS = 1.0
JOB = "worker"

# What errors of TensorFlow say about other workers.
# "exit code 5: worker 1 of 2 ended: ...": what `_report_error` sent
END = re.compile(r"exit code (\d+): ([^\n]*)")
# "... timed out task names:\n/job:worker/replica:0/task:1\n": who did not join
ABSENT = re.compile(r"timed out task names:\n((?:/job:\S+\n)+)")
# "... /job:worker/replica:0/task:1 ...": who was lost
TASK = re.compile(rf"/job:{JOB}/(?:replica:0/)?task:(\d+)")
# "... /tensorflow.CoordinationService/Heartbeat ...": who no longer reaches worker 0
SERVICE = "/tensorflow.CoordinationService/"


@contextlib.contextmanager
def connect(
    cluster: Workers | None, make_devices: Callable[[], Any]
) -> Iterator[tuple[Workers, Any]]:
    """Join the workers of a cluster, or work alone without one. An error of one worker ends all
    with the same line.

    Yield the workers, and what `make_devices` returned: first the strategy that joins all workers.
    The last worker has `JOIN_TIMEOUT_SECONDS` to come.

    Raises:
      WorkerLostError: a worker did not come in time, or was lost later.
      RunError: another worker ended with an error; with its exit code.
    """
    if not cluster:
        yield ALONE, make_devices()
        return
    try:
        cluster.log("waits for the other workers")
        _configure_service(cluster.size)
        devices = make_devices()
        workers = dataclasses.replace(cluster, gather=_make_gather(devices[0]))
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


def _explain(cluster: Workers, error: BaseException) -> RunError | None:
    """Return how another worker ended, if an error of TensorFlow's, or its cause, is about that;
    otherwise None.
    """
    failure = error if isinstance(error, tf.errors.OpError) else error.__cause__
    if not isinstance(failure, tf.errors.OpError):
        return None
    text = str(failure)
    end = END.search(text)
    if end:
        exit_code = int(end[1])
        is_lost = exit_code == WorkerLostError.exit_code
        ended = WorkerLostError(end[2]) if is_lost else RunError(end[2])
        ended.exit_code = exit_code
        return ended

    absent = ABSENT.search(text)
    if absent:
        names = ", ".join(cluster.name(int(index)) for index in TASK.findall(absent[1]))
        return WorkerLostError(
            f"{names} did not join; start it with the same addresses and its index in TF_CONFIG"
        )

    index = _find_worker(text)
    if index is None or index >= cluster.size:
        return None
    # others may say of this worker that they cannot reach it
    if index == cluster.index and "failed to connect" not in text:
        return None
    if "OOM when allocating" in text:
        return RunError(f"{cluster.name(index)} ran out of memory")
    silent = "heartbeat" in text
    reason = f"sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS} s" if silent else "was lost"
    return WorkerLostError(
        f"{cluster.name(index)} {reason}; start all workers again to resume from the last "
        "checkpoint, unless `cifar-towers launch` restarts them"
    )


def _find_worker(text: str) -> int | None:
    """Return the index of the worker that an error names, or None."""
    task = TASK.search(text)
    if task:
        return int(task[1])
    # the coordination service runs in worker 0
    return 0 if SERVICE in text else None


# Values -------------------------------------------------------------------------------------------


def _make_gather(strategy: tf.distribute.Strategy) -> Callable[[Any], list]:
    """Return a function that gathers a value from every worker; it returns the list in the order of
    the workers.

    All replicas take part in the all-gather. The first replica of a worker sends the worker's
    value, the others send nothing.

    Values travel pickled, in words of 64 bits, because GPUs exchange no bytes. Pickle adds no
    danger: who can send to these ports can run code there anyway.
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
        num_words = math.ceil(len(content) / 8)
        words = np.frombuffer(content.ljust(8 * num_words, b"\0"), np.int64)
        # every replica has the same two results
        joined, sizes = gather(words)
        joined = strategy.experimental_local_results(joined)[0]
        sizes = strategy.experimental_local_results(sizes)[0]
        parts = tf.split(joined, sizes)[::num_local]
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    return gather_values


# TensorFlow's coordination service: these parts of TensorFlow 2.21 have no public API -------------


def _configure_service(num_workers: int) -> None:
    """Enable the service, with its heartbeats, for the strategy that is made next, which waits for
    all workers.
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{JOB}/replica:0/task:0",
        cluster_register_timeout_in_ms=1000 * JOIN_TIMEOUT_SECONDS,
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_TIMEOUT_SECONDS,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name=JOB, num_tasks=num_workers)],
    )
    # its error names who is missing
    context.context().coordination_service.cluster_register_with_barrier = True


def _report_error(message: str) -> None:
    """Abort the collectives of all workers with this message, unless this worker is cut off."""
    with contextlib.suppress(tf.errors.OpError, ValueError):
        context.context().report_error_to_cluster(tf.errors.ABORTED, message)
