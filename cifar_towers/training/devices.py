"""This machine's devices as the flags ask for them: its towers, those of a cluster, and what they compute in."""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.config import DeviceConfig, TrainConfig, parse_shares
from cifar_towers.config.train_config import MAX_MICRO_BATCHES
from cifar_towers.errors import UsageError, error_text
from cifar_towers.towers import Tower, make_towers
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT
from cifar_towers.towers.sharding import share_out
from cifar_towers.training import precision
from cifar_towers.training.distributed_step import make_multi_worker_strategy, towers_here

log = logging.getLogger(__name__)


class Devices(NamedTuple):
    """The towers of a run, and the strategy of a cluster."""

    strategy: tf.distribute.Strategy | None
    towers: Sequence[Tower]  # those of all workers
    local_towers: Sequence[Tower]  # those of this process


def setup_devices(config: TrainConfig, cluster=None) -> Devices:
    """The towers the config asks for, on this machine or, with a `ClusterSpec`, on those of all its workers.

    Raises:
      UsageError: the machine cannot have them, or they cannot share the batch equally.
    """
    if cluster:
        strategy, towers = setup_cluster(config, cluster.addresses, cluster.index)
        devices = Devices(strategy, towers, towers_here(strategy, towers))
    else:
        towers = setup_towers(config)
        devices = Devices(None, towers, towers)
    config.check_shares(len(devices.towers))
    return devices


def setup_towers(config: DeviceConfig) -> list[Tower]:
    """The towers a config asks for; where it names no number, as many as can share its batch, and says if these are
    fewer than there might be.

    Raises:
      UsageError: this machine cannot have them.
    """
    count = config.num_gpus
    if not count:
        devices = len(tf.config.get_visible_devices("GPU")) or CPU_TOWERS_BY_DEFAULT
        fitting, why = config.default_num_towers(devices)
        if fitting != devices:
            count = fitting
        if why:
            log.info(f"{fitting} of {devices} towers: {why}")
    return _open(config, lambda **options: make_towers(count, **options))


def setup_cluster(
    config: TrainConfig, addresses: Sequence[str], index: int
) -> tuple[tf.distribute.Strategy, list[Tower]]:
    """The strategy that joins a cluster's workers, and the towers of all of them; waits until all have come here.

    Raises:
      UsageError: this machine has no devices for its part.
    """
    return _open(
        config,
        lambda **options: make_multi_worker_strategy(addresses, index, config.num_gpus, config.all_reduce, **options),
    )


def _open(config: DeviceConfig, make: Callable):
    """What `make` makes of this machine's devices, set up as the flags say."""
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    names = ("soft_placement", "gpu_memory_growth", "gpu_memory_limit_mb", "intra_op_threads")
    try:
        return make(**{name: getattr(config, name) for name in names})
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def explained_errors(config: TrainConfig, towers: Sequence[Tower]) -> Iterator[None]:
    """Turns TensorFlow's errors for what a device cannot do into one line with what to type instead.

    Raises:
      UsageError: a device's memory is too small, or an operation has no deterministic form.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if reason := describe_out_of_memory(error):
            advice = "a smaller --batch_size, which is another run, may fit"
            if smaller := suggest_smaller_micro_batches(config, len(towers)):
                advice = f"the same command with {smaller} takes each tower's share in smaller parts, and resumes from "
                advice += "the last checkpoint where the net has no batch normalization"
            raise UsageError(f"{reason}: the memory is too small for this; {advice}") from error
        if not (config.deterministic and isinstance(error, tf.errors.UnimplementedError)):
            raise
        raise UsageError(
            f"{error_text(error)}: train without --deterministic, or without what has no such form"
        ) from error


def shard_sizes(config: TrainConfig, num_towers: int, examples: int = 0) -> list[int]:
    """Return [K], the number of examples that each tower takes of `examples`, by default of a batch."""
    shares = parse_shares(config.tower_shares) or [1] * num_towers
    return share_out(examples or config.batch_size, shares, config.micro_batches or 1)


def smaller_micro_batches(config: TrainConfig, num_devices: int) -> int:
    """Return the smallest number of micro-batches that at least halves their size; 0 if there is none."""
    num_towers = num_devices if config.parallelism == "data" else 1
    sizes = shard_sizes(config, num_towers)
    if config.hard_example_pool:
        sizes += shard_sizes(config, num_towers, config.hard_example_pool)
    divisible = math.gcd(*sizes)
    counts = range(2 * config.micro_batches, min(divisible, MAX_MICRO_BATCHES) + 1)
    return next((count for count in counts if divisible % count == 0), 0)


def suggest_smaller_micro_batches(config: TrainConfig, num_devices: int) -> str:
    """Return flags for micro-batches of at most half the size; empty if there are none."""
    count = smaller_micro_batches(config, num_devices) if config.micro_batches else 0  # auto has tried them
    unsynchronized = " --batch_statistics=mean" if config.batch_statistics == "synchronized" else ""
    return f"--micro_batches={count}{unsynchronized}" if count else ""


def describe_out_of_memory(error: tf.errors.OpError) -> str:
    """What did not fit into the memory, on one line; empty if the error has another reason."""
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return error_text(re.search(r"OOM when.*?\]|$", error.message, re.S)[0] or error)
    if isinstance(error, tf.errors.AbortedError) and "Status: 1," in error.message:  # oneDNN's for no memory
        return "oneDNN has no memory for an operation"
    return ""


def choose_precision(setting: str, towers: list[Tower]) -> str:
    """`float32`, `bfloat16` or `float16`; says what it took and why."""
    chosen, reason = precision.choose(setting, towers[0].device)
    log.info("precision %s: %s", chosen, reason)
    return chosen
