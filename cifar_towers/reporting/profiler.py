"""What TensorFlow's profiler saw of some steps, summed up by part of the step and by kind of operation."""

import bisect
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.reporting import jsonl

PARTS = ("forward", "backward", "average", "apply", "other")
AVERAGING = ("average_gradients", "all_reduce", "average_statistics")
APPLYING = ("apply", "weight_averages", "loss_averages")
STEP = "train"  # what a trace calls a step, as Keras does; TensorBoard's profile plugin goes by the number it carries
CALL = "ExecutorState::ProcessAsync::Start"  # how a trace calls the start of an operation that others may follow
COMPILED = "CpuExecutable::ExecuteAsyncOnStream"  # and the run of a function that XLA compiled
ROWS = 12  # kinds of operation that a table names
PLUGINS = "xprof", "tensorboard_plugin_profile"  # the module that shows traces in TensorBoard, now and formerly


class Work(NamedTuple):
    """One operation's run, or one of its kernels on a GPU."""

    name: str  # its name in the graph
    kind: str  # as `Conv2D`
    seconds: float


class Profile(NamedTuple):
    """The work of some steps, all towers together."""

    steps: int
    seconds: float  # on the clock, all steps; 0: not known
    work: list[Work]
    on_gpu: bool

    @property
    def total(self) -> float:
        """Seconds of work, all steps: time of threads, or of GPUs, added up."""
        return sum(work.seconds for work in self.work)

    def shares(self) -> dict[str, float]:
        """Part of the step -> share of the work; the proxy, where there is one, is a part of its own."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for work in self.work:
            part = part_of(work.name)
            seconds[part] = seconds.get(part, 0.0) + work.seconds
        total = self.total or 1.0
        return {part: spent / total for part, spent in seconds.items()}

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """Kind of operation -> its seconds and calls in a mean step, longest first."""
        found: dict[str, list[float]] = {}
        for work in self.work:
            found.setdefault(work.kind, []).append(work.seconds)
        kinds = {kind: (sum(times) / self.steps, len(times) / self.steps) for kind, times in found.items()}
        return dict(sorted(kinds.items(), key=lambda item: -item[1][0]))

    def table(self) -> str:
        """The parts' shares; then a row for each of the longest kinds and one for the rest, of a mean step."""
        rows, total = list(self.by_kind().items()), self.total or 1.0
        if len(rows) > ROWS + 1:
            seconds, calls = (sum(column) for column in zip(*(row for _, row in rows[ROWS:]), strict=True))
            rows = [*rows[:ROWS], (f"all other ({len(rows) - ROWS} kinds)", (seconds, calls))]
        lines = [
            "  ".join(f"{part} {100 * share:.1f} %" for part, share in self.shares().items()),
            f"{'ms/step':>9}  {'share':>7}  {'kernels' if self.on_gpu else 'calls':>7}  operation",
        ]
        for kind, (seconds, calls) in rows:
            share = seconds * self.steps / total
            lines.append(f"{1e3 * seconds:9.2f}  {100 * share:5.1f} %  {calls:7.1f}  {kind}")
        return "\n".join(lines)


def profiled(call: Callable[[], Any]) -> Profile:
    """Calls one step under the profiler."""
    with tempfile.TemporaryDirectory() as directory:
        tf.profiler.experimental.start(directory)
        try:
            call()
        finally:
            tf.profiler.experimental.stop()
        return read(next(Path(directory).rglob("*.xplane.pb")))


class StepProfiler:
    """Traces the steps of a run from `first` up to `last`, counted from 0, into `train_dir/train` for TensorBoard.

    What cannot be traced or written is said once and ends no run.
    """

    def __init__(self, train_dir: Path, first: int, last: int):
        self._logs, self._first, self._last = train_dir / "train", first, last
        self._going_on = jsonl.BestEffortWrites(self._logs / "plugins" / "profile", (OSError, tf.errors.OpError))
        self._running = self._over = False
        self._step: tf.profiler.experimental.Trace | None = None
        self._traced: list[int] = []

    def before(self, step: int) -> None:
        """To be called right before each step with the number of updates done; starts the trace when it is time."""
        if self._over or not self._first <= step < self._last:
            return
        if not self._running:
            with self._going_on():
                tf.profiler.experimental.start(str(self._logs))
                self._running = True
            self._over = not self._running
        if self._running:
            self._step = tf.profiler.experimental.Trace(STEP, step_num=step, _r=1)

    def after(self, step: int) -> str | None:
        """To be called right after each step with the number of updates done; at the end, what there is to say."""
        if self._step:
            self._step.__exit__(None, None, None)
            self._step = None
            self._traced.append(step - 1)
        return self.close() if self._running and step == self._last else None

    def close(self) -> str | None:
        """Ends a trace that still runs; what there is to say of the steps it holds."""
        if not self._running:
            return None
        self._running, self._over = False, True
        told = None
        with self._going_on():
            if self._traced:
                told = self._told(self._write())
            else:
                tf.profiler.experimental.stop(save=False)
        self._step = None  # not earlier: a step that was cut short has no place in the trace
        return told

    def _write(self) -> Path:
        """Ends the trace; its file. What could be written only in part is removed."""
        earlier = set(self._traces())
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError:
            for part in set(self._traces()) - earlier:
                part.unlink()
            raise
        return max(self._traces(), key=lambda path: path.stat().st_mtime_ns)

    def _traces(self) -> Iterator[Path]:
        return self._logs.glob("plugins/profile/*/*.xplane.pb")

    def _told(self, trace: Path) -> str:
        profile = read(trace)
        steps = f"steps {self._traced[0]} to {self._traced[-1]}" if self._traced[1:] else f"step {self._traced[0]}"
        clock, spent = (1e3 * seconds / profile.steps for seconds in (profile.seconds, profile.total))
        added = "kernels and host operations" if profile.on_gpu else "operations, all towers' and threads'"
        told = f"profile of {steps}: a step takes {clock:.1f} ms, with {spent:.1f} ms of {added} added up\n"
        told += f"{profile.table()}\n"
        told += f"trace of {trace.stat().st_size / 1e6:.1f} MB in {trace.parent}; to see it in TensorBoard's Profile: "
        seen = any(importlib.util.find_spec(plugin) for plugin in PLUGINS)
        return told + (f"tensorboard --logdir={self._logs.parent}" if seen else "pip install xprof")


def part_of(name: str) -> str:
    """The part of the step that an operation of this name belongs to.

    >>> part_of("gradient_tape/tower_0/conv1/Conv2D/Conv2DBackpropFilter")
    'backward'
    """
    scopes = name.split("/")
    if name.removeprefix("gradient_tape/").startswith("proxy/"):  # and no layer of that name
        return "proxy"
    if any(scope.startswith(AVERAGING) for scope in scopes):
        return "average"
    if any(scope.startswith(APPLYING) for scope in scopes):
        return "apply"
    if any(scope.startswith(("gradient_tape", "backward")) for scope in scopes):
        return "backward"
    return "forward" if any(re.fullmatch(r"tower_\d+", scope) for scope in scopes) else "other"


def read(trace: Path) -> Profile:
    """A trace file's operations: the kernels on the GPUs, and what the host's threads did beside launching them.

    What began between marked steps, as an evaluation, is left out; a trace without marks is taken as one step.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    host = [plane for plane in space.planes if plane.name == "/host:CPU"]
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    steps = sorted(step for plane in host for step in _steps(plane))
    kernels = [work for plane in gpus for work in _on_gpu(plane)]
    launched = {work.name for _, work in kernels}
    found = kernels + [(at, work) for plane in host for at, work in _on_host(plane) if work.name not in launched]
    work = [work for start, work in found if _within(steps, start)]
    return Profile(len(steps) or 1, sum(end - start for start, end in steps) / 1e12, work, bool(kernels))


def _steps(plane) -> Iterator[tuple[int, int]]:
    """Start and end of each marked step, in picoseconds."""
    marks = {number for number, event in plane.event_metadata.items() if event.name == STEP}
    for line in plane.lines:
        for event in line.events:
            if event.metadata_id in marks and "step_num" in _texts(plane, event):
                start = 1000 * line.timestamp_ns + event.offset_ps
                yield start, start + event.duration_ps


def _within(steps: list[tuple[int, int]], start: int) -> bool:
    latest = bisect.bisect_right(steps, start, key=lambda step: step[0]) - 1
    return not steps or (latest >= 0 and start < steps[latest][1])


def _on_host(plane) -> Iterator[tuple[int, Work]]:
    """Start, in picoseconds, and work. A function compiled by XLA bears the name of the call that the thread is in."""
    names = {number: event.name for number, event in plane.event_metadata.items()}
    operations = {number: operation for number, name in names.items() if (operation := _operation(name))}
    calls = {number for number, name in names.items() if name == CALL}
    compiled = {number for number, name in names.items() if name == COMPILED}
    for line in plane.lines:
        call = None
        for event in line.events:
            number = event.metadata_id
            if number in calls:
                call = event
            elif number in operations or number in compiled:
                inside = call and event.offset_ps < call.offset_ps + call.duration_ps
                name = _texts(plane, call).get("name", "") if number in compiled and inside else ""
                work = Work(*operations.get(number, (name, "XLA")), event.duration_ps / 1e12)
                yield 1000 * line.timestamp_ns + event.offset_ps, work


def _on_gpu(plane) -> Iterator[tuple[int, Work]]:
    """Start, in picoseconds, and work of the kernels that say which operation they belong to."""
    for line in plane.lines:
        for event in line.events:
            told = _texts(plane, event).get("tf_op", plane.event_metadata[event.metadata_id].name)
            if operation := _operation(told):
                yield 1000 * line.timestamp_ns + event.offset_ps, Work(*operation, event.duration_ps / 1e12)


def _operation(told: str) -> tuple[str, str] | None:
    """An operation's name and kind, if it is one that is told of."""
    name, colon, kind = told.rpartition(":")
    if colon and "::" not in told and " " not in told:
        return name, kind.removeprefix("_MklNative").removeprefix("_Mkl")
    return None


def _texts(plane, event) -> dict[str, str]:
    """What an event carries, by name; empty where that is a number."""
    return {
        plane.stat_metadata[stat.metadata_id].name: stat.str_value or plane.stat_metadata[stat.ref_value].name
        for stat in event.stats
    }
