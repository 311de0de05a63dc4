"""The cost model: bytes that one synchronous step sends between devices, and the time that they take.

`step_bytes` computes the bytes from a model's variables alone; `predict` turns them into step times and efficiencies.
The tests compare the bytes with those that cross between devices in traced steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from cifar_towers.models.layers import BatchNorm
from cifar_towers.towers.placement import HOST, PLACEMENTS

Traffic = Counter[tuple[str, str]]  # (source device, destination device) -> bytes
ROLES = ("weight", "statistic", "frozen")


class VariableBytes(NamedTuple):
    """A variable, which every tower reads in a step."""

    size: int  # bytes
    role: str = "weight"  # of `ROLES`: what returns is its gradient, its new value if a `statistic`, or nothing


class StepBytes(NamedTuple):
    """The traffic of one step, in the order of time."""

    read: Traffic  # before a tower computes: its shard, weights, statistics
    gather: Traffic  # gradients and new statistics, to the device that averages them
    scatter: Traffic  # the means, to the variables' devices if those are others

    def total(self) -> Traffic:
        """Return the sum of the three phases."""
        return self.read + self.gather + self.scatter


def step_bytes(
    variables: Sequence[VariableBytes],
    exchange: str,
    towers: Sequence[str],
    batch_size: int = 0,
    example_bytes: int = 0,
    *,
    gradient_device: str = "",
) -> StepBytes:
    """Compute the bytes that one step sends between devices, without scalars such as losses and learning rates.

    Shared variables (a policy of `placement.PLACEMENTS`): each tower reads every variable that is on another device.
    Gradients and statistics are averaged beside the variable.

    Mirrored variables: gradients and statistics have M bytes in total. With `one_device` they go to tower 0, and their
    means return. With `ring` each device sends M (K-1)/K bytes to its neighbor, twice; 2 (K-1)/K M is the minimum of
    any all-reduce. Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009).

    Batch statistics are per tower and averaged; synchronized batch normalization sends more.

    Args:
      variables: in the order of their creation, on which their placement depends.
      exchange: one of `EXCHANGES`.
      towers: the K towers' devices, as `/GPU:0`. The host, `/CPU:0`, may be one of them.
      batch_size: number of examples, shared as `split_batch` does.
      example_bytes: bytes of one example: image, label and random numbers.
      gradient_device: device that averages the gradients of shared variables; empty: the device of each variable.

    Raises:
      ValueError: an unknown exchange or role, or no towers.
    """
    _check(variables, exchange, towers)
    if exchange in MIRRORED:
        phases = MIRRORED[exchange](sum(size for size, role in variables if role != "frozen"), towers)
    else:
        phases = _shared(variables, exchange, towers, gradient_device if len(towers) > 1 else "")
    for k, tower in enumerate(towers):
        phases.read[HOST, tower] += example_bytes * (batch_size // len(towers) + (k < batch_size % len(towers)))
    return StepBytes(*(_between_devices(phase) for phase in phases))


def link_loads(traffic: Traffic) -> dict[str, tuple[int, int]]:
    """Return (bytes sent, bytes received) by device."""
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for (source, destination), size in traffic.items():
        sent[source] += size
        received[destination] += size
    return {device: (sent[device], received[device]) for device in sorted(sent | received)}


class Prediction(NamedTuple):
    """A step on `num_towers` devices, which computes and transfers by turns."""

    exchange: str
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
    exchanges: Sequence[str] = (),
    per_device_batch: bool = False,
    latency_seconds: float = 0.0,
) -> list[Prediction]:
    """Predict the time and efficiency of a step for each of `exchanges` (all, if empty) and each number of GPUs, K.

    Every GPU, and the host, has one full-duplex link to a switch that is never the bottleneck. Read, compute, gather
    and scatter follow one another, although real steps send gradients while they compute. A transfer takes the time of
    the busiest direction of a link, plus the latency of its messages: one to each other device, all at once, or 2 (K-1)
    one after another in a ring.

    The times are underestimated: K devices compute K times as fast as one, and averages and updates are free.
    Efficiency is images per second, divided by K times those of one GPU that has all variables.

    Args:
      compute_seconds: duration measured on one device, for `batch_size` examples.
      batch_size: examples of all devices together (strong scaling), or with `per_device_batch` of each (weak scaling).
      link_gb_per_s: 10^9 bytes a second, each direction.

    Raises:
      ValueError: `step_bytes` refuses its arguments, there are more devices than examples, or a number is out of range.
    """
    if min(compute_seconds, link_gb_per_s, batch_size, *num_towers) <= 0:
        raise ValueError("compute_seconds, batch_size, link_gb_per_s and num_towers must be above 0")
    if latency_seconds < 0:
        raise ValueError(f"latency_seconds={latency_seconds:g} is below 0; give the time of one message, or 0")
    if max(num_towers) > batch_size and not per_device_batch:
        raise ValueError(f"{batch_size} examples cannot be shared by {max(num_towers)} devices")

    def step(exchange: str, count: int) -> Prediction:
        batch = batch_size * count if per_device_batch else batch_size
        towers = [f"/GPU:{k}" for k in range(count)]
        phases = step_bytes(variables, exchange, towers, batch, example_bytes)
        compute = compute_seconds * -(-batch // count) / batch_size  # the largest shard's
        transfer = _transfer_seconds(phases, exchange, count, link_gb_per_s, latency_seconds)
        seconds = compute + transfer
        return Prediction(exchange, count, batch, compute, transfer, seconds, batch / seconds)

    single = step("ring", 1).images_per_sec
    steps = [step(exchange, count) for exchange in exchanges or EXCHANGES for count in num_towers]
    return [one._replace(efficiency=one.images_per_sec / (one.num_towers * single)) for one in steps]


def _transfer_seconds(phases: StepBytes, exchange: str, count: int, gb_per_s: float, latency: float) -> float:
    busiest = [max((n for both in link_loads(phase).values() for n in both), default=0) for phase in phases]
    sequential = count - 1 if exchange == "ring" else 1  # messages of gathering, and of scattering
    messages = bool(phases.read) + sequential * (bool(phases.gather) + bool(phases.scatter))
    return sum(busiest) / (gb_per_s * 1e9) + latency * messages


def _shared(variables: Sequence[VariableBytes], placement: str, towers: Sequence[str], mean_on: str) -> StepBytes:
    phases = StepBytes(Counter(), Counter(), Counter())
    choose = PLACEMENTS[placement](towers)  # slots and averages are created later: they do not change these choices
    for size, role in variables:
        device = choose(lambda size=size: size, "")
        returned = size if role != "frozen" else 0
        mean_device = mean_on if mean_on and role == "weight" else device
        for tower in towers:
            phases.read[device, tower] += size
            phases.gather[tower, mean_device] += returned
        phases.scatter[mean_device, device] += returned
    return phases


def _one_device(reduced: int, towers: Sequence[str]) -> StepBytes:
    gather = Counter({(tower, towers[0]): reduced for tower in towers})
    return StepBytes(Counter(), gather, Counter({(towers[0], tower): reduced for tower in towers}))


def _ring(reduced: int, towers: Sequence[str]) -> StepBytes:
    share = -(-reduced * (len(towers) - 1) // len(towers))
    ring = Counter(dict.fromkeys(zip(towers, [*towers[1:], towers[0]], strict=True), share))
    return StepBytes(Counter(), ring, Counter(ring))


# All-reduce of a copy on every device: name -> function of (bytes reduced, towers' devices)
MIRRORED: dict[str, Callable[[int, Sequence[str]], StepBytes]] = {"one_device": _one_device, "ring": _ring}
EXCHANGES = (*PLACEMENTS, *MIRRORED)


def _between_devices(phase: Traffic) -> Traffic:
    return Counter({pair: size for pair, size in phase.items() if pair[0] != pair[1] and size})


def _check(variables: Sequence[VariableBytes], exchange: str, towers: Sequence[str]) -> None:
    unknown = {role for _, role in variables} - set(ROLES)
    if unknown:
        raise ValueError(f"the role of a variable is one of {', '.join(ROLES)}, not {', '.join(sorted(unknown))}")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange {exchange!r} is not one of {', '.join(EXCHANGES)}")
    if not towers:
        raise ValueError("a step needs the device of at least one tower")


def variable_bytes(model: keras.Model) -> list[VariableBytes]:
    """Return the size and role of a model's variables, in the order of creation."""
    trainable = {id(variable) for variable in model.trainable_variables}
    sizes = []
    for layer in model.layers:
        other_role = "statistic" if isinstance(layer, BatchNorm) else "frozen"
        for variable in layer.variables:
            role = "weight" if id(variable) in trainable else other_role
            value = variable.value
            sizes.append(VariableBytes(value.shape.num_elements() * value.dtype.size, role))
    return sizes
