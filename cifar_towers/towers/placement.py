"""Where shared variables live, and a table that shows where everything went."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import tensorflow as tf

PLACEMENTS = ("cpu",)


@contextlib.contextmanager
def variable_placement(policy: str = "cpu") -> Iterator[None]:
    """Every variable born inside lives where `policy` says, Keras variables and optimizer slots alike.

    `cpu`: on the host's memory, from which every tower reads and where the gradients meet.

    Raises:
      ValueError: an unknown policy.
    """
    if policy not in PLACEMENTS:
        raise ValueError(f"variable placement {policy!r} is not one of {', '.join(PLACEMENTS)}")

    def on_cpu(next_creator, **kwargs):
        with tf.device("/CPU:0"):
            return next_creator(**kwargs)

    with tf.variable_creator_scope(on_cpu):
        yield


def device_table(function, towers: Iterable) -> str:
    """What a traced step says of its devices, as text: each variable's, then the operations of each tower.

    Args:
      function: a `tf.types.experimental.ConcreteFunction`.
      towers: the towers it was traced for.
    """
    rows = [("variable", "shape", "bytes", "device")]
    bytes_on: Counter[str] = Counter()
    for variable in sorted(function.variables, key=lambda variable: variable.name):
        size = variable.shape.num_elements() * variable.dtype.size
        bytes_on[_short(variable.device)] += size
        name = variable.name.removesuffix(":0")
        rows.append((name, str(variable.shape), f"{size:,}", _short(variable.device)))
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
        _short(op.device)
        for op in function.graph.get_operations()
        if op.device and f"{tower.name}/" in f"{op.name}/" and kind in ("", op.type)
    )


def _short(device: str) -> str:
    """'/job:localhost/replica:0/task:0/device:CPU:0' -> '/CPU:0'."""
    return "/" + device.rsplit("device:", 1)[-1].lstrip("/") if device else ""
