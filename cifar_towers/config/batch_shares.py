"""How towers and their micro-batches share a batch."""

import math
from collections.abc import Sequence

from cifar_towers.errors import UsageError

MAX_MICRO_BATCHES = 1024  # of a tower's shard


def share_out(examples: int, shares: Sequence[float], multiple: int = 1) -> list[int]:
    """Sizes in proportion to K shares that add up to `examples`, each a multiple of `multiple` and not zero.

    >>> share_out(16, [3, 1]), share_out(10, [2, 1, 1])
    ([12, 4], [5, 3, 2])

    Raises:
      ValueError: a share is not positive, or there are too few examples, or they are no multiple.
    """
    units = examples // multiple
    if not shares or min(shares) <= 0 or examples % multiple or units < len(shares):
        parts = f" in multiples of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{examples} examples cannot be shared{parts} as {', '.join(f'{s:g}' for s in shares)}")
    exact = [units * share / sum(shares) for share in shares]
    sizes = [max(1, int(value)) for value in exact]
    while sum(sizes) != units:
        step = 1 if sum(sizes) < units else -1
        movable = [k for k in range(len(sizes)) if sizes[k] + step > 0]
        k = max(movable, key=lambda k: step * (exact[k] - sizes[k]))  # the first of equals
        sizes[k] += step
    return [multiple * size for size in sizes]


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
        try:
            for examples in filter(None, (self.batch_size, self.hard_example_pool)):
                self.shard_sizes(num_towers, examples)
        except ValueError as error:
            raise UsageError(f"tower_shares={self.tower_shares}: {error}") from error

    def shard_sizes(self, num_towers: int, examples: int = 0) -> list[int]:
        """[K]: how many of so many examples, by default of a batch, each tower takes."""
        shares = parse_shares(self.tower_shares) or [1] * num_towers
        return share_out(examples or self.batch_size, shares, self.micro_batches or 1)

    def default_num_towers(self, num_devices: int) -> tuple[int, str]:
        """(the largest number of towers that can share a batch, the reason if it is smaller than `num_devices`)."""
        if self.tower_shares:
            return len(parse_shares(self.tower_shares)) or num_devices, ""
        reason = self._describe_uneven_shares(num_devices)
        even = [towers for towers in range(1, num_devices) if not self._describe_uneven_shares(towers)]
        return (even[-1], reason) if reason and even and self.parallelism == "data" else (num_devices, "")

    def smaller_micro_batches(self, num_devices: int) -> int:
        """The number of micro-batches of at most half the size; 0 if there are no smaller ones."""
        num_towers = num_devices if self.parallelism == "data" else 1
        sizes = self.shard_sizes(num_towers)
        if self.hard_example_pool:
            sizes += self.shard_sizes(num_towers, self.hard_example_pool)
        divisible = math.gcd(*sizes)
        counts = range(2 * self.micro_batches, min(divisible, MAX_MICRO_BATCHES) + 1)
        return next((count for count in counts if divisible % count == 0), 0)

    def suggest_smaller_micro_batches(self, num_devices: int) -> str:
        """Flags for micro-batches of at most half the size; empty if there are none."""
        count = self.smaller_micro_batches(num_devices) if self.micro_batches else 0  # auto has tried them
        unsynchronized = " --batch_statistics=mean" if self.batch_statistics == "synchronized" else ""
        return f"--micro_batches={count}{unsynchronized}" if count else ""

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
