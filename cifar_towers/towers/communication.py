"""For machines we do not have: what one synchronous step sends between devices, and how long that would take.

`step_bytes` derives it from a model's variables alone, and `predict` turns it into times and efficiencies of many
devices. The tests hold the bytes to those that cross in traced steps.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cifar_towers.towers.placement import HOST, PLACEMENTS

# Shared variables placed by a policy, or a copy on every device and an all-reduce: through one device, or in a ring.
WAYS = (*PLACEMENTS, "one_device", "ring")
Traffic = Counter[tuple[str, str]]  # (source device, destination device) -> bytes


class VariableBytes(NamedTuple):
    """A variable of the model, as a step sees it: each tower reads it and gives back its gradient (a `weight`), its
    new value (a `statistic`) or nothing (`frozen`)."""

    size: int  # bytes
    role: str = "weight"


class StepBytes(NamedTuple):
    """What crosses in one step, in the order of time."""

    read: Traffic  # before a tower computes: its shard, weights, statistics
    gather: Traffic  # gradients and new statistics, to where they are averaged
    scatter: Traffic  # their means, to where the variables are, if that is elsewhere

    def total(self) -> Traffic:
        """All three together."""
        return self.read + self.gather + self.scatter


def step_bytes(
    variables: Sequence[VariableBytes],
    way: str,
    towers: Sequence[str],
    batch_size: int = 0,
    example_bytes: int = 0,
    *,
    gradient_device: str = "",
) -> StepBytes:
    """What one step sends between devices, without scalars such as losses and rates.

    Shared variables (`cpu`, `round_robin`, `least_loaded`): each tower reads every variable that lives elsewhere, and
    what it gives back is averaged beside the variable. Mirrored ones: gradients and statistics, M bytes together, go
    to tower 0 and their means return (`one_device`); or each device sends M (K-1)/K bytes to its neighbour, twice
    (`ring`). Those 2 (K-1)/K M are the least that any all-reduce can do. Source: P. Patarasuk and X. Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).

    Each tower reads a variable once, takes its shard in one part, and has statistics of its own, whose mean is kept;
    batch norm over the whole batch sends more.

    Args:
      variables: the model's, in the order they are born, on which their placement depends.
      way: one of `WAYS`.
      towers: the K towers' devices, as `/GPU:0`. The host, `/CPU:0`, may be one of them.
      batch_size: B, shared as `split_batch` does.
      example_bytes: of what a tower uses of one example: image, label and random numbers.
      gradient_device: where gradients of shared variables are averaged; beside each variable if empty.

    Raises:
      ValueError: an unknown way or role, or no towers.
    """
    _check(variables, way, towers)
    make = _shared if way in PLACEMENTS else _mirrored
    phases = StepBytes(*make(variables, way, towers, gradient_device if len(towers) > 1 else ""))
    for k, tower in enumerate(towers):
        phases.read[HOST, tower] += example_bytes * (batch_size // len(towers) + (k < batch_size % len(towers)))
    return StepBytes(*(Counter({p: n for p, n in phase.items() if p[0] != p[1] and n}) for phase in phases))


def link_loads(traffic: Traffic) -> dict[str, tuple[int, int]]:
    """Device -> (bytes that leave it, bytes that enter it)."""
    left, entered = Counter(), Counter()
    for (source, destination), size in traffic.items():
        left[source] += size
        entered[destination] += size
    return {device: (left[device], entered[device]) for device in sorted(left | entered)}


class Prediction(NamedTuple):
    """A step on `num_towers` devices, its whole batch, and its times, which add up where nothing overlaps."""

    way: str
    num_towers: int
    batch_size: int
    compute_seconds: float
    transfer_seconds: float
    step_seconds: float
    images_per_sec: float
    efficiency: float = 1.0


def predict(
    compute_seconds: float,
    variables: Sequence[VariableBytes],
    batch_size: int,
    example_bytes: int,
    link_gb_per_s: float,
    num_towers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    ways: Sequence[str] = WAYS,
    per_device_batch: bool = False,
    overlap: float = 0.0,
    gradient_device: str = "",
    latency_seconds: float = 0.0,
) -> list[Prediction]:
    """Time and efficiency of a step, for each way and each number of GPUs, K.

    Assumed: every GPU, and the host, has one full-duplex link to a switch that is never the bottleneck. Reading,
    computing, gathering and scattering follow one another, and each transfer takes as long as the busiest direction
    of a link and the latency of its messages. What a device sends in a phase, it sends at once, as one message to
    each other device; but a ring passes on 2 (K-1) messages, one after another. A real step sends a gradient as soon
    as it has it, so without `overlap` the transfers cost more here than there. Other things cost less: messages have
    no latency unless it is given, K devices compute K times as fast as one, averages and updates are free. Efficiency
    is images per second, divided by K times those of one GPU with all variables.

    Args:
      compute_seconds: measured on one device, for `batch_size` examples.
      batch_size: of all devices together, whatever K is: strong scaling.
      link_gb_per_s: 10^9 bytes a second, each way.
      per_device_batch: `batch_size` is that of each device, and the whole batch grows with K: weak scaling.
      overlap: the fraction of the computing time in which the links work too, 0 to 1.
      latency_seconds: what one message takes beside the time of its bytes.
      variables, example_bytes, gradient_device: as in `step_bytes`.

    Raises:
      ValueError: as `step_bytes` does; an overlap outside 0 to 1; a negative latency; more devices than examples; or
        another time, a rate or a number of devices or examples that is not positive.
    """
    if min(compute_seconds, link_gb_per_s, batch_size, *num_towers) <= 0 or not 0 <= overlap <= 1:
        raise ValueError("compute_seconds, batch_size, link_gb_per_s, num_towers must be above 0, overlap from 0 to 1")
    if latency_seconds < 0:
        raise ValueError(f"latency_seconds={latency_seconds:g} is below 0; give what one message takes, or 0")
    if max(num_towers) > batch_size and not per_device_batch:
        raise ValueError(f"{batch_size} examples cannot be shared by {max(num_towers)} devices")

    def step(way: str, count: int) -> Prediction:
        batch = batch_size * count if per_device_batch else batch_size
        towers = [f"/GPU:{k}" for k in range(count)]
        phases = step_bytes(variables, way, towers, batch, example_bytes, gradient_device=gradient_device)
        compute = compute_seconds * -(-batch // count) / batch_size  # the largest shard's
        busiest = [max((n for both in link_loads(phase).values() for n in both), default=0) for phase in phases]
        sequential = count - 1 if way == "ring" else 1  # messages of gathering, and of scattering
        messages = bool(phases.read) + sequential * (bool(phases.gather) + bool(phases.scatter))
        transfer = sum(busiest) / (link_gb_per_s * 1e9) + latency_seconds * messages
        seconds = compute + max(0.0, transfer - overlap * compute)
        return Prediction(way, count, batch, compute, transfer, seconds, batch / seconds)

    alone = step("ring", 1).images_per_sec
    steps = [step(way, count) for way in ways for count in num_towers]
    return [one._replace(efficiency=one.images_per_sec / (one.num_towers * alone)) for one in steps]


def _shared(variables: Sequence[VariableBytes], way: str, towers: Sequence[str], gradient_device: str) -> list[Traffic]:
    read, gather, scatter = Counter(), Counter(), Counter()
    for (size, role), home in zip(variables, _homes(variables, way, towers), strict=True):
        given_back = size if role != "frozen" else 0
        meeting = gradient_device if gradient_device and role == "weight" else home
        for tower in towers:
            read[home, tower] += size
            gather[tower, meeting] += given_back
        scatter[meeting, home] += given_back
    return [read, gather, scatter]


def _homes(variables: Sequence[VariableBytes], way: str, towers: Sequence[str]) -> list[str]:
    """Where `variable_placement` puts each; slots and averages are born later, so they do not matter."""
    if way == "cpu":
        return [HOST] * len(variables)
    if way == "round_robin":
        return list(itertools.islice(itertools.cycle(towers), len(variables)))
    held, homes = Counter(), []
    for size, _ in variables:
        homes.append(min(towers, key=held.__getitem__))
        held[homes[-1]] += size
    return homes


def _mirrored(variables: Sequence[VariableBytes], way: str, towers: Sequence[str], _) -> list[Traffic]:
    reduced = sum(size for size, role in variables if role != "frozen")
    if way == "one_device":
        gather = Counter({(tower, towers[0]): reduced for tower in towers})
        return [Counter(), gather, Counter({(to, tower): size for (tower, to), size in gather.items()})]
    share = -(-reduced * (len(towers) - 1) // len(towers))
    ring = Counter(dict.fromkeys(zip(towers, [*towers[1:], towers[0]], strict=True), share))
    return [Counter(), ring, Counter(ring)]


def _check(variables: Sequence[VariableBytes], way: str, towers: Sequence[str]) -> None:
    unknown = {role for _, role in variables} - {"weight", "statistic", "frozen"}
    if unknown:
        raise ValueError(f"a variable is a weight, a statistic or frozen, not {', '.join(sorted(unknown))}")
    if way not in WAYS:
        raise ValueError(f"{way!r} is not one of {', '.join(WAYS)}")
    if not towers:
        raise ValueError("a step needs the device of at least one tower")
