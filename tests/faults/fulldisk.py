"""Runs on a disk that is full or read-only, for a while or for good, and file system calls that fail.

Whole runs write to a small disk in memory. A run begins and ends the fault itself, at one of its `POINTS`, so that a
trial can be repeated. Needs root, to mount the disk, and strace, to make calls fail.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cifar_towers import files
from cifar_towers.checkpointing import checkpoint
from cifar_towers.errors import DataError
from tests.faults import harness, hooks, runs, tracing
from tests.faults.harness import Child, Experiment, Trial, check
from tests.faults.subjects import OURS

LAST, KEPT = 12, 2
STEPS = tuple(range(2, LAST + 1, 2))  # those that are saved
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--crop=24", "--shift=0", "--batch_size=20", "--precision=float32"),
    *("--num_gpus=2", "--summary_every_steps=1", "--eval_every_epochs=0"),
    *(f"--max_steps={LAST}", "--checkpoint_every_steps=2", f"--keep_checkpoints={KEPT}"),
)
POINTS = ("start", "training", *(f"{event} {step}" for step in STEPS for event in ("saving", "after")), "again")
MAX_FILES = 500
LIMITS = f"size=64m,nr_inodes={MAX_FILES}"
CALLS = ("write", "openat", "rename", "fsync")  # by which a save changes or syncs something
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")
FAULTS = (  # or full: the points where it may begin, and the least and most room, in checkpoints
    (("start",), 0, 3),
    (("training",), 0, 1),
    (tuple(f"after {step}" for step in STEPS[:-1]), 0, 1),
    (tuple(f"saving {step}" for step in STEPS[:-1]), 1, 1),
    "failing call",
    ((f"saving {LAST}",), 1, 1),
    "full at any time",
    "failing call",
    (tuple(f"saving {step}" for step in STEPS[1:-1]), 1, 1),
    "read-only",
)


def fill_disk(trial: Trial) -> str:
    """Guaranteed: the run continues, older checkpoints stay and the weights are as without the fault. If the last step
    could not be saved, one line says so, and the same command resumes when there is room."""
    reference = _reference()
    with small_disk(trial.scratch / "disk") as disk:
        fault = _make_fault(trial, disk, reference)
        trial.details = f"{fault.name}, from {_point_name(fault.first)} to {_point_name(fault.last)}"
        run, record = _train(trial.scratch / "first", disk / "run", fault, reference.checkpoint_bytes)
        _check_guarantees(disk / "run", run, record)
        if "fault" not in record.events:
            check(isinstance(fault.first, float), "fault not reached")
            return "done before the fault"
        traces = [path.read_text() for path in trial.scratch.glob("trace.*")]
        check(not traces or "(INJECTED)" in "".join(traces), "fault not reached")
        if not run.exit_code:
            failed = any(event.startswith("failed") for event in record.events)
            return "done, saves failed" if failed else "done, all saved"
        run, again = _train(trial.scratch / "second", disk / "run", NO_FAULT)
        _check_guarantees(disk / "run", run, again, "restarted: ")
        check(not run.exit_code, f"restarted: exit code {run.exit_code}")
        return "last not saved, then done" if "training" in record.events else "not started, then done"


def _point_name(when: str | float) -> str:
    return f"{when:.3f} s" if isinstance(when, float) else f"'{when}'" if when else "the end"


class Fault(NamedTuple):
    """A fault of a context from one point, or time in seconds, to another; for good if `last` is empty."""

    name: str
    context: Callable[[], contextlib.AbstractContextManager]
    first: str | float
    last: str | float


NO_FAULT = Fault("nothing", contextlib.nullcontext, "", "")


class Reference(NamedTuple):
    """The files and the time of an undisturbed run."""

    states: dict[str, str]  # checkpoint -> SHA-256 of its variables
    weights: str
    checkpoint_bytes: int
    calls: Counter  # in one save
    seconds: float


def _make_fault(trial: Trial, disk: Path, reference: Reference) -> Fault:
    rng = trial.rng
    match FAULTS[trial.index % len(FAULTS)]:
        case "read-only":  # from the start, as a disk with files open for writing cannot be remounted
            return Fault("read-only", functools.partial(_remounted, disk, lambda: "ro"), "start", "")
        case "failing call":  # one of a save, or all of this name from it on
            call, error, step = rng.choice(sorted(reference.calls)), rng.choice(ERRORS), rng.choice(STEPS[2:])
            when = f"{rng.randrange(1, reference.calls[call] + 1)}{rng.choice(('', '+'))}"
            inject = ("-e", f"inject={call}:error={error}:when={when}")
            context = functools.partial(tracing.strace, trial.scratch / "trace", CALLS, *inject)
            return Fault(f"{call} {when} fails with {error}", context, f"saving {step}", f"after {step}")
        case "full at any time":
            first = rng.uniform(0, 0.8 * reference.seconds)
            last = rng.choice(("", rng.uniform(first, reference.seconds)))
            max_free = reference.checkpoint_bytes
        case points, min_room, max_room:
            first = rng.choice(points)
            last = rng.choice(("", rng.choice(POINTS[POINTS.index(first) + 1 :])))
            max_free = int(reference.checkpoint_bytes * rng.uniform(min_room, max_room))
    if rng.random() < 0.15:
        files = rng.choice((0, rng.randrange(1, 8)))
        name, options = f"room for {files} files", lambda: f"nr_inodes={MAX_FILES - os.statvfs(disk).f_ffree + files}"
    else:
        free = rng.choice((0, rng.randrange(max_free)))
        name, options = f"room for {free:,} bytes", lambda: f"size={shutil.disk_usage(disk).used + free}"
    return Fault(name, functools.partial(_remounted, disk, options), first, last)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a small tmpfs. One page of it is used, because a size of 0 would set no limit."""
    path.mkdir()
    _mount("-t", "tmpfs", "-o", LIMITS, "tmpfs", str(path))
    try:
        (path / "page").write_bytes(b"used")
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def _remounted(disk: Path, options: Callable[[], str]) -> Iterator[None]:
    for _ in range(20):  # the run may write meanwhile, and more be used than is allowed
        with contextlib.suppress(subprocess.CalledProcessError):
            _mount("-o", f"remount,{options()}", str(disk))
            break
    else:
        raise RuntimeError(f"{disk} cannot be remounted")
    yield
    _mount("-o", f"remount,rw,{LIMITS}", str(disk))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@dataclass
class Record:
    """The outcome of a run."""

    events: list[str]  # `fault`, `lifted` and the points of the run, in order
    states: dict[str, str]  # checkpoint -> SHA-256 of its variables when it was saved
    error: str = ""  # the guarantee that did not hold meanwhile


class FaultyRun:
    """The program in this process: begins and ends a fault at its points and checks the directory meanwhile."""

    def __init__(self, directory: Path, fault: Fault, checkpoint_bytes: int):
        self._directory, self._fault, self._checkpoint_bytes = directory, fault, checkpoint_bytes
        self._active = contextlib.ExitStack()
        self._record = Record([], {})

    def train(self, output: Path) -> None:
        """Trains and writes the record to a file."""
        hooks.wrap("save", self._watch_save)
        hooks.before("loop", lambda *_: self._reach("training"))
        for moment, change in ((self._fault.first, self._begin), (self._fault.last, self._end)):
            if isinstance(moment, float):
                timer = threading.Timer(moment, change)
                timer.daemon = True
                timer.start()
        self._reach("start")
        try:
            hooks.train((*FLAGS, f"--train_dir={self._directory}"))
        finally:
            files.write_json(output, vars(self._record))
            self._active.close()

    def _reach(self, point: str) -> None:
        """Begins or ends the fault here, if it is due, before the event itself."""
        if point == self._fault.first:
            self._begin()
        elif point == self._fault.last:
            self._end()
        if not point.startswith("after"):
            self._record.events.append(point)

    def _begin(self) -> None:
        self._record.events.append("fault")
        self._active.enter_context(self._fault.context())

    def _end(self) -> None:
        if "lifted" not in self._record.events:
            self._active.close()
            self._record.events.append("lifted")

    def _watch_save(self, save: Callable) -> Callable:
        record = self._record

        def wrapped(run, step, *args):
            self._reach("again" if f"saving {step}" in record.events else f"saving {step}")
            start = len(record.events)
            too_small = shutil.disk_usage(run.path).free < self._checkpoint_bytes
            had_room = "fault" not in record.events or "lifted" in record.events
            saved = save(run, step, *args)
            record.events.append(f"{'saved' if saved else 'failed'} {step}")
            if saved and too_small and "lifted" not in record.events:
                record.error = "space was made for a save"
            if not saved and had_room and "fault" not in record.events[start:]:
                record.error = "a save failed with room"
            self._reach(f"after {step}")
            if _lost_checkpoint(record.events, self._directory):
                record.error = "a checkpoint was removed"
            if saved:
                path = checkpoint.checkpoint_path(run.path, step)
                record.states[path.name] = _digest(path)
            return saved

        return wrapped


def _train(scratch: Path, directory: Path, fault: Fault, checkpoint_bytes: int = 0) -> tuple[Child, Record]:
    hooks.small_data()  # once, in the parent
    scratch.mkdir()
    faulty_run = FaultyRun(directory, fault, checkpoint_bytes)
    with Child(functools.partial(faulty_run.train, scratch / "record"), scratch / "output") as run:
        run.wait()
    check((scratch / "record").exists(), f"ended with {run.exit_code} without a record")
    return run, Record(**files.read_json(scratch / "record"))


@functools.cache
def _reference() -> Reference:
    with harness.scratch_directory() as scratch:
        directory = scratch / "run"
        trace = functools.partial(tracing.strace, scratch / "trace", CALLS)
        traced = Fault("traced", trace, "saving 6", "after 6")  # the first that removes an older one
        run, record = _train(scratch / "first", directory, traced)
        if run.exit_code or len(record.states) != len(STEPS):
            raise RuntimeError(f"the undisturbed run ends with {run.exit_code}: {run.output}")
        weights = files.read_json(directory / files.RESULT)["weights_sha256"]
        size = checkpoint.list_checkpoints(directory)[-1].stat().st_size
        traces = "".join(path.read_text() for path in scratch.glob("trace.*"))
        calls = Counter(re.findall(r"^(\w+)\(", traces, re.MULTILINE))
        return Reference(record.states, weights, size, calls, run.end - run.start)


def _digest(path: Path) -> str:
    """Return the SHA-256 of the variables of a checkpoint; empty if it is damaged."""
    try:
        values, _ = checkpoint.read_checkpoint(path)
    except DataError:
        return ""
    return hashlib.sha256(b"".join(name.encode() + values[name].tobytes() for name in sorted(values))).hexdigest()


def _lost_checkpoint(events: list[str], directory: Path) -> bool:
    """Whether a saved checkpoint is gone that was not the oldest of more than KEPT. A save that failed in its last
    sync may leave one more."""
    saved = [int(event.split()[1]) for event in events if event.startswith("saved")]
    left = set(map(checkpoint.step_of, checkpoint.list_checkpoints(directory)))
    return any(sum(other >= step for other in left) < KEPT for step in saved if step not in left)


def _check_guarantees(directory: Path, run: Child, record: Record, prefix: str = "") -> None:
    reference, exit_code, output, events = _reference(), run.exit_code, run.output, record.events
    result = files.read_json_if_any(directory / files.RESULT)
    started = hooks.STARTED in output
    lifted = "fault" not in events or "lifted" in events[:-1]  # there was room at the last point
    failures = {
        record.error: record.error,
        "traceback": "Traceback" in output,
        f"exit code {exit_code}": exit_code not in ((0, 1) if started else (0, 1, 2)),
        "exit code 1 after the last save": exit_code != 0 and f"saved {LAST}" in events,
        "ended before the last step": exit_code != 0 and started and f"failed {LAST}" not in events,
        "not one line of error": exit_code != 0 and len(re.findall(r"^(?:run|usage): .+$", output, re.MULTILINE)) != 1,
        "a checkpoint is gone": _lost_checkpoint(events, directory),
        "the last checkpoint is gone": exit_code == 0 and runs.newest_saved(directory) != LAST,
        "a checkpoint is damaged": any(
            _digest(path) != reference.states.get(path.name) for path in checkpoint.list_checkpoints(directory)
        ),
        "other weights": started and f"weights sha256 {reference.weights[:16]}" not in output,
        "other result": bool(result) and result["weights_sha256"] != reference.weights,
        "no result": exit_code == 0 and lifted and not result,
    }
    for outcome, failed in failures.items():
        check(not failed, prefix + outcome)


EXPERIMENTS = [Experiment("full disk", (OURS,), 10, 100, fill_disk)]
can_mount = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
if not (can_mount and shutil.which("strace")):
    print("no right to mount a disk, or no strace: no disk is filled")
    EXPERIMENTS.clear()
