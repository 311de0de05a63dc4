"""What TensorFlow's profiler saw of a step, summed up by part of the step and by kind of operation."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

PARTS = ("forward", "backward", "average", "apply", "other")
AVERAGING = ("average_gradients", "all_reduce", "average_statistics")
APPLYING = ("apply", "weight_averages", "loss_averages")


class Work(NamedTuple):
    """One operation's run."""

    name: str  # its name in the graph
    kind: str  # as `Conv2D`
    seconds: float


def profiled(call: Callable[[], Any]) -> list[Work]:
    """Calls a step under the profiler; the runs of its operations, those of functions it compiled left out."""
    with tempfile.TemporaryDirectory() as directory:
        tf.profiler.experimental.start(directory)
        try:
            call()
        finally:
            tf.profiler.experimental.stop()
        return [work for path in Path(directory).rglob("*.xplane.pb") for work in _read(path.read_bytes())]


def shares_of_step(call: Callable[[], Any]) -> dict[str, float]:
    """Part of the step -> share of its work: thread or device time of operations, all towers together."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for work in profiled(call):
        seconds[part_of(work.name)] += work.seconds
    total = sum(seconds.values())
    return {part: spent / total if total else 0.0 for part, spent in seconds.items()}


def seconds_by_kind(work: list[Work]) -> Counter[str]:
    """Kind of operation -> seconds."""
    total: Counter[str] = Counter()
    for one in work:
        total[one.kind] += one.seconds
    return total


def part_of(name: str) -> str:
    """The part of the step that an operation of this name belongs to.

    >>> part_of("gradient_tape/tower_0/conv1/Conv2D/Conv2DBackpropFilter")
    'backward'
    """
    scopes = name.split("/")
    if any(scope.startswith(AVERAGING) for scope in scopes):
        return "average"
    if any(scope.startswith(APPLYING) for scope in scopes):
        return "apply"
    if any(scope.startswith(("gradient_tape", "backward")) for scope in scopes):
        return "backward"
    return "forward" if any(re.fullmatch(r"tower_\d+", scope) for scope in scopes) else "other"


def _read(serialised: bytes) -> Iterator[Work]:
    """Operations in a profile: on a GPU's plane if there is one, else on the host's threads."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(serialised)
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or [plane for plane in space.planes if plane.name == "/host:CPU"]:
        stat_names = {number: stat.name for number, stat in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                told = plane.event_metadata[event.metadata_id].name
                for stat in event.stats if gpus else ():  # a kernel says which operation it belongs to
                    if stat_names[stat.metadata_id] == "tf_op":
                        told = stat.str_value or plane.stat_metadata[stat.ref_value].name
                name, colon, kind = told.rpartition(":")
                if colon and "::" not in told and " " not in told:
                    yield Work(name, kind.removeprefix("_MklNative").removeprefix("_Mkl"), event.duration_ps / 1e12)
