"""The hardware of this machine: processor features, GPUs, CUDA's libraries, and whether XLA runs.

TensorFlow is imported only where GPUs are asked for, so that a program can look at the processor first.
"""

import contextlib
import ctypes
import functools
import math
import os
import sys
from pathlib import Path
from typing import Any

CUDA_LIBRARIES = (  # of CUDA 12; TensorFlow's wheels open them
    *("libcudart.so.12", "libcublas.so.12", "libcufft.so.11", "libcurand.so.10", "libcusolver.so.11"),
    *("libcusparse.so.12", "libcudnn.so.9", "libnccl.so.2", "libcupti.so.12"),
)
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time and of the period they are for; Linux
NVIDIA_DRIVERS = Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1")  # the second: WSL


def processor_features() -> frozenset[str]:
    """Return the instruction sets of the first processor by their Linux names, such as `avx2`; empty elsewhere."""
    return frozenset(cpuinfo("flags", "Features").split())


@functools.cache
def cpuinfo(*fields: str) -> str:
    """Return the first value in Linux's /proc/cpuinfo of one of these fields, such as `vendor_id`; empty if none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), "")


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and by the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no quota
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def gpu_names() -> list[str]:
    """Return the product names of the visible GPUs, such as `NVIDIA A100-SXM4-40GB`."""
    return [details.get("device_name", "GPU") for details in _gpu_details()]


def gpu_compute_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of the visible GPUs, such as (8, 0); (0, 0) if the driver does not report it."""
    return [details.get("compute_capability", (0, 0)) for details in _gpu_details()]


def _gpu_details() -> list[dict[str, Any]]:
    import tensorflow as tf

    return [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.get_visible_devices("GPU")]


def xla_runs() -> bool:
    """Return whether XLA compiles for every visible GPU.

    On compute capability 10 and above, XLA of TensorFlow 2.21 ends the process (tensorflow/tensorflow#111958).
    """
    return all(capability < (10, 0) for capability in gpu_compute_capabilities())


def gpus_without_kernels() -> list[tuple[str, tuple[int, int]]]:
    """Return name and compute capability of each visible GPU that TensorFlow has no compiled kernels for."""
    import tensorflow as tf

    # sm_89: machine code alone; compute_90: machine code and PTX
    compiled = [name.split("_")[-1] for name in tf.sysconfig.get_build_info().get("cuda_compute_capabilities", ())]
    versions = [(int(name[:-1]), int(name[-1])) for name in compiled if name.isdecimal()]
    return [
        (name, (major, minor))
        for name, (major, minor) in zip(gpu_names(), gpu_compute_capabilities(), strict=True)
        if versions and not any(of == major and since <= minor for of, since in versions)
    ]


def has_nvidia_driver() -> bool:
    return any(path.exists() for path in NVIDIA_DRIVERS)


def missing_cuda_libraries() -> list[str]:
    """Return the CUDA libraries that neither the system nor pip's nvidia packages have."""
    return [name for name in CUDA_LIBRARIES if not _is_installed(name)]


def _is_installed(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return any(next(Path(entry, "nvidia").glob(f"*/lib/{library}"), None) for entry in sys.path)
    return True
