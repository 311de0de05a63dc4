"""Towers, and the devices they compute on.

Call `make_towers(n)` once, before any other TensorFlow operation: TensorFlow fixes its devices at
first use.
"""

import contextlib
import dataclasses
import logging
import os
import subprocess
from collections.abc import Sequence

import tensorflow as tf

from cifar_towers import hardware
from cifar_towers.errors import count

log = logging.getLogger(__name__)

CPU_TOWERS_BY_DEFAULT = 2


@dataclasses.dataclass(frozen=True)
class Tower:
    """One copy of the forward and backward pass, on one device.

    A tower owns its shard, activations and gradients. It owns no weights: all towers read the same
    variables. Logical CPU devices share the cores of the machine, so several towers on them show
    the method and gain no speed.
    """

    index: int  # from 0
    device: str  # TensorFlow's name, such as `/GPU:0`

    @property
    def name(self) -> str:
        """The tower's name scope: `tower_0`, `tower_1`, ..."""
        return f"tower_{self.index}"


def make_towers(
    num_towers: int = 0, *, soft_placement: bool | None = True, multi_worker: bool = False
) -> list[Tower]:
    """Configure and initialize TensorFlow's devices for `num_towers` towers, and return the towers.

    If TensorFlow already runs, as in a notebook's second cell, its devices and their memory stay as
    they are.

    Args:
      num_towers: 0 means one for each GPU, or two on a machine without GPUs, or fewer if TensorFlow
        already runs with fewer devices.
      soft_placement: let logical devices stand in for missing GPUs, and let TensorFlow move an
        operation that has no kernel for its device. If false, either is an error. None: as it is,
        by default true.
      multi_worker: configure the devices of one worker of a cluster, whose CPU is a single tower,
        and leave their initialization to `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
      ValueError: GPUs are missing and soft placement is off.
      RuntimeError: TensorFlow is already running with too few devices.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if num_towers > len(gpus) and soft_placement is False:
        raise ValueError(
            f"{num_towers} towers need {num_towers} GPUs and this machine has {len(gpus)}; "
            "ask for fewer, or allow soft placement (leave out --nosoft_placement)"
        )

    device_type = "GPU" if gpus else "CPU"
    needed = num_towers or len(gpus) or (1 if multi_worker else CPU_TOWERS_BY_DEFAULT)
    with contextlib.suppress(RuntimeError):  # of a TensorFlow that already runs
        if soft_placement is not None:
            tf.config.set_soft_device_placement(soft_placement)
        if gpus:
            _divide_gpus(gpus, needed)
        else:
            _divide_cpu(needed)

    if not multi_worker:
        available = len(tf.config.list_logical_devices(device_type))  # initializes the devices
        if available < num_towers:
            raise RuntimeError(
                f"TensorFlow already runs with {available} {device_type} devices, too few for "
                f"{num_towers} towers; start a new process or restart the notebook, and ask for "
                "the most towers first, before any other TensorFlow operation"
            )
        needed = min(needed, available)

    if not gpus:
        towers = f"{count(needed, 'tower')} on logical CPU devices"
        log.info(f"no GPU here: {towers}; TF_CPP_MIN_LOG_LEVEL=0 shows what TensorFlow looked for")
    elif needed > len(gpus):
        log.info(f"{len(gpus)} GPUs for {needed} towers: they share them as logical devices")
    return [Tower(index, f"/{device_type}:{index}") for index in range(needed)]


def on_gpus(towers: Sequence[Tower]) -> bool:
    """Return whether towers compute on GPUs."""
    return any("GPU" in tower.device for tower in towers)


def _divide_cpu(num_towers: int) -> None:
    """Make the CPU one logical device per tower, and divide its cores.

    K towers on C cores have K operations at a time, of C/K threads each, instead of K x C threads.
    One tower has two operations at a time, of C threads.
    """
    cores = hardware.available_cores()
    tf.config.threading.set_inter_op_parallelism_threads(max(num_towers, min(2, cores)))
    tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // num_towers))

    cpu = tf.config.list_physical_devices("CPU")[0]
    device = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [device] * num_towers)


def _divide_gpus(gpus: Sequence[tf.config.PhysicalDevice], num_towers: int) -> None:
    """Make each GPU one logical device per tower on it, and hide the GPUs without a tower."""
    used = gpus[:num_towers]
    tf.config.set_visible_devices(used, "GPU")
    # neighbors share
    gpu_of_tower = [tower * len(used) // num_towers for tower in range(num_towers)]
    for index, gpu in enumerate(used):
        if num_towers > len(used):
            shares = gpu_of_tower.count(index)
            share = tf.config.LogicalDeviceConfiguration(_gpu_memory_mb(index) // shares)
            tf.config.set_logical_device_configuration(gpu, [share] * shares)
        elif not tf.config.get_logical_device_configuration(gpu):  # a divided GPU does not grow
            tf.config.experimental.set_memory_growth(gpu, True)


def _gpu_memory_mb(index: int) -> int:
    """Return nine tenths of a GPU's free memory in MB, as its driver reports it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index] if index < len(visible) and visible[index] else str(index)
    query = [
        "nvidia-smi",
        f"--id={name}",
        "--query-gpu=memory.free",
        "--format=csv,noheader,nounits",
    ]
    return int(subprocess.run(query, capture_output=True, timeout=10, check=True).stdout) * 9 // 10
