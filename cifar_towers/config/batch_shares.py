"""How towers and their micro-batches share a batch."""

import math

from cifar_towers.errors import UsageError

MAX_MICRO_BATCHES = 1024  # of a tower's shard


def parse_shares(text: str) -> list[float]:
    """`"3,1"` -> [3.0, 1.0]; empty if the text is, or is `auto`.

    Raises:
      UsageError: it is no list of positive numbers.
    """
    if text in ("", "auto"):
        return []
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share < math.inf for share in shares):
        raise UsageError(f"tower_shares={text} must be positive numbers, one a tower, as 3,1; or auto")
    return shares


class BatchShares:
    """The part of `TrainConfig` that says what a tower gets of each batch."""

    batch_size: int
    hard_example_pool: int
    micro_batches: int
    parallelism: str
    batch_statistics: str
    tower_shares: str

    def check_shares(self, num_devices: int) -> None:
        """Checks that the towers on so many devices, and their micro-batches, can share a batch.

        Raises:
          UsageError: they cannot share it equally, or as `tower_shares` says.
        """
        num_towers = num_devices if self.parallelism == "data" else 1
        if self.tower_shares == "auto":
            return
        if not self.tower_shares:
            if uneven := self._describe_uneven_shares(num_towers):
                raise UsageError(uneven)
            return
        count = len(parse_shares(self.tower_shares))
        if count != num_towers:
            raise UsageError(f"tower_shares={self.tower_shares} are of {count} towers, and there are {num_towers}")
        parts = self.micro_batches or 1
        for examples in filter(None, (self.batch_size, self.hard_example_pool)):
            if examples % parts or examples // parts < count:
                multiples = f" in multiples of {parts}" if parts > 1 else ""
                raise UsageError(f"tower_shares={self.tower_shares}: {examples} examples cannot be shared{multiples}")

    def default_num_towers(self, num_devices: int) -> tuple[int, str]:
        """(the largest number of towers that can share a batch, the reason if it is smaller than `num_devices`)."""
        if self.tower_shares:
            return len(parse_shares(self.tower_shares)) or num_devices, ""
        reason = self._describe_uneven_shares(num_devices)
        even = [towers for towers in range(1, num_devices) if not self._describe_uneven_shares(towers)]
        return (even[-1], reason) if reason and even and self.parallelism == "data" else (num_devices, "")

    def _describe_uneven_shares(self, num_towers: int) -> str:
        """Which size these towers cannot share evenly, and the nearest ones that they can; empty if they can."""
        shares = num_towers * (self.micro_batches or 1)
        for name, minimum in (("batch_size", 0), ("hard_example_pool", self.batch_size)):
            size = getattr(self, name)
            if size % shares:
                low = size // shares * shares
                nearest = " and ".join(str(size) for size in (low, low + shares) if size > minimum)
                towers = f"{num_towers} tower{'s' * (num_towers > 1)}"
                towers += f" in {self.micro_batches} micro-batches each" if self.micro_batches > 1 else ""
                return f"{name}={size} cannot be shared by {towers}; {nearest} can"
        return ""
