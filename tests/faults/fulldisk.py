"""Runs on a disk that is full or read-only, for a while or for good, and file system calls that fail.

Whole runs write to a small disk in memory. A run waits at each of its `POINTS` while the fault begins or ends, so that
a trial can be repeated. Needs root, to mount the disk, and strace, to make calls fail.
"""

import contextlib
import functools
import os
import random
import re
import select
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cifar_towers.checkpointing import checkpoint
from cifar_towers.files import atomic_io, run_files
from tests.faults import harness, hooks, tracing
from tests.faults.harness import Experiment, Outcome, Trial
from tests.faults.subjects import OURS

KEPT, LAST = 2, 12
STEPS = tuple(range(2, LAST + 1, 2))  # those that are saved
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--crop=24", "--shift=0", "--batch_size=20", "--precision=float32"),
    *("--num_gpus=2", "--summary_every_steps=1", "--eval_every_epochs=0"),
    *(f"--max_steps={LAST}", "--checkpoint_every_steps=2", f"--keep_checkpoints={KEPT}"),
)
POINTS = ("start", "training", *(f"{event} {step}" for step in STEPS for event in ("saving", "after")), "again")
DISK_BYTES, DISK_FILES = 64 * 2**20, 500
CALLS = ("write", "pwrite64", "openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "fsync", "fdatasync")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")


class SmallDisk:
    """`with SmallDisk(path) as disk:` a small tmpfs whose free space can be taken and given back."""

    def __init__(self, path: Path):
        self.path = path
        self._ballast = path / "ballast"

    def __enter__(self) -> "SmallDisk":
        self.path.mkdir()
        _command("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},nr_inodes={DISK_FILES}", "tmpfs", self.path)
        self._ballast.mkdir()
        return self

    def __exit__(self, *_):
        _command("umount", "--lazy", self.path)

    def free(self) -> int:
        """Free bytes."""
        return shutil.disk_usage(self.path).free

    def fill(self, free: int) -> None:
        """Leaves this many bytes free."""
        with (self._ballast / "bytes").open("wb") as file:
            for _ in range(20):  # the run may write meanwhile
                if (excess := self.free() - free) > 0:
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, excess)

    def fill_with_files(self, free: int) -> None:
        """Leaves room for this many new files."""
        with contextlib.suppress(OSError):  # the run may create some meanwhile
            for number in range(os.statvfs(self.path).f_ffree - free):
                (self._ballast / str(number)).touch()

    def clear(self) -> None:
        """Gives all space back."""
        for file in self._ballast.iterdir():
            file.unlink()

    def remount(self, mode: str) -> None:
        """`ro` makes it read-only, `rw` writable."""
        _command("mount", "-o", f"remount,{mode}", self.path)


def _command(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


# A run that waits at each point ------------------------------------------------------------------------------------


def _train(directory: Path, output: Path, at: Callable[[str, int], None]) -> int | None:
    """The exit code of a run in a child; calls `at(point, pid)` at each point, and `at("", pid)` in between."""
    hooks.small_data()  # once, in the parent
    ours, theirs = socket.socketpair()
    flags = (*FLAGS, f"--train_dir={directory}")
    child = harness.fork(lambda: hooks.train(flags, prepare=functools.partial(_wait_at_points, theirs)), output)
    theirs.close()
    end = time.monotonic() + harness.TIMEOUT
    with ours, contextlib.ExitStack() as stack:
        stack.callback(child.join)
        stack.callback(child.kill)
        while time.monotonic() < end:
            point = ""
            if select.select([ours], [], [], 0.005)[0]:
                point = ours.recv(100).decode()
                if not point:
                    break
            at(point, child.pid)
            if point:
                ours.send(b".")
        harness.wait(child, end - time.monotonic())
        return child.exitcode


def _wait_at_points(parent: socket.socket) -> None:
    """Makes the program in this process announce each point to the parent and wait for an answer."""

    def wait(point: str) -> None:
        parent.send(point.encode())  # by `sendto`, which is never made to fail
        parent.recv(1)

    def announced_save(save):
        def wrapped(train_dir, step, *args):
            wait(f"saving {step}")
            event = "failed"
            try:
                path = save(train_dir, step, *args)
                event = "saved"
                return path
            finally:
                wait(f"{event} {step}")

        return wrapped

    def announced_loop(train):
        def wrapped(*args):
            wait("training")
            return train(*args)

        return wrapped

    hooks.wrap("save", announced_save)
    hooks.wrap("loop", announced_loop)
    wait("start")


class Reference(NamedTuple):
    """What an undisturbed run leaves and takes."""

    states: dict[int, str]  # step -> SHA-256 of the variables in its checkpoint
    weights: str
    checkpoint_bytes: int
    calls: Counter  # in one save
    seconds: float


@functools.cache
def _reference() -> Reference:
    states: dict[int, str] = {}
    start = time.monotonic()
    with harness.scratch_directory() as scratch:
        directory, output, trace = (scratch / name for name in ("run", "output", "trace"))
        strace = tracing.Strace(trace, CALLS)

        def at(point: str, pid: int) -> None:
            if point == "saving 6":  # the first that removes an older one
                strace.attach(pid)
            if point == "saved 6":
                strace.detach()
            if point.startswith("saved"):
                states[int(point.split()[1])] = _state_sha256(checkpoint.list_checkpoints(directory)[-1])

        exit_code = _train(directory, output, at)
        if exit_code or tuple(states) != STEPS:
            raise RuntimeError(f"the undisturbed run ends with {exit_code}: {output.read_text()}")
        weights = run_files.read_json(directory / "result.json")["weights_sha256"]
        size = sum(path.stat().st_size for path in checkpoint.list_checkpoints(directory)[-1].iterdir())
        calls = Counter(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.MULTILINE))
        return Reference(states, weights, size, calls, time.monotonic() - start)


def _state_sha256(path: Path) -> str:
    return atomic_io.sha256(path / "state.data-00000-of-00001")


# Faults -----------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A fault from one point, or time in seconds, to another; for good if `last` is empty."""

    name: str
    begin: Callable[[int], object]
    end: Callable[[], object]
    first: str | float
    last: str | float
    reached: Callable[[], bool] = lambda: True  # whether the run was affected


MakeFault = Callable[[random.Random, SmallDisk, Reference], Fault]


def _full(rng: random.Random, disk: SmallDisk, first: str | float, last: str | float, max_free: int) -> Fault:
    """Less than `max_free` bytes free, or sometimes no room for new files."""
    if rng.random() < 0.15:
        files = rng.choice((0, rng.randrange(1, 8)))
        return Fault(f"room for {files} files", lambda pid: disk.fill_with_files(files), disk.clear, first, last)
    free = rng.choice((0, rng.randrange(max_free)))
    return Fault(f"room for {free:,} bytes", lambda pid: disk.fill(free), disk.clear, first, last)


def _full_from(*points: str, min_room: float, max_room: float) -> MakeFault:
    """A full disk from one of these points, with room for at most so many checkpoints."""

    def make(rng: random.Random, disk: SmallDisk, reference: Reference) -> Fault:
        first = rng.choice(points)
        last = rng.choice(("", rng.choice(POINTS[POINTS.index(first) + 1 :])))
        return _full(rng, disk, first, last, int(reference.checkpoint_bytes * rng.uniform(min_room, max_room)))

    return make


def _full_at_any_time(rng: random.Random, disk: SmallDisk, reference: Reference) -> Fault:
    first = rng.uniform(0, 0.8 * reference.seconds)
    last = rng.choice(("", rng.uniform(first, reference.seconds)))
    return _full(rng, disk, first, last, reference.checkpoint_bytes)


def _read_only(rng: random.Random, disk: SmallDisk, reference: Reference) -> Fault:
    """From the start, as a disk with files open for writing cannot be remounted."""
    return Fault("read-only", lambda pid: disk.remount("ro"), lambda: disk.remount("rw"), "start", "")


def _failing_call(rng: random.Random, disk: SmallDisk, reference: Reference) -> Fault:
    """One call of a save fails, or all calls of this name from it on."""
    call, error, step = rng.choice(sorted(reference.calls)), rng.choice(ERRORS), rng.choice(STEPS[2:])
    when = f"{rng.randrange(1, reference.calls[call] + 1)}{rng.choice(('', '+'))}"
    trace = disk.path.parent / "trace"
    strace = tracing.Strace(trace, CALLS, "-e", f"inject={call}:error={error}:when={when}")
    return Fault(
        f"{call} {when} fails with {error}",
        strace.attach,
        strace.detach,
        f"saving {step}",
        f"after {step}",
        lambda: "(INJECTED)" in trace.read_text(),
    )


FAULTS = (
    _full_from("start", min_room=0, max_room=3),
    _full_from("training", min_room=0, max_room=1),
    _full_from(*(f"after {step}" for step in STEPS[:-1]), min_room=0, max_room=1),
    _full_from(*(f"saving {step}" for step in STEPS[:-1]), min_room=1, max_room=1),
    _failing_call,
    _full_from(f"saving {LAST}", min_room=1, max_room=1),
    _full_at_any_time,
    _failing_call,
    _full_from(*(f"saving {step}" for step in STEPS[1:-1]), min_room=1, max_room=1),
    _read_only,
)

# A trial ----------------------------------------------------------------------------------------------------------


class Controller:
    """Begins and ends a fault at its points and checks the directory meanwhile.

    Attributes:
      events: `fault`, `lifted` and the points of the run, in order.
      error: what broke a guarantee; empty if nothing did.
    """

    def __init__(self, disk: SmallDisk, directory: Path, fault: Fault, reference: Reference):
        self.events: list[str] = []
        self.error = ""
        self._disk, self._directory, self._fault, self._reference = disk, directory, fault, reference
        self._start = time.monotonic()
        self._too_small = False  # the free space, for the checkpoint that is being saved

    def at(self, point: str, pid: int) -> None:
        """The run is at this point; between two points if empty."""
        event, _, step = point.partition(" ")
        if event in ("saved", "failed"):
            self.events.append(point)
            if event == "saved" and self._too_small:
                self.error = "space was made for a save"
            if _lost_checkpoint(self.events, self._directory):
                self.error = "a checkpoint was removed"
            self._begin_or_end(f"after {step}", pid)
        else:
            self._begin_or_end("again" if point in self.events else point, pid)
            if point:
                self.events.append(point)
                self._too_small = event == "saving" and self._disk.free() < self._reference.checkpoint_bytes

    def end(self) -> None:
        """Ends a fault that still lasts."""
        if "fault" in self.events and "lifted" not in self.events:
            self._fault.end()
            self.events.append("lifted")

    def _begin_or_end(self, point: str, pid: int) -> None:
        if "fault" not in self.events and self._is_due(self._fault.first, point):
            self._fault.begin(pid)
            self.events.append("fault")
        elif "lifted" not in self.events and self._is_due(self._fault.last, point):
            self.end()
            self._too_small = False

    def _is_due(self, when: str | float, point: str) -> bool:
        if isinstance(when, float):
            return time.monotonic() - self._start >= when
        return point == when != ""


def _checkpoints(directory: Path) -> dict[int, Path]:
    return {int(path.name.split("-")[1]): path for path in checkpoint.list_checkpoints(directory)}


def _lost_checkpoint(events: list[str], directory: Path) -> bool:
    """Whether a saved checkpoint is gone that was not the oldest of more than KEPT. A save that failed in its last
    sync may leave one more."""
    saved = [int(event.split()[1]) for event in events if event.startswith("saved")]
    left = _checkpoints(directory)
    return any(sum(other >= step for other in left) < KEPT for step in saved if step not in left)


def fill_disk(trial: Trial) -> Outcome:
    """Guaranteed: the run continues, older checkpoints stay and the weights are as without the fault. If the last step
    could not be saved, one line says so, and the same command resumes when there is room."""
    reference = _reference()
    with SmallDisk(trial.scratch / "disk") as disk:
        directory, output = disk.path / "run", trial.scratch / "output"
        fault = FAULTS[trial.index % len(FAULTS)](trial.rng, disk, reference)
        details = f"{fault.name}, from {_point_name(fault.first)} to {_point_name(fault.last)}"
        controller = Controller(disk, directory, fault, reference)
        try:
            exit_code = _train(directory, output, controller.at)
            events = list(controller.events)
            error = controller.error or _broken_guarantee(reference, directory, exit_code, events, output.read_text())
        finally:
            controller.end()
        if error:
            return Outcome(details, error, False)
        if "fault" not in events:
            return Outcome(details, "done before the fault", isinstance(fault.first, float))
        if not fault.reached():
            return Outcome(details, "fault not reached", False)
        if not exit_code:
            failed = any(event.startswith("failed") for event in events)
            return Outcome(details, "done, saves failed" if failed else "done, all saved", True)
        output.unlink()
        exit_code = _train(directory, output, lambda point, pid: None)
        error = _broken_guarantee(reference, directory, exit_code, [f"saved {LAST}"], output.read_text())
        if exit_code or error:
            return Outcome(details, f"restarted: {error or f'exit code {exit_code}'}", False)
        outcome = "last not saved, then done" if "training" in events else "not started, then done"
        return Outcome(details, outcome, True)


def _point_name(when: str | float) -> str:
    return f"{when:.3f} s" if isinstance(when, float) else f"'{when}'" if when else "the end"


def _broken_guarantee(
    reference: Reference, directory: Path, exit_code: int | None, events: list[str], output: str
) -> str:
    """The guarantee that does not hold after a run; empty if all do."""
    left = _checkpoints(directory)
    result = run_files.read_json_if_any(directory / "result.json")
    started = hooks.STARTED in output
    lifted = "fault" not in events or "lifted" in events[:-1]  # there was room at the last point
    checks = {
        "traceback": "Traceback" in output,
        f"exit code {exit_code}": exit_code not in ((0, 1) if started else (0, 1, 2)),
        "exit code 1 after the last save": exit_code != 0 and f"saved {LAST}" in events,
        "ended before the last step": exit_code != 0 and started and f"failed {LAST}" not in events,
        "not one line of error": exit_code != 0 and len(re.findall(r"^(?:run|usage): .+$", output, re.MULTILINE)) != 1,
        "a save failed with room": not _saves_failed_under_fault(events),
        "a checkpoint is gone": _lost_checkpoint(events, directory) or (exit_code == 0 and LAST not in left),
        "a checkpoint is damaged": any(
            atomic_io.validate(path) or _state_sha256(path) != reference.states.get(step) for step, path in left.items()
        ),
        "other weights": started and f"weights sha256 {reference.weights[:16]}" not in output,
        "other result": bool(result) and result["weights_sha256"] != reference.weights,
        "no result": exit_code == 0 and lifted and not result,
    }
    return next((error for error, broken in checks.items() if broken), "")


def _saves_failed_under_fault(events: list[str]) -> bool:
    """Whether each failed save overlapped with the fault."""
    active = overlapped = False
    for event in events:
        if event in ("fault", "lifted"):
            active = event == "fault"
            overlapped |= active
        elif event.startswith("saving"):
            overlapped = active
        elif event.startswith("failed") and not overlapped:
            return False
    return True


def _can_mount_and_trace() -> bool:
    with harness.scratch_directory() as scratch:
        try:
            with SmallDisk(scratch / "disk"):
                return shutil.which("strace") is not None
        except (OSError, subprocess.CalledProcessError):
            return False


EXPERIMENTS = []
if _can_mount_and_trace():
    EXPERIMENTS.append(Experiment("full disk", (OURS,), 10, 100, fill_disk))
else:
    print("no right to mount a disk, or no strace: no disk is filled")
