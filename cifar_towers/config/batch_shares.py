"""Equal shares of a batch for towers and their micro-batches."""

import math
from typing import TYPE_CHECKING

from cifar_towers.errors import UsageError

if TYPE_CHECKING:
    from cifar_towers.config.train_config import TrainConfig

MAX_MICRO_BATCHES = 1024  # of a tower's shard


def tower_batch_size(config: "TrainConfig", num_devices: int) -> int:
    """Examples of each step on each tower.

    Raises:
      UsageError: the towers and their micro-batches cannot have equal shares.
    """
    num_towers = num_devices if config.parallelism == "data" else 1
    if uneven := describe_uneven_shares(config, num_towers):
        raise UsageError(uneven)
    return config.batch_size // num_towers


def default_num_towers(config: "TrainConfig", num_devices: int) -> tuple[int, str]:
    """(the largest number of towers with equal shares, the reason if it is smaller than `num_devices`)."""
    reason = describe_uneven_shares(config, num_devices)
    even = [towers for towers in range(1, num_devices) if not describe_uneven_shares(config, towers)]
    return (even[-1], reason) if reason and even and config.parallelism == "data" else (num_devices, "")


def suggest_smaller_micro_batches(config: "TrainConfig", num_devices: int) -> str:
    """Flags for micro-batches of at most half the size; empty if there are none."""
    shard = config.tower_batch_size(num_devices)
    divisible = math.gcd(shard, config.hard_example_pool * shard // config.batch_size)
    counts = range(2 * config.micro_batches, min(divisible, MAX_MICRO_BATCHES) + 1)
    count = next((count for count in counts if divisible % count == 0), None)
    unsynchronized = " --batch_statistics=mean" if config.batch_statistics == "synchronized" else ""
    return f"--micro_batches={count}{unsynchronized}" if count else ""


def describe_uneven_shares(config: "TrainConfig", num_towers: int) -> str:
    """Which size these towers cannot share evenly, and the nearest ones that they can; empty if they can."""
    shares = num_towers * config.micro_batches
    for name, minimum in (("batch_size", 0), ("hard_example_pool", config.batch_size)):
        size = getattr(config, name)
        if size % shares:
            low = size // shares * shares
            nearest = " and ".join(str(size) for size in (low, low + shares) if size > minimum)
            towers = f"{num_towers} tower{'s' * (num_towers > 1)}"
            towers += f" in {config.micro_batches} micro-batches each" if config.micro_batches > 1 else ""
            return f"{name}={size} cannot be shared by {towers}; {nearest} can"
    return ""
