"""What all experiments share: trials recorded in a CSV, child processes that can be killed, tables of results.

The parent imports TensorFlow and never initializes it, so that a forked child starts in milliseconds. A child is a
process of its own that can be killed, traced and starved like any other.
"""

import contextlib
import csv
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FORK = multiprocessing.get_context("fork")
TIMEOUT = 120.0  # seconds that no child takes


class Trial(NamedTuple):
    """One try of a fault: everything random comes from `rng`; `scratch` is an empty directory."""

    subject: str
    index: int
    rng: random.Random
    scratch: Path


class Outcome(NamedTuple):
    """The result of one trial."""

    details: str  # the fault, so that it can be repeated by hand
    outcome: str  # the category to count
    ok: bool  # whether the guarantee held


class Experiment(NamedTuple):
    """A kind of fault, tried on one or more subjects; `quick` and `long` are numbers of trials, or return them."""

    name: str
    subjects: Sequence[str]
    quick: int | Callable[[str], int]
    long: int | Callable[[str], int]
    trial: Callable[[Trial], Outcome]


class TrialLog:
    """The trials in a CSV file. A finished trial is one row and is not repeated."""

    FIELDS = ("fault", "subject", "trial", "details", "outcome", "ok", "seconds")

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.rows: list[dict] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if row["seconds"]]  # drops a row that was cut short
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.FIELDS)
            writer.writeheader()
            writer.writerows(self.rows)

    def of(self, fault: str, subject: str) -> list[dict]:
        """The rows of one fault and subject."""
        return [row for row in self.rows if (row["fault"], row["subject"]) == (fault, subject)]

    def add(self, *values: object) -> None:
        """Writes one row, whose values are in the order of FIELDS."""
        self.rows.append(dict(zip(self.FIELDS, map(str, values), strict=True)))
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self.FIELDS).writerow(self.rows[-1])


def run(experiment: Experiment, log: TrialLog, *, long: bool, seed: int) -> None:
    """Runs the trials of an experiment that are not in the log yet."""
    for subject in experiment.subjects:
        count = experiment.long if long else experiment.quick
        count = count(subject) if callable(count) else count
        done = {int(row["trial"]) for row in log.of(experiment.name, subject)}
        for index in sorted(set(range(count)) - done):
            rng = random.Random(f"{seed}/{experiment.name}/{subject}/{index}")
            start = time.monotonic()
            with scratch_directory() as scratch:
                outcome = experiment.trial(Trial(subject, index, rng, scratch))
            log.add(experiment.name, subject, index, *outcome, f"{time.monotonic() - start:.3f}")
            if sys.stdout.isatty():
                print(f"\r{experiment.name} {subject} {index + 1}/{count}", end="\033[K", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="")


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A temporary directory, in memory where possible."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=parent, ignore_cleanup_errors=True) as path:
        yield Path(path)


# Tables ----------------------------------------------------------------------------------------------------------


def results_table(log: TrialLog) -> str:
    """Trials, failures, the bound on their rate and the outcomes of each fault and subject.

    If none of n random trials failed, the failure rate is below 3/n with 95 % confidence. An outcome is counted
    without what follows its colon.
    """
    rows = []
    for fault, subject in dict.fromkeys((row["fault"], row["subject"]) for row in log.rows):
        trials = log.of(fault, subject)
        failures = sum(row["ok"] != "True" for row in trials)
        bound = "" if failures else f"{min(100, 300 / len(trials)):.2g} %"
        counts = Counter(row["outcome"].split(":")[0] for row in trials).most_common()
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in counts)
        rows.append((fault, subject, f"{len(trials):,}", f"{failures:,}", bound, outcomes))
    return _table(("fault", "subject", "trials", "failures", "rate below (95 %)", "outcomes"), rows)


def response_times(log: TrialLog) -> str:
    """Seconds from a signal to the end of the processes it should end, for each fault that sends one."""
    seconds: dict[str, list[float]] = {}
    for row in log.rows:
        if match := re.search(r"ended ([\d.]+) s after the signal", row["details"]):
            seconds.setdefault(row["fault"], []).append(float(match[1]))
    rows = [
        (fault, len(times), f"{statistics.median(times):.3f} s", f"{max(times):.3f} s")
        for fault, times in seconds.items()
    ]
    return _table(("signal", "responses", "median", "largest"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) if rows else ""


# Child processes -------------------------------------------------------------------------------------------------


def fork(function: Callable[[], Any], output: str | Path = os.devnull) -> multiprocessing.Process:
    """A child that calls `function` as the leader of a process group of its own; what it prints goes to `output`."""

    def call():
        os.setpgid(0, 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        function()

    sys.stdout.flush()
    child = FORK.Process(target=call, daemon=True)
    child.start()
    with contextlib.suppress(OSError):  # parent and child both set it, so that neither has to wait
        os.setpgid(child.pid, child.pid)
    return child


def wait(child: multiprocessing.Process, seconds: float = TIMEOUT) -> bool:
    """Whether the child ends within these seconds. Polls, as `join` blocks on a child that called `exec`."""
    end = time.monotonic() + seconds
    while child.exitcode is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class ChildError(Exception):
    """An exception raised in a child, as text: `DataLossError: ...`."""


class ChildDied(Exception):
    """A child did not answer."""


class Worker:
    """A child that answers `worker(*arguments)` with what `function` returns there, or raises `ChildError`.

    A child that dies or exceeds the timeout raises `ChildDied`, and the next call starts a new one.
    """

    def __init__(self, function: Callable[..., Any], timeout: float = TIMEOUT):
        self._function, self._timeout = function, timeout
        self._child: multiprocessing.Process | None = None

    def __call__(self, *arguments: Any) -> Any:
        if not self._child:
            self._pipe, pipe = FORK.Pipe()
            self._child = fork(lambda: self._serve(pipe))
            pipe.close()
        try:
            self._pipe.send(arguments)
            if not self._pipe.poll(self._timeout):
                self.close()
                raise ChildDied("hung")
            value, error = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self.close()
            raise ChildDied("died") from error
        if error:
            raise ChildError(error)
        return value

    def _serve(self, pipe) -> None:
        self._pipe.close()
        while True:
            arguments = pipe.recv()
            try:
                answer = self._function(*arguments), None
            except Exception as error:
                answer = None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            pipe.send(answer)

    def close(self) -> None:
        """Ends the child."""
        if self._child:
            self._child.kill()
            self._child.join()
            self._pipe.close()
            self._child = None


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns or raises in a new child."""
    with contextlib.closing(Worker(function)) as worker:
        return worker(*arguments)
