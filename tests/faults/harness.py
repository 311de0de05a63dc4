"""The parts of all experiments: trials recorded in a CSV, child processes that can be killed, tables of results.

The parent imports TensorFlow and never initializes it, so that a forked child starts in milliseconds. A child is a
process of its own that can be killed, traced and starved like any other.
"""

import contextlib
import csv
import functools
import hashlib
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FORK = multiprocessing.get_context("fork")
TIMEOUT = 120.0  # seconds that no child takes
FIELDS = ("fault", "subject", "trial", "details", "outcome", "ok", "seconds")


@dataclass
class Trial:
    """One try of a fault."""

    subject: str
    index: int
    rng: random.Random  # of everything random
    scratch: Path  # an empty directory
    details: str = ""  # the fault, so that it can be repeated by hand


class Failed(Exception):
    """A guarantee did not hold; its text is the outcome of the trial."""


def check(guarantee: object, outcome: str) -> None:
    """End a trial as failed with this outcome unless the guarantee holds."""
    if not guarantee:
        raise Failed(outcome)


class Experiment(NamedTuple):
    """A kind of fault; `quick` and `long` are numbers of trials, or return them for a subject.

    `trial` fills in the details and returns the outcome, a category to count, or raises `Failed`.
    """

    name: str
    subjects: Sequence[str]
    quick: int | Callable[[str], int]
    long: int | Callable[[str], int]
    trial: Callable[[Trial], str]


class TrialLog:
    """The trials in a CSV file. A finished trial is one row and is not repeated."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(csv.DictReader(path.read_text().splitlines(keepends=True))) if path.exists() else []
        self.rows = [row for row in rows if row["seconds"]]  # drops a row that was cut short
        self._writer = csv.DictWriter(path.open("w", buffering=1, newline=""), FIELDS)
        self._writer.writeheader()
        self._writer.writerows(self.rows)

    def of(self, fault: str, subject: str) -> list[dict]:
        """Return the rows of one fault and subject."""
        return [row for row in self.rows if (row["fault"], row["subject"]) == (fault, subject)]

    def add(self, *values: object) -> None:
        """Write one row, whose values are in the order of FIELDS."""
        self.rows.append(dict(zip(FIELDS, map(str, values), strict=True)))
        self._writer.writerow(self.rows[-1])


def code_digest(*folders: Path) -> str:
    """Eight digits that are others where a file of the folders is: trials of other code are not continued."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cfg")):
        digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def run(experiment: Experiment, log: TrialLog, *, long: bool, seed: int) -> None:
    """Run the trials of an experiment that are not in the log yet."""
    for subject in experiment.subjects:
        count = experiment.long if long else experiment.quick
        count = count(subject) if callable(count) else count
        done = {int(row["trial"]) for row in log.of(experiment.name, subject)}
        for index in sorted(set(range(count)) - done):
            rng = random.Random(f"{seed}/{experiment.name}/{subject}/{index}")
            start, ok = time.monotonic(), True
            with scratch_directory() as scratch:
                trial = Trial(subject, index, rng, scratch)
                try:
                    outcome = experiment.trial(trial)
                except Failed as failure:
                    outcome, ok = str(failure), False
            seconds = time.monotonic() - start
            log.add(experiment.name, subject, index, trial.details, outcome, ok, f"{seconds:.3f}")
            if sys.stdout.isatty():
                print(f"\r\033[K{experiment.name} {subject} {index + 1}/{count}", end="\r", flush=True)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a temporary directory, in memory where possible."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=parent, ignore_cleanup_errors=True) as path:
        yield Path(path)


def results_table(log: TrialLog) -> str:
    """Trials, failures, the bound on their rate and the outcomes of each fault and subject.

    If none of n random trials failed, the failure rate is below 3/n with 95 % confidence. An outcome is counted
    without what follows its colon.
    """
    rows = []
    for fault, subject in dict.fromkeys((row["fault"], row["subject"]) for row in log.rows):
        trials = log.of(fault, subject)
        failures = sum(row["ok"] != "True" for row in trials)
        bound = "" if failures else f"{min(100, 300 / len(trials)):.3g} %"
        counts = Counter(row["outcome"].split(":")[0] for row in trials).most_common()
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in counts)
        rows.append((fault, subject, f"{len(trials):,}", f"{failures:,}", bound, outcomes))
    return table(("fault", "subject", "trials", "failures", "rate below (95 %)", "outcomes"), rows)


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
    return table(("signal", "responses", "median", "largest"), rows)


def table(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """Return a table in Markdown; an empty string without rows."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) if rows else ""


class Child:
    """`with Child(function, output) as child:` leads a process group of its own, killed at the end of the block.

    What it prints is appended to the file `output`.
    """

    def __init__(self, function: Callable[[], Any], output: Path):
        self._function, self._output = function, output
        self._process = FORK.Process(target=self._call, daemon=True)
        self.start = time.monotonic()
        self._process.start()
        self.pid = self._process.pid  # also of its process group
        with contextlib.suppress(OSError):  # parent and child both set it, so that neither has to wait
            os.setpgid(self.pid, self.pid)

    def _call(self) -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a trace of the trial itself is of no interest
        _redirect_output(self._output)
        self._function()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.exit_code is None:
            self.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -number of the signal that ended it."""
        return self._process.exitcode

    def wait(self, seconds: float = TIMEOUT) -> bool:
        """Whether it ends within these seconds. Polls, as `join` blocks on a child that called `exec`."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.001)
        self.end = time.monotonic()
        return self.exit_code is not None

    @property
    def output(self) -> str:
        """All it printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    @property
    def last_line(self) -> str:
        """The last line it printed, without what differs from trial to trial."""
        line = self.output.strip().rpartition("\n")[2]
        return re.sub(r"\d+", "N", line.replace(str(self._output.parent), ""))[:100] or "nothing printed"


def in_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function` in a child with TensorFlow that all calls share; fail if it dies or hangs."""
    try:
        return _worker().submit(function, *arguments).result(TIMEOUT)
    except (BrokenProcessPool, TimeoutError) as error:
        for child in multiprocessing.active_children():
            child.kill()
        _worker.cache_clear()
        raise Failed("hung" if isinstance(error, TimeoutError) else "died") from error


@functools.cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, FORK, initializer=_redirect_output, initargs=(os.devnull,))


def _redirect_output(path: str | Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
