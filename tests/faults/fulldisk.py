"""A disk that is full, for a while or for good, at any moment of a run; calls that fail as on a bad one.

Whole runs write to a small disk in memory. The run stops at each point of its way until the fault is made or lifted
there, so that a trial can be repeated. Needs root, for the disk, and strace, for the calls.
"""

import contextlib
import functools
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cifar_towers import trainer
from cifar_towers.checkpointing import checkpoint as checkpoints
from cifar_towers.cli import main
from cifar_towers.data import synthetic
from cifar_towers.files import atomic_io
from tests.faults import harness
from tests.faults.harness import Experiment, Outcome
from tests.faults.subjects import OURS

KEPT, LAST = 2, 12
STEPS = tuple(range(2, LAST + 1, 2))  # those that are saved
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--crop=24", "--shift=0", "--batch_size=20", "--precision=float32"),
    *("--num_gpus=2", "--summary_every_steps=1", "--eval_every_epochs=0"),
    *(f"--max_steps={LAST}", "--checkpoint_every_steps=2", f"--keep_checkpoints={KEPT}"),
)
POINTS = ("start", "training", *(f"{what} {step}" for step in STEPS for what in ("saving", "after")), "again")
TIMEOUT = 120.0  # seconds, of a run that takes two
BYTES, FILES = 64 * 2**20, 500  # what the disk has room for
CALLS = ("write", "pwrite64", "openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "fsync", "fdatasync")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")


class SmallDisk:
    """A small file system of its own, with room to be taken away."""

    def __init__(self, path: Path):
        self.path = path
        self._ballast = path / "ballast"

    def __enter__(self) -> "SmallDisk":
        self.path.mkdir()
        _call("mount", "-t", "tmpfs", "-o", f"size={BYTES},nr_inodes={FILES}", "tmpfs", self.path)
        self._ballast.mkdir()
        return self

    def __exit__(self, *_):
        _call("umount", "--lazy", self.path)

    def room(self) -> int:
        """In bytes."""
        state = os.statvfs(self.path)
        return state.f_bavail * state.f_frsize

    def fill(self, left: int) -> None:
        """Leaves room for `left` bytes."""
        with (self._ballast / "bytes").open("wb") as file:
            for _ in range(20):  # the run may take some of the room meanwhile
                if (excess := self.room() - left) > 0:
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, excess)

    def fill_with_files(self, left: int) -> None:
        """Leaves room for `left` new files."""
        number = 0
        try:
            for number in range(FILES):
                (self._ballast / str(number)).touch()
        except OSError:
            for spare in range(max(0, number - left), number):
                (self._ballast / str(spare)).unlink()

    def clear(self) -> None:
        """Gives all room back."""
        for file in self._ballast.iterdir():
            file.unlink()

    def remount(self, mode: str) -> None:
        """`ro`: to be read only; `rw`."""
        _call("mount", "-o", f"remount,{mode}", self.path)


class Tracer:
    """strace on every thread of a process, between `begin` and `end`."""

    def __init__(self, output: Path, *options: str):
        calls = ",".join(f"?{name}" for name in CALLS)  # of which this processor may not have all
        self._command = ["strace", "-f", "-qq", "-o", str(output), "-e", f"trace={calls}", *options]
        self._process: subprocess.Popen | None = None

    def begin(self, child: int) -> None:
        """Returns as soon as it traces."""
        self._process = subprocess.Popen([*self._command, "-p", str(child)], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while any("TracerPid:\t0\n" in path.read_text() for path in Path(f"/proc/{child}/task").glob("*/status")):
            if time.monotonic() > end:
                raise TimeoutError("strace does not begin")
            time.sleep(0.002)

    def end(self) -> None:
        """Leaves the process as it was."""
        if self._process:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()


def _call(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


# A run that stops at each point ------------------------------------------------------------------------------------


@functools.cache
def _small_set():
    return synthetic.make(400, 0, 0), synthetic.make(100, 0, 1)


def _train(directory: Path, told: Path, at: Callable[[str, int], None]) -> int | None:
    """The exit code of a run in a child; `at(point, process id)` is called at each point, and with "" in between."""
    _small_set()
    ours, theirs = socket.socketpair()
    end = time.monotonic() + TIMEOUT

    def run():
        ours.close()
        _stop_at_points(theirs)
        sys.argv = ["train.py", *FLAGS, f"--train_dir={directory}"]
        main.train()

    child = harness.fork(run, told)
    theirs.close()
    with ours:
        try:
            while time.monotonic() < end:
                point = ""
                if select.select([ours], [], [], 0.005)[0]:
                    point = ours.recv(100).decode()
                    if not point:
                        break
                at(point, child)
                if point:
                    ours.send(b".")
        except BaseException:
            harness.wait(child, 0)
            raise
    return harness.wait(child, max(0.0, end - time.monotonic()))


def _stop_at_points(parent: socket.socket) -> None:
    """Has the run of this process tell where it is, and wait for an answer each time."""

    def tell(point: str) -> None:
        parent.send(point.encode())  # by sendto, which is no call that is made to fail
        parent.recv(1)

    save, train = checkpoints.save_checkpoint, trainer.Trainer._train

    def telling_save(train_dir, step, *arguments):
        tell(f"saving {step}")
        how = "failed"
        try:
            path = save(train_dir, step, *arguments)
            how = "saved"
            return path
        finally:
            tell(f"{how} {step}")

    def telling_train(self, first_step):
        tell("training")
        return train(self, first_step)

    synthetic.load = lambda seed=0: _small_set()
    checkpoints.save_checkpoint, trainer.Trainer._train = telling_save, telling_train
    tell("start")


class Expected(NamedTuple):
    """Of a run that nothing happens to."""

    states: dict[int, str]  # SHA-256 of the variables in each checkpoint
    weights: str
    bytes: int  # of one checkpoint
    calls: Counter  # in saving one
    seconds: float  # it took


@functools.cache
def _undisturbed() -> Expected:
    states: dict[int, str] = {}
    start = time.monotonic()
    with harness.scratch() as scratch:
        directory, counted = scratch / "run", scratch / "calls"
        tracer = Tracer(counted)

        def at(point: str, child: int) -> None:
            if point == "saving 6":  # the first that removes an older one
                tracer.begin(child)
            if point == "saved 6":
                tracer.end()
            if point.startswith("saved"):
                states[int(point.split()[1])] = _state(checkpoints.list_checkpoints(directory)[-1])

        code = _train(directory, scratch / "told", at)
        if code or tuple(states) != STEPS:
            raise RuntimeError(f"the run that nothing happens to ends with {code}: {(scratch / 'told').read_text()}")
        weights = json.loads((directory / "result.json").read_text())["weights_sha256"]
        size = sum(path.stat().st_size for path in checkpoints.list_checkpoints(directory)[-1].iterdir())
        calls = Counter(re.findall(r"^\d+ +(\w+)\(", counted.read_text(), re.MULTILINE))
        return Expected(states, weights, size, calls, time.monotonic() - start)


def _state(checkpoint: Path) -> str:
    return atomic_io.sha256(checkpoint / "state.data-00000-of-00001")


# Faults -----------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """From one point, or time in seconds, to another or, where that is empty, for good.

    `reached`: whether the run met it, where that can be told.
    """

    what: str
    begin: Callable[[int], None]
    end: Callable[[], None]
    first: str | float
    last: str | float
    reached: Callable[[], bool] = lambda: True


def _no_room(rng: random.Random, disk: SmallDisk, first: str | float, last: str | float, most: int) -> Fault:
    """Of bytes, of which less than `most` are left; sometimes of files."""
    if rng.random() < 0.15:
        left = rng.choice((0, rng.randrange(1, 8)))
        return Fault(f"room for {left} files", lambda child: disk.fill_with_files(left), disk.clear, first, last)
    left = rng.choice((0, rng.randrange(most)))
    return Fault(f"room for {left:,} bytes", lambda child: disk.fill(left), disk.clear, first, last)


def _until(rng: random.Random, first: str) -> str:
    """A later point, or none."""
    return rng.choice(("", rng.choice(POINTS[POINTS.index(first) + 1 :])))


def _full_at(*points: str, least: float, most: float) -> Callable[[random.Random, SmallDisk, Expected], Fault]:
    """Full from one of some points on; `least` and `most`: how many checkpoints still have room."""

    def fault(rng: random.Random, disk: SmallDisk, expected: Expected) -> Fault:
        first = rng.choice(points)
        return _no_room(rng, disk, first, _until(rng, first), int(expected.bytes * rng.uniform(least, most)))

    return fault


def _full_at_any_time(rng: random.Random, disk: SmallDisk, expected: Expected) -> Fault:
    first = rng.uniform(0, 0.8 * expected.seconds)
    return _no_room(rng, disk, first, rng.choice(("", rng.uniform(first, expected.seconds))), expected.bytes)


def _read_only(rng: random.Random, disk: SmallDisk, expected: Expected) -> Fault:
    """Before the start: a disk with files that are being written cannot be made so."""
    return Fault("read only", lambda child: disk.remount("ro"), lambda: disk.remount("rw"), "start", "")


def _failing_call(rng: random.Random, disk: SmallDisk, expected: Expected) -> Fault:
    """One, or all from one on, while a checkpoint is saved."""
    call, error, step = rng.choice(sorted(expected.calls)), rng.choice(ERRORS), rng.choice(STEPS[2:])
    number, on = rng.randrange(1, expected.calls[call] + 1), rng.choice(("", "+"))
    output = disk.path.parent / "calls"
    tracer = Tracer(output, "-e", f"inject={call}:error={error}:when={number}{on}")
    what = f"{call} {number}{on} fails with {error}"
    return Fault(
        what, tracer.begin, tracer.end, f"saving {step}", f"after {step}", lambda: "(INJECTED)" in output.read_text()
    )


STAGES = (
    _full_at("start", least=0, most=3),
    _full_at("training", least=0, most=1),
    _full_at(*(f"after {step}" for step in STEPS[:-1]), least=0, most=1),
    _full_at(*(f"saving {step}" for step in STEPS[:-1]), least=1, most=1),
    _failing_call,
    _full_at(f"saving {LAST}", least=1, most=1),
    _full_at_any_time,
    _failing_call,
    _full_at(*(f"saving {step}" for step in STEPS[1:-1]), least=1, most=1),
    _read_only,
)


# A trial ----------------------------------------------------------------------------------------------------------


class Watcher:
    """Makes and lifts a fault where it is due, and notes what the run does meanwhile.

    Attributes:
      log: `fault`, `lifted`, and the points in between, in order.
      wrong: what was seen on the way that should not be.
    """

    def __init__(self, disk: SmallDisk, directory: Path, fault: Fault, expected: Expected):
        self.log: list[str] = []
        self.wrong = ""
        self._disk, self._directory, self._fault, self._expected = disk, directory, fault, expected
        self._start = time.monotonic()
        self._too_little = False  # room for what is being saved

    def at(self, point: str, child: int) -> None:
        """The run is at a point, or, where that is empty, anywhere."""
        what, _, step = point.partition(" ")
        if what in ("saved", "failed"):
            self.log.append(point)
            self._look(what)
            self._act(f"after {step}", child)
        else:
            self._act("again" if point in self.log else point, child)
            if point:
                self.log.append(point)
                self._too_little = what == "saving" and self._disk.room() < self._expected.bytes

    def end(self) -> None:
        """Lifts what is still there."""
        if "fault" in self.log and "lifted" not in self.log:
            self._fault.end()
            self.log.append("lifted")

    def _act(self, point: str, child: int) -> None:
        if "fault" not in self.log and self._due(self._fault.first, point):
            self._fault.begin(child)
            self.log.append("fault")
        elif "lifted" not in self.log and self._due(self._fault.last, point):
            self.end()
            self._too_little = False

    def _due(self, when: str | float, point: str) -> bool:
        if isinstance(when, float):
            return time.monotonic() - self._start >= when
        return point == when != ""

    def _look(self, what: str) -> None:
        if what == "saved" and self._too_little:
            self.wrong = "room was made"
        if _too_few(self.log, self._directory):
            self.wrong = "a checkpoint was removed"


def _saved(log: list[str]) -> list[int]:
    return [int(event.split()[1]) for event in log if event.startswith("saved")]


def _standing(directory: Path) -> dict[int, Path]:
    return {int(path.name.split("-")[1]): path for path in checkpoints.list_checkpoints(directory)}


def _too_few(log: list[str], directory: Path) -> bool:
    """Whether one that was saved is gone and was not the oldest of more than KEPT. One more than was told may stand:
    where only the last sync failed."""
    standing = _standing(directory)
    return any(sum(other >= step for other in standing) < KEPT for step in _saved(log) if step not in standing)


def _full_disk(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """Promised: the run goes on, older checkpoints stay, weights are as without the fault; and where the last could
    not be saved, one line says so, and the same command goes on when there is room."""
    expected = _undisturbed()
    with SmallDisk(scratch / "disk") as disk:
        directory, told = disk.path / "run", scratch / "told"
        fault = STAGES[number % len(STAGES)](rng, disk, expected)
        what = f"{fault.what}, from {_named(fault.first)} to {_named(fault.last)}"
        watcher = Watcher(disk, directory, fault, expected)
        try:
            code = _train(directory, told, watcher.at)
            log = list(watcher.log)
            wrong = watcher.wrong or _wrong(expected, directory, code, log, told.read_text())
        finally:
            watcher.end()
        if wrong:
            return Outcome(what, wrong, False)
        if "fault" not in log:
            return Outcome(what, "done before the fault", isinstance(fault.first, float))
        if not fault.reached():
            return Outcome(what, "fault not reached", False)
        if not code:
            failed = any(event.startswith("failed") for event in log)
            return Outcome(what, "done, saves failed" if failed else "done, all saved", True)
        told.unlink()
        again = _train(directory, told, lambda point, child: None)
        wrong = _wrong(expected, directory, again, [f"saved {LAST}"], told.read_text())
        if again or wrong:
            return Outcome(what, f"started again: {wrong or f'exit code {again}'}", False)
        return Outcome(what, "last not saved, then done" if "training" in log else "not begun, then done", True)


def _named(when: str | float) -> str:
    return f"{when:.3f} s" if isinstance(when, float) else f"'{when}'" if when else "the end"


def _wrong(expected: Expected, directory: Path, code: int | None, log: list[str], told: str) -> str:
    """What is not as promised after a run; empty if nothing is."""
    if "Traceback" in told:
        return "traceback"
    standing = _standing(directory)
    begun = "writing to" in told
    if code != 0:
        if code not in ((1,) if begun else (1, 2)) or f"saved {LAST}" in log:
            return f"exit code {code}"
        if begun and f"failed {LAST}" not in log:
            return f"exit code {code} before the end"
        if len(re.findall(r"^(?:run|usage): .+$", told, re.MULTILINE)) != 1:
            return "not one line of error"
    if not _failures_are_the_faults(log):
        return "a save failed with room"
    if _too_few(log, directory) or (code == 0 and LAST not in standing):
        return "a checkpoint is gone"
    if any(atomic_io.validate(path) or _state(path) != expected.states.get(step) for step, path in standing.items()):
        return "a checkpoint is damaged"
    if begun and f"weights sha256 {expected.weights[:16]}" not in told:
        return "other weights"
    result = directory / "result.json"
    if result.exists() and json.loads(result.read_text())["weights_sha256"] != expected.weights:
        return "other result"
    if code == 0 and _over(log) and not result.exists():
        return "no result"
    return ""


def _failures_are_the_faults(log: list[str]) -> bool:
    """Whether each save that failed did so while the fault was there."""
    there = hit = False
    for event in log:
        if event in ("fault", "lifted"):
            there = event == "fault"
            hit |= there
        elif event.startswith("saving"):
            hit = there
        elif event.startswith("failed") and not hit:
            return False
    return True


def _over(log: list[str]) -> bool:
    """Whether there was room again, or still, at the run's last point."""
    return "fault" not in log or "lifted" in log[:-1]


def _possible() -> bool:
    with harness.scratch() as scratch:
        try:
            with SmallDisk(scratch / "disk"):
                return shutil.which("strace") is not None
        except (OSError, subprocess.CalledProcessError):
            return False


EXPERIMENTS = []
if _possible():
    EXPERIMENTS.append(Experiment("full disk", (OURS,), 10, 100, _full_disk))
else:
    print("no right to mount a disk, or no strace: no disk is filled")
