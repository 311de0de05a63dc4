"""The parts of all experiments: trials recorded in a file, child processes that can be killed, a
summary.

The parent imports TensorFlow and never initializes it, so that a forked child starts in
milliseconds.
"""

import contextlib
import functools
import json
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

from tests.faults.subjects import OURS

FORK = multiprocessing.get_context("fork")
TIMEOUT = 120.0  # seconds that no child takes


@dataclass
class Trial:
    """One try of a fault."""

    subject: str
    index: int
    rng: random.Random  # of everything random
    scratch: Path  # an empty directory
    details: str = ""  # the fault, so that it can be repeated by hand
    # seconds from a fault to the end of the processes that it should end
    response: float | None = None


class Failed(Exception):
    """A guarantee did not hold; its text is the outcome of the trial."""


def check(guarantee: object, outcome: str) -> None:
    """End a trial as failed with this outcome unless the guarantee holds."""
    if not guarantee:
        raise Failed(outcome)


class Experiment(NamedTuple):
    """A kind of fault; `quick` and `long` are numbers of trials, or return for a subject what has
    one trial each. Other subjects than ours have trials only with `--long`.

    `trial` fills in the details and returns the outcome, a category to count, or raises `Failed`.
    `missing` is what this machine lacks for the experiment, which then has no trials.
    """

    name: str
    subjects: Sequence[str]
    quick: int | Callable[[str], Sequence]
    long: int | Callable[[str], Sequence]
    trial: Callable[[Trial], str]
    missing: str = ""


class TrialLog:
    """The finished trials, each a line of JSON in a file and a dictionary in `rows`."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = [line for line in lines if line.endswith("\n")]  # the last may have been cut short
        self.rows = [json.loads(line) for line in lines]
        self._file = path.open("w", buffering=1)
        self._file.writelines(lines)

    def of(self, fault: str, subject: str) -> list[dict]:
        return [row for row in self.rows if (row["fault"], row["subject"]) == (fault, subject)]

    def add(self, **row: object) -> None:
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")


def run(experiment: Experiment, log: TrialLog, *, long: bool) -> None:
    """Run the trials of an experiment that are not in the log yet."""
    if experiment.missing:
        return
    for subject in experiment.subjects if long else {OURS}.intersection(experiment.subjects):
        count = experiment.long if long else experiment.quick
        count = len(count(subject)) if callable(count) else count
        done = {row["index"] for row in log.of(experiment.name, subject)}
        for index in sorted(set(range(count)) - done):
            rng = random.Random(f"0/{experiment.name}/{subject}/{index}")
            with scratch_directory() as scratch:
                trial = Trial(subject, index, rng, scratch)
                try:
                    outcome = experiment.trial(trial)
                    ok = True
                except Failed as failure:
                    outcome = str(failure)
                    ok = False
            names = {"fault": experiment.name, "subject": subject, "index": index}
            log.add(**names, details=trial.details, outcome=outcome, ok=ok, response=trial.response)
            if sys.stdout.isatty():
                print(
                    f"\r\033[K{experiment.name} {subject} {index + 1}/{count}", end="\r", flush=True
                )


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a temporary directory, in memory where possible."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="faults-", dir=parent, ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


def summary(log: TrialLog) -> str:
    """Return a line for each fault and subject: failures, outcomes without what follows their
    colon, responses.
    """
    lines = []
    for fault, subject in dict.fromkeys((row["fault"], row["subject"]) for row in log.rows):
        rows = log.of(fault, subject)
        counts = Counter(row["outcome"].split(":")[0] for row in rows).most_common()
        outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in counts)
        times = [row["response"] for row in rows if row["response"] is not None]
        responses = (
            f"; response {statistics.median(times):.3f} s, at most {max(times):.3f} s"
            if times
            else ""
        )
        failures = sum(not row["ok"] for row in rows)
        lines.append(
            f"{fault}, {subject}: {failures:,} of {len(rows):,} failed ({outcomes}){responses}"
        )
    return "\n".join(lines)


class Child:
    """`with Child(function, output) as child:` leads a process group of its own, killed at the end
    of the block.

    What it prints is appended to the file `output`.
    """

    def __init__(self, function: Callable[[], Any], output: Path):
        self._function = function
        self._output = output
        self._process = FORK.Process(target=self._call, daemon=True)
        self.start = time.monotonic()
        self._process.start()
        self.pid = self._process.pid  # also of its process group

    def _call(self) -> None:
        os.setpgid(0, 0)
        # a trace of the trial itself is of no interest
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _redirect_output(self._output)
        self._function()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()  # which may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.exit_code is None:
            self.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -number of the signal that ended it."""
        return self._process.exitcode

    def wait_until(self, happened: Callable[[], object], what: str) -> None:
        """Wait until something has happened; end the trial as failed if it has not in time."""
        deadline = time.monotonic() + TIMEOUT
        while not happened():
            check(time.monotonic() < deadline, f"{what} within {TIMEOUT:.0f} s")
            time.sleep(0.001)

    def wait(self, seconds: float = TIMEOUT) -> bool:
        """Whether it ends within these seconds. Polls, as `join` blocks on a child that called
        `exec`.
        """
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
    def ending(self) -> str:
        """How it ended: its exit code, and the last line it printed without what differs from trial
        to trial.
        """
        line = self.output.strip().rpartition("\n")[2].replace(str(self._output.parent), "")
        return f"exit code {self.exit_code}: {re.sub('[0-9]+', 'N', line)[:100]}"


def in_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function` in a child with TensorFlow that all calls share; fail if it
    dies or hangs.
    """
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
