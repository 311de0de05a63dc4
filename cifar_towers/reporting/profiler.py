"""Traces of training steps for TensorBoard's Profile, and the share of a step's time that each part of it takes.

The shares are read from the trace (XPlane). TensorFlow's own `framework_op_stats`, the same in xprof, omits
operations that XLA compiled for the CPU, such as the activations. It cannot leave out evaluations between the steps.
"""

import bisect
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from cifar_towers.errors import command
from cifar_towers.files import BestEffortWrites

PARTS = ("forward", "backward", "average", "apply", "other")
SCOPES = {  # part -> beginning of a scope of its operations; the first that matches counts
    "average": "average_gradients|all_reduce|average_statistics",
    "apply": "apply|weight_averages|loss_averages",
    "backward": "gradient_tape|backward",
    "forward": r"tower_\d+(?![^/])",
}
STEP_EVENT = "train"  # of `Trace`, as in Keras
OP_START_EVENT = "ExecutorState::ProcessAsync::Start"  # carries the name of the operation that a thread runs next
XLA_EVENT = "CpuExecutable::ExecuteAsyncOnStream"  # carries no name
PLUGIN = "xprof"  # package that shows traces in TensorBoard


class StepProfiler:
    """A trace of the steps from `first` up to `last` of a run, counted from 0, in `train_dir/train` for TensorBoard.

    A trace that cannot be started or written is logged once and ends no run.
    """

    def __init__(self, train_dir: Path, first: int, last: int):
        self._logdir, self._first, self.last = train_dir / "train", first, last
        self._best_effort = BestEffortWrites(self._logdir / "plugins" / "profile", (OSError, tf.errors.OpError))
        self._is_running = self._is_done = False
        self._step_event: tf.profiler.experimental.Trace | None = None
        self._steps: list[int] = []

    def before(self, step: int) -> None:
        """Begin the trace if the step after `step` is the first one to profile. Call before each step."""
        if self._is_done or not self._first <= step < self.last:
            return
        if not self._is_running:
            with self._best_effort:
                tf.profiler.experimental.start(str(self._logdir))
                self._is_running = True
            self._is_done = not self._is_running
        if self._is_running:
            self._step_event = tf.profiler.experimental.Trace(STEP_EVENT, step_num=step, _r=1)

    def after(self, step: int) -> str | None:
        """End the trace if `step` is the last one to profile, and return the line to log. Call after each step."""
        if self._step_event:
            self._step_event.__exit__(None, None, None)
            self._step_event = None
            self._steps.append(step)
        return self.close() if self._is_running and step == self.last else None

    def close(self) -> str | None:
        """End a running trace, and return the line to log; None if no step was traced."""
        if not self._is_running:
            return None
        self._is_running, self._is_done = False, True
        summary = None
        with self._best_effort:
            if self._steps:
                summary = self._summarize(self._write_trace())
            else:
                tf.profiler.experimental.stop(save=False)
        self._step_event = None  # not earlier: its end would record a step that was interrupted
        return summary

    def _write_trace(self) -> Path:
        """End the trace and return its file; remove an incomplete one."""
        earlier = self._traces()
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError:
            for path in self._traces() - earlier:
                path.unlink()
            raise
        return max(self._traces(), key=lambda path: path.stat().st_mtime_ns)

    def _traces(self) -> set[Path]:
        return set(self._logdir.glob("plugins/profile/*/*.xplane.pb"))

    def _summarize(self, trace: Path) -> str:
        seconds_per_step, shares = read_trace(trace)
        first, last = self._steps[0], self._steps[-1]
        steps = f"step {first}" if len(self._steps) == 1 else f"steps {first} to {last}"
        parts = ", ".join(f"{part} {100 * share:.1f} %" for part, share in shares.items())
        view = command("tensorboard", f"--logdir={self._logdir.parent}")
        if not importlib.util.find_spec(PLUGIN):
            view = f"pip install {PLUGIN}; {view}"
        return f"profile of {steps}: {1e3 * seconds_per_step:.1f} ms per step: {parts}; trace under Profile: {view}"


def profile_step(step: Callable[[], Any]) -> dict[str, float]:
    """Run a step under TensorFlow's profiler, and return the share of each part; see `read_trace`."""
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory):
            step()
        return read_trace(next(Path(directory).rglob("*.xplane.pb")))[1]


def part_of(name: str) -> str:
    """Return the part of the step that an operation belongs to, by its name; the proxy model is a part of its own."""
    if name.removeprefix("gradient_tape/").startswith("proxy/"):  # a layer may have that name too
        return "proxy"
    return next((part for part, scope in SCOPES.items() if re.search(f"(^|/)({scope})", name)), "other")


def read_trace(path: Path) -> tuple[float, dict[str, float]]:
    """Return the wall-clock seconds per step (0 without step events), and {part: share of the operations' time}.

    The time of the operations is summed over towers and threads. Where GPUs ran kernels, only the kernels count.
    Operations that began between two steps, such as those of an evaluation, do not count.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    events = [event for plane in planes if plane.name == "/host:CPU" for event in _events(plane)]
    gpus = [event for plane in planes if plane.name.startswith("/device:GPU") for event in _events(plane)]
    kernels = [(start, _operation(stats.get("tf_op", name)), length) for _, name, start, length, stats in gpus]
    steps = sorted((e[2], e[2] + e[3]) for e in events if e[1] == STEP_EVENT and "step_num" in e[4])
    seconds = dict.fromkeys(PARTS, 0.0)
    for start, name, length in [kernel for kernel in kernels if kernel[1]] or _host_operations(events):
        latest = bisect.bisect_right(steps, start, key=lambda step: step[0]) - 1
        if not steps or (latest >= 0 and start < steps[latest][1]):  # a trace without step events is one step
            part = part_of(name)
            seconds[part] = seconds.get(part, 0.0) + length
    total = sum(seconds.values()) or 1.0
    per_step = sum(end - start for start, end in steps) / 1e12 / len(steps) if steps else 0.0
    return per_step, {part: each / total for part, each in seconds.items()}


Event = tuple[int, str, int, int, Mapping[str, str]]  # thread, name, start and duration in picoseconds, text statistics


def _events(plane) -> Iterator[Event]:
    stat_names: dict[int, str] = {number: stat.name for number, stat in plane.stat_metadata.items()}
    for thread, line in enumerate(plane.lines):
        for event in line.events:
            stats = {stat_names[s.metadata_id]: s.str_value or stat_names.get(s.ref_value, "") for s in event.stats}
            start = 1000 * line.timestamp_ns + event.offset_ps
            yield thread, plane.event_metadata[event.metadata_id].name, start, event.duration_ps, stats


def _host_operations(events: list[Event]) -> Iterator[tuple[int, str, int]]:
    """Yield start, name and duration of each operation. XLA's code has the name of the operation its thread runs."""
    running, running_thread, end = "", -1, 0
    for thread, name, start, length, stats in events:
        if name == OP_START_EVENT:
            running, running_thread, end = stats.get("name", ""), thread, start + length
        elif name == XLA_EVENT:
            yield start, running if thread == running_thread and start < end else "", length
        elif operation := _operation(name):
            yield start, operation, length


def _operation(label: str) -> str:
    """Return the name in a label `name:type`, as operations have it; empty for other labels."""
    return "" if "::" in label or " " in label else label.rpartition(":")[0]
