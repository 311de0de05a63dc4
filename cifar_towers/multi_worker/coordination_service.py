"""The parts of TensorFlow's coordination service that have no public API, as TensorFlow 2.21 has them.

The service runs in worker 0's TensorFlow server. It finds workers that died or stopped by their heartbeats, and aborts
the collectives of all others with an error that names them.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

HEARTBEAT_TIMEOUT_SECONDS = 10  # a worker that is silent for so long is lost
JOB = "worker"


def configure(num_workers: int) -> None:
    """Enable the service, with its heartbeats, for the strategy that is made next."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{JOB}/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_TIMEOUT_SECONDS,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name=JOB, num_tasks=num_workers)],
    )


def broadcast(name: str, value: str | None) -> str:
    """Return the value of worker 0 on all workers; the others pass None."""
    if value is not None:
        context.context().set_config_key_value(name, value)
    return context.context().get_config_key_value(name, 1000 * HEARTBEAT_TIMEOUT_SECONDS)


def report_error(message: str) -> None:
    """Abort the collectives of all workers with this message, unless this worker is cut off."""
    with contextlib.suppress(tf.errors.OpError, ValueError):
        context.context().report_error_to_cluster(tf.errors.ABORTED, message)


@contextlib.contextmanager
def startup_in_threads() -> Iterator[None]:
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
