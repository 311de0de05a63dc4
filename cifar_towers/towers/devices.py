"""The device each tower computes on.

Call `make_towers(n)` once, before any other TensorFlow operation: TensorFlow fixes its devices at first use.
"""

import contextlib
import ctypes
import functools
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

log = logging.getLogger(__name__)

CPU_TOWERS_BY_DEFAULT = 2
CUDA_LIBRARIES = (  # that TensorFlow's wheels open, of CUDA 12
    *("libcudart.so.12", "libcublas.so.12", "libcufft.so.11", "libcurand.so.10", "libcusolver.so.11"),
    *("libcusparse.so.12", "libcudnn.so.9", "libnccl.so.2", "libcupti.so.12"),
)
NVIDIA_DRIVERS = Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1")  # the second: WSL


class Tower(NamedTuple):
    """One copy of the forward and backward pass, on one device."""

    index: int
    device: str

    @property
    def name(self) -> str:
        """The tower's name scope: `tower_0`, `tower_1`, ..."""
        return f"tower_{self.index}"


class DevicePlan(NamedTuple):
    """The devices that K towers use."""

    kind: str  # "GPU" or "CPU"
    physical: tuple[int, ...]  # [K] index of each tower's physical device
    note: str  # why towers share devices; empty when every tower has a GPU of its own


def on_gpus(towers: Sequence[Tower]) -> bool:
    """Whether towers compute on GPUs."""
    return any("GPU" in tower.device for tower in towers)


def make_towers(
    num_towers: int = 0,
    *,
    soft_placement: bool = True,
    gpu_memory_growth: bool = True,
    gpu_memory_limit_mb: int = 0,
    intra_op_threads: int = 0,
) -> list[Tower]:
    """Initializes TensorFlow's devices for `num_towers` towers and returns the towers.

    Args:
      num_towers: 0 means one for each GPU, or two on the CPU where there is no GPU.
      soft_placement: use logical devices for missing GPUs, and run operations without a kernel on their device
        elsewhere. If false, either is an error.
      gpu_memory_growth: allocate GPU memory as it is needed, not all at once.
      gpu_memory_limit_mb: limit for each GPU, in MB; 0 for none.
      intra_op_threads: threads inside one operation; 0 divides the cores by the CPU towers.

    Raises:
      ValueError: GPUs are missing and soft placement is off, or the devices cannot be divided.
      RuntimeError: TensorFlow is already running with too few devices.
    """
    plan = plan_devices(num_towers, len(tf.config.get_visible_devices("GPU")), soft_placement)
    prepare_devices(plan, soft_placement, gpu_memory_growth, gpu_memory_limit_mb, intra_op_threads)
    available, needed = len(tf.config.list_logical_devices(plan.kind)), len(plan.physical)
    if available < needed:
        raise RuntimeError(
            f"TensorFlow already runs with {available} {plan.kind} devices, too few for {needed} towers: "
            "call make_towers before any other TensorFlow operation"
        )
    _log_plan(plan)
    return [Tower(index, f"/{plan.kind}:{index}") for index in range(needed)]


def prepare_devices(
    plan: DevicePlan,
    soft_placement: bool = True,
    gpu_memory_growth: bool = True,
    gpu_memory_limit_mb: int = 0,
    intra_op_threads: int = 0,
) -> None:
    """Configures the devices of a plan without initializing them; arguments as of `make_towers`."""
    with contextlib.suppress(RuntimeError):  # already initialized, as in a notebook's second cell
        tf.config.set_soft_device_placement(soft_placement)
        _set_threads(plan, intra_op_threads)
        if plan.kind == "GPU":
            _divide_gpus(tf.config.get_visible_devices("GPU"), plan, gpu_memory_growth, gpu_memory_limit_mb)
        else:
            cpu, parts = tf.config.list_physical_devices("CPU")[0], len(plan.physical)
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * parts)


def plan_devices(num_towers: int, num_gpus: int, soft_placement: bool = True) -> DevicePlan:
    """Assigns `num_towers` towers to `num_gpus` physical GPUs, or to the CPU where there is none.

    >>> plan_devices(4, 2).physical
    (0, 0, 1, 1)
    >>> plan_devices(3, 0).kind
    'CPU'
    """
    count = num_towers or num_gpus or CPU_TOWERS_BY_DEFAULT
    if num_towers > num_gpus and not soft_placement:
        have = ", ".join(f"/GPU:{i}" for i in range(num_gpus)) or "only /CPU:0"
        raise ValueError(
            f"{num_towers} towers need {num_towers} GPUs and this machine has {have}; "
            "ask for fewer or allow soft placement"
        )
    if num_gpus == 0:
        return DevicePlan("CPU", (0,) * count, f"no GPU here: {count} tower{'s' * (count > 1)} on logical CPU devices")
    note = f"{num_gpus} GPUs for {count} towers: they share them as logical devices" if count > num_gpus else ""
    return DevicePlan("GPU", tuple(i * num_gpus // count if count > num_gpus else i for i in range(count)), note)


def _log_plan(plan: DevicePlan) -> None:
    if plan.note:
        log.info(plan.note)
    if plan.kind == "GPU":
        _log_uncompiled_kernels()
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1") and any(map(Path.exists, NVIDIA_DRIVERS)):
        missing = [name for name in CUDA_LIBRARIES if not _is_installed(name)]
        log.warning(
            "an NVIDIA driver is installed, but TensorFlow has no GPU: "
            + (
                f"it does not find {', '.join(missing)}; type pip install 'tensorflow[and-cuda]'"
                if missing
                else "set TF_CPP_MIN_LOG_LEVEL=0 to see why, as CUDA's libraries are there"
            )
        )


def _is_installed(library: str) -> bool:
    """Whether the system or one of pip's nvidia packages has a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return any(next(Path(entry, "nvidia").glob(f"*/lib/{library}"), None) for entry in sys.path)
    return True


def _log_uncompiled_kernels() -> None:
    """Warns of GPUs that TensorFlow has no compiled kernels for."""
    compiled = [name.removeprefix("sm_") for name in tf.sysconfig.get_build_info().get("cuda_compute_capabilities", ())]
    compiled = [(int(name[:-1]), int(name[-1])) for name in compiled if name.isdecimal()]
    for name, (major, minor) in zip(gpu_names(), gpu_compute_capabilities(), strict=True):
        if compiled and not any(of == major and since <= minor for of, since in compiled):
            log.warning(
                f"{name} has compute capability {major}.{minor}, for which TensorFlow has no compiled kernels: the "
                "driver compiles them at the first start, for minutes up to half an hour; later starts find them"
            )


def _set_threads(plan: DevicePlan, intra_op_threads: int) -> None:
    """K towers on C cores get C/K threads an operation and K operations at a time, not K x C threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    towers = len(plan.physical)
    if plan.kind == "CPU":
        tf.config.threading.set_inter_op_parallelism_threads(max(towers, min(2, cores)))
        intra_op_threads = intra_op_threads or max(1, cores // towers)
    if intra_op_threads:
        tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)


def _divide_gpus(gpus, plan: DevicePlan, growth: bool, limit_mb: int) -> None:
    used = gpus[: max(plan.physical) + 1]
    tf.config.set_visible_devices(used, "GPU")
    divide = limit_mb or len(plan.physical) > len(used)
    for index, gpu in enumerate(used):
        if divide:
            shares = plan.physical.count(index)
            share = tf.config.LogicalDeviceConfiguration((limit_mb or _gpu_memory_mb(index)) // shares)
            tf.config.set_logical_device_configuration(gpu, [share] * shares)
        else:  # TensorFlow does not allow growth where any GPU is divided
            tf.config.experimental.set_memory_growth(gpu, growth)


def _gpu_memory_mb(index: int) -> int:
    """Nine tenths of a GPU's free memory, as its driver reports it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index] if index < len(visible) and visible[index] else str(index)
    query = ["nvidia-smi", f"--id={name}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return int(answer.stdout) * 9 // 10
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"several towers on /GPU:{index} need a share of its memory, and the driver does not report it; "
            "set gpu_memory_limit_mb"
        ) from error


def gpu_names() -> list[str]:
    """Product names of the visible GPUs, as `NVIDIA A100-SXM4-40GB`."""
    gpus = tf.config.get_visible_devices("GPU")
    return [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]


def gpu_compute_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the visible GPUs, as (8, 0); (0, 0) where the driver does not say."""
    gpus = tf.config.get_visible_devices("GPU")
    return [tf.config.experimental.get_device_details(gpu).get("compute_capability", (0, 0)) for gpu in gpus]


def xla_runs() -> bool:
    """Whether XLA compiles for every visible GPU: TensorFlow 2.21's ends the process on compute capability 10 and above
    (tensorflow/tensorflow#111958)."""
    return all(capability < (10, 0) for capability in gpu_compute_capabilities())


def processor_features() -> frozenset[str]:
    """Instruction sets of the first processor by their Linux names, as `avx2`; empty on other systems."""
    return frozenset(cpuinfo("flags", "Features").split())


@functools.cache
def cpuinfo(*fields: str) -> str:
    """What Linux says of the first processor under one of these fields, as `vendor_id`; empty if nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), "")
