"""The hardware of this machine, and TensorFlow, which is imported late: a wrong setting is refused
before.
"""

import contextlib
import functools
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cifar_towers.errors import UsageError

log = logging.getLogger(__name__)

BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # of processors
# of processors; kernels are chosen by them, and each kernel rounds its own way
VECTOR_FEATURES = BFLOAT16_FEATURES | {"avx2", "avx512f", "avx512_vnni", "amx_tile", "sve"}
# microseconds of CPU time and of the period they are for; Linux
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def processor_features() -> frozenset[str]:
    """Return the instruction sets of the first processor by their Linux names, such as `avx2`;
    empty elsewhere.
    """
    return frozenset(cpuinfo("flags", "Features").split())


def processor_name() -> str:
    """Return what the processor, or else its architecture, is called."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def describe_processor() -> str:
    """Return the processor's name and the instruction sets that kernels are chosen by."""
    return " ".join([processor_name(), *sorted(processor_features() & VECTOR_FEATURES)])


@functools.cache
def cpuinfo(*fields: str) -> str:
    """Return the first value in Linux's /proc/cpuinfo of one of these fields, such as `vendor_id`;
    empty if none.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), "")


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and by the CPU quota of its
    container.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):  # no quota
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def gpu_names() -> list[str]:
    """Return the product names of the visible GPUs, such as `NVIDIA A100-SXM4-40GB`."""
    return [details.get("device_name", "GPU") for details in _gpu_details()]


def gpu_compute_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of the visible GPUs, such as (8, 0); (0, 0) if the driver
    does not report it.
    """
    return [details.get("compute_capability", (0, 0)) for details in _gpu_details()]


def _gpu_details() -> list[dict[str, Any]]:
    import tensorflow as tf

    return [
        tf.config.experimental.get_device_details(gpu)
        for gpu in tf.config.get_visible_devices("GPU")
    ]


def xla_runs() -> bool:
    """Return whether XLA compiles for every visible GPU.

    On compute capability 10 and above, XLA of TensorFlow 2.21 ends the process
    (tensorflow/tensorflow#111958).
    """
    return all(capability < (10, 0) for capability in gpu_compute_capabilities())


def choose_precision(setting: str, device: str, trained_in: str = "") -> str:
    """Return `float32`, or `bfloat16`, for a value of `--precision` and a kind of device, and log
    why.

    `auto` is float32 for a run that was `trained_in` it. Otherwise it is bfloat16 where that is
    native and faster: GPUs of compute capability 8.0 or more, processors with AMX, AVX512-BF16 or
    Arm's BF16. It is float32 elsewhere, where bfloat16 is emulated and slow, and on Intel's
    processors with AVX512-BF16 alone, where bfloat16 has the rate of float32.
    """
    features = processor_features() & BFLOAT16_FEATURES
    if setting != "auto":
        chosen = setting
        reason = "as asked"
    elif trained_in == "float32":
        chosen = "float32"
        reason = "the run was trained in it"
    elif "GPU" in device:
        is_native = min(gpu_compute_capabilities(), default=(0, 0)) >= (8, 0)  # the weakest decides
        chosen = "bfloat16" if is_native else "float32"
        reason = "the GPU computes it natively" if is_native else "the GPU has no bfloat16"
    elif cpuinfo("vendor_id") == "GenuineIntel" and features == {"avx512_bf16"}:
        chosen = "float32"
        reason = "on Intel's processors without AMX, bfloat16 is no faster"
    elif features:
        chosen = "bfloat16"
        reason = f"the processor has {', '.join(sorted(features))}"
    else:
        chosen = "float32"
        reason = "the processor has no bfloat16 of its own"
    log.info("precision %s: %s", chosen, reason)
    return chosen


@contextlib.contextmanager
def _stderr_held_back() -> Iterator[None]:
    """Drop what any library writes to the process's standard error inside. If the block ends with
    an exception, or the process is ended in it, a child process writes it out.

    TensorFlow's libraries write lines before they read their log level.
    """
    # in memory: in a container, no directory may be writable
    with open(os.memfd_create("stderr"), "w+b") as held_back:
        stderr = os.dup(2)
        outcome, success = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(success)
                if not os.read(outcome, 1):  # the parent has closed its end, or is gone
                    held_back.seek(0)
                    os.write(stderr, held_back.read())
            finally:
                os._exit(0)

        os.close(outcome)
        os.dup2(held_back.fileno(), 2)
        try:
            yield
            os.write(success, b"1")
        finally:
            os.close(success)
            os.waitpid(child, 0)
            os.dup2(stderr, 2)
            os.close(stderr)


@contextlib.contextmanager
def tensorflow_imported() -> Iterator[None]:
    """Import TensorFlow, which takes seconds, with the settings of Keras that towers need; restore
    these at the end.

    Raises:
      UsageError: Keras has another backend.
    """
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        print("importing TensorFlow ...", end="\r", file=sys.stderr, flush=True)
    is_first = "tensorflow" not in sys.modules
    # as `cifar_towers/__init__.py` sets it
    is_quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "3"
    holds_back = is_first and is_quiet and hasattr(os, "memfd_create")  # on Linux
    with _stderr_held_back() if holds_back else contextlib.nullcontext():
        import keras
        import tensorflow as tf

    if is_terminal:
        print("\033[K", end="", file=sys.stderr, flush=True)
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise UsageError(f"Keras has the backend {backend}; towers need KERAS_BACKEND=tensorflow")
    tf.get_logger().setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)  # some of its modules log here
    floatx = keras.config.floatx()
    image_data_format = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_last")  # whatever the user's keras.json says
    keras.config.set_floatx("float32")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_image_data_format(image_data_format)
