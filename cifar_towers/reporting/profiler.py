"""Profiles of training steps: traces for TensorBoard, and the time of each part of the step and type of operation.

The tables are read from the trace (XPlane). TensorFlow's own `framework_op_stats`, the same in xprof, omits what XLA
compiled for the CPU, such as the activations, and cannot leave out evaluations between the steps.
"""

import bisect
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

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
TABLE_ROWS = 12
PLUGIN = "xprof"  # package that shows traces in TensorBoard


class OpTime(NamedTuple):
    """One execution of an operation, or of one of its kernels on a GPU."""

    name: str  # in the graph
    op_type: str  # such as `Conv2D`
    seconds: float


class StepProfile(NamedTuple):
    """The operations of some steps, of all towers and threads."""

    num_steps: int
    seconds: float  # wall-clock time of all steps; 0 if unknown
    ops: list[OpTime]
    on_gpu: bool

    @property
    def op_seconds(self) -> float:
        """Sum over all operations: time of threads and GPUs, not of the clock."""
        return sum(op.seconds for op in self.ops)

    def shares(self) -> dict[str, float]:
        """Part of the step -> fraction of `op_seconds`; a proxy is a part of its own."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for op in self.ops:
            part = part_of(op.name)
            seconds[part] = seconds.get(part, 0.0) + op.seconds
        total = self.op_seconds or 1.0
        return {part: part_seconds / total for part, part_seconds in seconds.items()}

    def by_op_type(self) -> dict[str, tuple[float, float]]:
        """Type of operation -> its mean seconds and calls per step, longest first."""
        by_type: dict[str, list[float]] = {}
        for op in self.ops:
            by_type.setdefault(op.op_type, []).append(op.seconds)
        means = {name: (sum(times) / self.num_steps, len(times) / self.num_steps) for name, times in by_type.items()}
        return dict(sorted(means.items(), key=lambda item: -item[1][0]))

    def table(self) -> str:
        """The shares of the parts, then a row for each of the longest types of operation and one for all others."""
        rows, total = list(self.by_op_type().items()), self.op_seconds or 1.0
        if len(rows) > TABLE_ROWS + 1:
            seconds, calls = (sum(column) for column in zip(*(row for _, row in rows[TABLE_ROWS:]), strict=True))
            rows = [*rows[:TABLE_ROWS], (f"all other ({len(rows) - TABLE_ROWS} types)", (seconds, calls))]
        lines = [
            "  ".join(f"{part} {100 * share:.1f} %" for part, share in self.shares().items()),
            f"{'ms/step':>9}  {'share':>7}  {'kernels' if self.on_gpu else 'calls':>7}  operation",
        ]
        for op_type, (seconds, calls) in rows:
            share = seconds * self.num_steps / total
            lines.append(f"{1e3 * seconds:9.2f}  {100 * share:5.1f} %  {calls:7.1f}  {op_type}")
        return "\n".join(lines)


def profile_step(step: Callable[[], Any]) -> StepProfile:
    """Run a step under TensorFlow's profiler."""
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory):
            step()
        return read_trace(next(Path(directory).rglob("*.xplane.pb")))


class StepProfiler:
    """Traces the steps from `first` up to `last` of a run, counted from 0, into `train_dir/train` for TensorBoard.

    A trace that cannot be started or written is logged once and ends no run.
    """

    def __init__(self, train_dir: Path, first: int, last: int):
        self._logdir, self._first, self._last = train_dir / "train", first, last
        self._best_effort = BestEffortWrites(self._logdir / "plugins" / "profile", (OSError, tf.errors.OpError))
        self._is_running = self._is_done = False
        self._step_event: tf.profiler.experimental.Trace | None = None
        self._steps: list[int] = []

    def before(self, step: int) -> None:
        """Call right before each step, with the number of steps done."""
        if self._is_done or not self._first <= step < self._last:
            return
        if not self._is_running:
            with self._best_effort():
                tf.profiler.experimental.start(str(self._logdir))
                self._is_running = True
            self._is_done = not self._is_running
        if self._is_running:
            self._step_event = tf.profiler.experimental.Trace(STEP_EVENT, step_num=step, _r=1)

    def after(self, step: int) -> str | None:
        """Call right after each step, with the number of steps done; the summary after the last one."""
        if self._step_event:
            self._step_event.__exit__(None, None, None)
            self._step_event = None
            self._steps.append(step - 1)
        return self.close() if self._is_running and step == self._last else None

    def close(self) -> str | None:
        """End a running trace, and return its summary."""
        if not self._is_running:
            return None
        self._is_running, self._is_done = False, True
        summary = None
        with self._best_effort():
            if self._steps:
                summary = self._summarize(self._write_trace())
            else:
                tf.profiler.experimental.stop(save=False)
        self._step_event = None  # not earlier: its end would record a step that was interrupted
        return summary

    def _write_trace(self) -> Path:
        """End the trace and return its file; an incomplete one is removed."""
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
        profile, first, last = read_trace(trace), self._steps[0], self._steps[-1]
        steps = f"step {first}" if len(self._steps) == 1 else f"steps {first} to {last}"
        wall, ops = (1e3 * seconds / profile.num_steps for seconds in (profile.seconds, profile.op_seconds))
        summed = "kernels and host operations" if profile.on_gpu else "operations, summed over towers and threads"
        can_view = importlib.util.find_spec(PLUGIN)
        view = f"tensorboard --logdir={self._logdir.parent}" if can_view else "pip install xprof"
        return (
            f"profile of {steps}: a step takes {wall:.1f} ms, with {ops:.1f} ms of {summed}\n{profile.table()}\n"
            f"trace of {trace.stat().st_size / 1e6:.1f} MB in {trace.parent}; view it under Profile: {view}"
        )


def part_of(name: str) -> str:
    """The part of the step that an operation belongs to, by its name."""
    if name.removeprefix("gradient_tape/").startswith("proxy/"):  # a layer may have that name too
        return "proxy"
    return next((part for part, scope in SCOPES.items() if re.search(f"(^|/)({scope})", name)), "other")


class _Event(NamedTuple):
    """An event of a trace; times in picoseconds."""

    thread: int
    name: str
    start: int
    duration: int
    stats: dict[str, str]  # numbers are empty


def read_trace(path: Path) -> StepProfile:
    """The kernels on GPUs, and the operations on the host that did not only launch them.

    Operations that began between steps are left out. A trace without step events counts as one step.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    host = [event for plane in planes if plane.name == "/host:CPU" for event in _events(plane)]
    gpu = [event for plane in planes if plane.name.startswith("/device:GPU") for event in _events(plane)]
    steps = sorted((e.start, e.start + e.duration) for e in host if e.name == STEP_EVENT and "step_num" in e.stats)
    kernels = [(e.start, op) for e in gpu if (op := _op_time(e.stats.get("tf_op", e.name), e))]
    launched = {op.name for _, op in kernels}
    ops = kernels + [(start, op) for start, op in _host_ops(host) if op.name not in launched]
    in_steps = [op for start, op in ops if _is_in_step(start, steps)]
    return StepProfile(len(steps) or 1, sum(end - start for start, end in steps) / 1e12, in_steps, bool(kernels))


def _is_in_step(start: int, steps: list[tuple[int, int]]) -> bool:
    latest = bisect.bisect_right(steps, start, key=lambda step: step[0]) - 1
    return not steps or (latest >= 0 and start < steps[latest][1])


def _events(plane) -> Iterator[_Event]:
    stat_names = {number: stat.name for number, stat in plane.stat_metadata.items()}
    for thread, line in enumerate(plane.lines):
        for event in line.events:
            stats = {stat_names.get(s.metadata_id): s.str_value or stat_names.get(s.ref_value, "") for s in event.stats}
            start = 1000 * line.timestamp_ns + event.offset_ps
            yield _Event(thread, plane.event_metadata[event.metadata_id].name, start, event.duration_ps, stats)


def _host_ops(events: list[_Event]) -> Iterator[tuple[int, OpTime]]:
    """Start and operation. What XLA compiled has the name of the operation that its thread runs."""
    running = None
    for event in events:
        if event.name == OP_START_EVENT:
            running = event
        elif event.name == XLA_EVENT:
            is_inside = running and event.thread == running.thread and event.start < running.start + running.duration
            name = running.stats.get("name", "") if is_inside else ""
            yield event.start, OpTime(name, "XLA", event.duration / 1e12)
        elif op := _op_time(event.name, event):
            yield event.start, op


def _op_time(label: str, event: _Event) -> OpTime | None:
    """The operation of an event labelled `name:type`, as operations are."""
    name, colon, op_type = label.rpartition(":")
    if not colon or "::" in label or " " in label:
        return None
    return OpTime(name, op_type.removeprefix("_MklNative").removeprefix("_Mkl"), event.duration / 1e12)
