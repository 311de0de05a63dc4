"""The devices where shared variables live, and a report of the devices that a traced step uses.

A new placement policy is one more entry of `PLACEMENTS`.
"""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import tensorflow as tf

from cifar_towers.towers.devices import Tower

HOST = "/CPU:0"  # the device whose memory is the machine's main memory
_thread = threading.local()  # .pinned: the device of the innermost `pin_to_device`


def variable_placement(
    policy: str = "cpu", towers: Sequence[Tower] = ()
) -> AbstractContextManager[None]:
    """Create every variable inside on the device that `policy` chooses, also Keras variables and
    optimizer slots.

    Args:
      policy: `cpu` is host memory, from which every tower reads. `round_robin` takes the towers'
        devices in turn. `least_loaded` takes the towers' device that holds the fewest bytes of
        variables so far, the first of equals.
      towers: the towers over whose devices variables are spread; `cpu` needs none.

    Raises:
      ValueError: there are no towers to spread variables over.
    """
    devices = list(dict.fromkeys(tower.device for tower in towers))
    if policy != "cpu" and not devices:
        raise ValueError(f"variable_placement({policy!r}) needs the towers as its second argument")
    return _placement(PLACEMENTS[policy](devices))


# bytes of variables on each device so far -> device of the next one
Chooser: TypeAlias = Callable[[Counter[str]], str]


def _on_host(devices: Sequence[str]) -> Chooser:
    return lambda bytes_on: HOST


def _round_robin(devices: Sequence[str]) -> Chooser:
    turns = itertools.cycle(devices)
    return lambda bytes_on: next(turns)


def _least_loaded(devices: Sequence[str]) -> Chooser:
    return lambda bytes_on: min(devices, key=lambda device: bytes_on[short_device(device)])


# name -> function from the towers' devices to a chooser for one set of variables
PLACEMENTS: dict[str, Callable[[Sequence[str]], Chooser]] = {
    "cpu": _on_host,
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
}


@contextlib.contextmanager
def _placement(choose: Chooser) -> Iterator[None]:
    """Create every variable inside on the device that `choose` returns for it, unless it is pinned
    to another.
    """
    bytes_on: Counter[str] = Counter()

    def place(next_creator: Callable[..., tf.Variable], **creation: Any) -> tf.Variable:
        device = getattr(_thread, "pinned", "") or choose(bytes_on)
        with tf.device(device):
            variable = next_creator(**creation)
        bytes_on[short_device(device)] += _num_bytes(variable)
        return variable

    with tf.variable_creator_scope(place):
        yield


@contextlib.contextmanager
def pin_to_device(device: str) -> Iterator[None]:
    """Create variables inside on `device`, whatever the placement around them, such as slots beside
    their weight.
    """
    previous = getattr(_thread, "pinned", "")
    _thread.pinned = device
    try:
        with tf.device(device):
            yield
    finally:
        _thread.pinned = previous


def placement_report(
    function: tf.types.experimental.ConcreteFunction, towers: Iterable[Tower]
) -> str:
    """Return a table of a traced step: each variable's device, each device's bytes, each tower's
    operations.
    """
    lines = []
    bytes_on: Counter[str] = Counter()
    for variable in sorted(function.variables, key=lambda variable: variable.name):
        size = _num_bytes(variable)
        device = short_device(variable.device)
        bytes_on[device] += size
        lines.append(
            f"{variable.name.removesuffix(':0'):50}  {variable.shape!s:16}  {size:12,} bytes  "
            f"{device}"
        )
    lines += [f"{device}: {size:,} bytes of variables" for device, size in sorted(bytes_on.items())]
    for tower in towers:
        counts = tower_devices(function, tower).most_common()
        operations = [f"{count} operations on {device}" for device, count in counts]
        lines.append(f"{tower.name}: {', '.join(operations) or 'inside the compiled step'}")
    return "\n".join(lines)


def tower_devices(
    function: tf.types.experimental.ConcreteFunction, tower: Tower, op_type: str = ""
) -> Counter[str]:
    """Count the tower's operations, or those of one type, by device. Reads of variables do not
    count.
    """
    return Counter(
        short_device(op.device)
        for op in function.graph.get_operations()
        if op.device and f"{tower.name}/" in f"{op.name}/" and op_type in ("", op.type)
    )


def _num_bytes(variable: tf.Variable) -> int:
    return (variable.shape.num_elements() or 0) * variable.dtype.size


def short_device(device: str) -> str:
    """Return a device's name without its job, replica and task.

    >>> short_device("/job:localhost/replica:0/task:0/device:CPU:0")
    '/CPU:0'
    """
    return "/" + device.rsplit("device:", 1)[-1].lstrip("/") if device else ""
