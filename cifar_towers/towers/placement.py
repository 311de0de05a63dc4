"""Where shared variables live, and a table that shows where everything went."""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from cifar_towers.towers.devices import Tower

HOST = "/CPU:0"
PLACEMENTS = ("cpu", "round_robin", "least_loaded")
_pinned = threading.local()


@contextlib.contextmanager
def variable_placement(policy: str = "cpu", towers: Sequence[Tower] = ()) -> Iterator[None]:
    """Every variable born inside lives where `policy` says, Keras variables and optimizer slots alike.

    `cpu`: in the host's memory, from which every tower reads. `round_robin`: on the towers' devices in turn.
    `least_loaded`: each on the tower's device that holds the fewest bytes of variables so far, the first of equals.
    What follows a variable is pinned beside it with `pin_to_device`, and counts among its device's bytes.

    Raises:
      ValueError: an unknown policy, no towers to spread over, or, when it is born, a variable of unknown shape whose
        bytes `least_loaded` would have to count.
    """
    if policy not in PLACEMENTS:
        raise ValueError(f"variable placement {policy!r} is not one of {', '.join(PLACEMENTS)}")
    devices = [HOST] if policy == "cpu" else list(dict.fromkeys(tower.device for tower in towers))
    if not devices:
        raise ValueError(f"variable placement {policy} spreads variables over towers; give it some")
    turns = itertools.cycle(devices)
    held = Counter(dict.fromkeys(devices, 0))

    def choose(creation: dict, pinned_to: str) -> str:
        if policy != "least_loaded":
            return pinned_to or next(turns)
        size = _count_bytes(creation)
        device = pinned_to or min(devices, key=held.__getitem__)
        held[short_device(device)] += size
        return device

    with custom_placement(choose):
        yield


@contextlib.contextmanager
def custom_placement(choose: Callable[[dict, str], str]) -> Iterator[None]:
    """Every variable born inside lives on the device `choose(creation arguments, device it is pinned to or "")`."""

    def place(next_creator, **creation):
        with tf.device(choose(creation, getattr(_pinned, "device", ""))):
            return next_creator(**creation)

    with tf.variable_creator_scope(place):
        yield


@contextlib.contextmanager
def pin_to_device(device: str) -> Iterator[None]:
    """Variables born inside live on `device`, whatever the placement around: `with pinned(variable.device)`."""
    before = getattr(_pinned, "device", "")
    _pinned.device = device
    try:
        with tf.device(device):
            yield
    finally:
        _pinned.device = before


def _count_bytes(creation: dict) -> int:
    """What a variable will take; its first value, where it is a function, is computed once and put in its place."""
    value = creation["initial_value"]
    value = tf.convert_to_tensor(value() if callable(value) else value, dtype=creation.get("dtype"))
    shape = value.shape if creation.get("shape") is None else tf.TensorShape(creation["shape"])
    if not shape.is_fully_defined():
        raise ValueError(
            f"variable {creation.get('name') or 'without a name'} has shape {shape}, so its bytes cannot be counted; "
            "give it a whole shape, or place variables by round_robin"
        )
    creation["initial_value"] = value
    return shape.num_elements() * value.dtype.size


def placement_report(function, towers: Iterable) -> str:
    """What a traced step says of its devices, as text: each variable's, then the operations of each tower.

    Args:
      function: a `tf.types.experimental.ConcreteFunction`.
      towers: the towers it was traced for.
    """
    rows = [("variable", "shape", "bytes", "device")]
    bytes_on: Counter[str] = Counter()
    for variable in sorted(function.variables, key=lambda variable: variable.name):
        size = variable.shape.num_elements() * variable.dtype.size
        bytes_on[short_device(variable.device)] += size
        name = variable.name.removesuffix(":0")
        rows.append((name, str(variable.shape), f"{size:,}", short_device(variable.device)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{n:{widths[0]}}  {s:{widths[1]}}  {b:>{widths[2]}}  {d}" for n, s, b, d in rows]
    lines += [f"{device}: {size:,} bytes of variables" for device, size in sorted(bytes_on.items())]
    for tower in towers:
        counts = tower_devices(function, tower)
        told = ", ".join(f"{count} operations on {device}" for device, count in counts.most_common())
        lines.append(f"{tower.name}: {told}")
    return "\n".join(lines)


def tower_devices(function, tower, kind: str = "") -> Counter[str]:
    """Device -> number of operations under the tower's name scope (of one kind, such as `Conv2D`, if given).

    Reads of variables are not counted: they happen where the variable lives.
    """
    return Counter(
        short_device(op.device)
        for op in function.graph.get_operations()
        if op.device and f"{tower.name}/" in f"{op.name}/" and kind in ("", op.type)
    )


def short_device(device: str) -> str:
    """'/job:localhost/replica:0/task:0/device:CPU:0' -> '/CPU:0'."""
    return "/" + device.rsplit("device:", 1)[-1].lstrip("/") if device else ""
