"""Set-up of a run's devices: the towers of this machine or of a cluster, and the precision they compute in."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.config import DeviceConfig, TrainConfig
from cifar_towers.errors import UsageError
from cifar_towers.hardware import cpuinfo, gpu_compute_capabilities, processor_features
from cifar_towers.multi_worker.cluster_spec import Workers
from cifar_towers.towers import Tower, make_towers
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT
from cifar_towers.training.distributed_step import make_multi_worker_strategy, towers_here

log = logging.getLogger(__name__)

BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # of processors


class Devices(NamedTuple):
    """The towers of a run, and what they compute in."""

    strategy: tf.distribute.Strategy | None  # of a cluster
    towers: Sequence[Tower]  # those of all workers
    local_towers: Sequence[Tower]  # those of this process
    precision: str


def setup_devices(config: TrainConfig, cluster: Workers | None = None) -> Devices:
    """Set up the towers that a config asks for, on this machine or on those of a cluster; choose the precision.

    With a cluster the call waits for all workers.

    Raises:
      UsageError: the machine cannot have the towers, or they cannot share the batch evenly.
    """
    if cluster:
        options = _device_options(config)
        try:
            strategy, towers = make_multi_worker_strategy(cluster.addresses, cluster.index, config.num_gpus, **options)
        except ValueError as error:
            raise UsageError(str(error)) from error
    else:
        strategy, towers = None, setup_towers(config, _choose_num_towers(config))
    config.check_shares(len(towers))
    local_towers = towers_here(strategy, towers) if strategy else towers
    return Devices(strategy, towers, local_towers, choose_precision(config.precision, local_towers))


def setup_towers(config: DeviceConfig, num_towers: int = 0) -> list[Tower]:
    """Set up `num_towers` towers, by default as many as a config asks for, on this machine.

    Raises:
      UsageError: this machine cannot have them.
    """
    try:
        return make_towers(num_towers or config.num_gpus, **_device_options(config))
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error


def _choose_num_towers(config: TrainConfig) -> int:
    """Return the number of towers to request; 0: one per device. Log the reason if the batch limits the number."""
    num_devices = len(tf.config.get_visible_devices("GPU")) or CPU_TOWERS_BY_DEFAULT
    fitting, why = config.default_num_towers(num_devices)
    if config.num_gpus or fitting == num_devices:
        return config.num_gpus
    if why:
        log.info(f"{fitting} of {num_devices} towers: {why}")
    return fitting


def _device_options(config: DeviceConfig) -> dict:
    """Make TensorFlow deterministic if the config asks for it; return the options of `make_towers`."""
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    names = ("soft_placement", "gpu_memory_limit_mb")
    return {name: getattr(config, name) for name in names}


def choose_precision(setting: str, towers: Sequence[Tower], trained_in: str = "") -> str:
    """Return the precision for a value of `--precision`, and log why. A run `trained_in` float32 stays in float32."""
    chosen, reason = resolve_precision(setting, towers[0].device)
    if setting == "auto" and trained_in == "float32":
        chosen, reason = trained_in, "the run was trained in it"
    log.info("precision %s: %s", chosen, reason)
    return chosen


def resolve_precision(setting: str, device: str) -> tuple[str, str]:
    """Return (`float32` or `bfloat16`, the reason) for a value of `--precision` and a kind of device.

    `auto` is bfloat16 where that is native and faster: GPUs of compute capability 8.0 or more, processors with AMX,
    AVX512-BF16 or Arm's BF16. It is float32 elsewhere, where bfloat16 is emulated and slow, and on Intel's processors
    with AVX512-BF16 alone, where bfloat16 has the rate of float32.
    """
    if setting != "auto":
        return setting, "as asked"
    if "GPU" in device:
        if min(gpu_compute_capabilities(), default=(0, 0)) >= (8, 0):  # the weakest decides
            return "bfloat16", "the GPU computes it natively"
        return "float32", "the GPU has no bfloat16"
    features = processor_features() & BFLOAT16_FEATURES
    if cpuinfo("vendor_id") == "GenuineIntel" and features == {"avx512_bf16"}:
        return "float32", "on Intel's processors without AMX, bfloat16 is no faster"
    if features:
        return "bfloat16", f"the processor has {', '.join(sorted(features))}"
    return "float32", "the processor has no bfloat16 of its own"
