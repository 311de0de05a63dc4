"""The device each tower computes on.

Call `make_towers(n)` once, before any other TensorFlow operation: TensorFlow fixes its devices at first use.
"""

import contextlib
import logging
import os
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from cifar_towers import hardware

log = logging.getLogger(__name__)

CPU_TOWERS_BY_DEFAULT = 2


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
        for name, (major, minor) in hardware.gpus_without_kernels():
            log.warning(
                f"{name} has compute capability {major}.{minor}, for which TensorFlow has no compiled kernels: the "
                "driver compiles them at the first start, for minutes up to half an hour; later starts find them"
            )
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1") and hardware.has_nvidia_driver():
        missing = hardware.missing_cuda_libraries()
        log.warning(
            "an NVIDIA driver is installed, but TensorFlow has no GPU: "
            + (
                f"it does not find {', '.join(missing)}; type pip install 'tensorflow[and-cuda]'"
                if missing
                else "set TF_CPP_MIN_LOG_LEVEL=0 to see why, as CUDA's libraries are there"
            )
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
