"""How towers and their micro-batches share a batch."""

import math

from cifar_towers.errors import UsageError

MAX_MICRO_BATCHES = 1024  # of a tower's shard


class BatchShares:
    """The part of `TrainConfig` that says what a tower gets of each batch."""

    batch_size: int
    hard_example_pool: int
    micro_batches: int
    parallelism: str
    batch_statistics: str

    def tower_batch_size(self, num_devices: int) -> int:
        """Examples of each step on each tower.

        Raises:
          UsageError: the towers and their micro-batches cannot have equal shares.
        """
        num_towers = num_devices if self.parallelism == "data" else 1
        if uneven := self._describe_uneven_shares(num_towers):
            raise UsageError(uneven)
        return self.batch_size // num_towers

    def default_num_towers(self, num_devices: int) -> tuple[int, str]:
        """(the largest number of towers with equal shares, the reason if it is smaller than `num_devices`)."""
        reason = self._describe_uneven_shares(num_devices)
        even = [towers for towers in range(1, num_devices) if not self._describe_uneven_shares(towers)]
        return (even[-1], reason) if reason and even and self.parallelism == "data" else (num_devices, "")

    def suggest_smaller_micro_batches(self, num_devices: int) -> str:
        """Flags for micro-batches of at most half the size; empty if there are none."""
        shard = self.tower_batch_size(num_devices)
        divisible = math.gcd(shard, self.hard_example_pool * shard // self.batch_size)
        counts = range(2 * self.micro_batches, min(divisible, MAX_MICRO_BATCHES) + 1)
        count = next((count for count in counts if divisible % count == 0), None)
        unsynchronized = " --batch_statistics=mean" if self.batch_statistics == "synchronized" else ""
        return f"--micro_batches={count}{unsynchronized}" if count else ""

    def _describe_uneven_shares(self, num_towers: int) -> str:
        """Which size these towers cannot share evenly, and the nearest ones that they can; empty if they can."""
        shares = num_towers * self.micro_batches
        for name, minimum in (("batch_size", 0), ("hard_example_pool", self.batch_size)):
            size = getattr(self, name)
            if size % shares:
                low = size // shares * shares
                nearest = " and ".join(str(size) for size in (low, low + shares) if size > minimum)
                towers = f"{num_towers} tower{'s' * (num_towers > 1)}"
                towers += f" in {self.micro_batches} micro-batches each" if self.micro_batches > 1 else ""
                return f"{name}={size} cannot be shared by {towers}; {nearest} can"
        return ""
