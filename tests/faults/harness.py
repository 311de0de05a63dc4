"""What every experiment shares: trials in a CSV that can be gone on with, children to kill, and the table at the end.

The parent imports TensorFlow and never wakes it: a forked child starts in milliseconds, and is a process of its own
that can be killed, starved and traced like any other.
"""

import csv
import os
import pickle
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What came of one trial."""

    what: str  # the fault that was done, so that it can be repeated by hand
    outcome: str  # in a word or two, for counting
    ok: bool  # whether what is promised held


class Experiment(NamedTuple):
    """One kind of fault, tried on one or more subjects.

    `trial(subject, number, rng, scratch)` does trial `number`, all chance taken from `rng`, in an empty directory.
    `quick` and `long` are numbers of trials, or functions of the subject that find out how many there are.
    """

    name: str
    subjects: Sequence[str]
    quick: int | Callable[[str], int]
    long: int | Callable[[str], int]
    trial: Callable[[str, int, random.Random, Path], Outcome]


FIELDS = ("fault", "subject", "trial", "what", "outcome", "ok", "seconds")


class Log:
    """The trials of a CSV: each is a row as soon as it is done, and is not done again."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.rows: list[dict] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = [row for row in csv.DictReader(file) if row["seconds"]]  # a row cut short is done again
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(self.rows)

    def done(self, fault: str, subject: str) -> set[int]:
        """Numbers of the trials that are in."""
        return {int(row["trial"]) for row in self.rows if (row["fault"], row["subject"]) == (fault, subject)}

    def add(self, fault: str, subject: str, number: int, outcome: Outcome, seconds: float) -> None:
        """Writes one row."""
        values = (fault, subject, number, outcome.what, outcome.outcome, str(outcome.ok), f"{seconds:.3f}")
        row = dict(zip(FIELDS, map(str, values), strict=True))
        self.rows.append(row)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, FIELDS).writerow(row)


def run(experiment: Experiment, log: Log, *, long: bool, seed: int) -> None:
    """Does the trials of an experiment that are not in the log yet."""
    for subject in experiment.subjects:
        count = experiment.long if long else experiment.quick
        count = count(subject) if callable(count) else count
        done = log.done(experiment.name, subject)
        for number in range(count):
            if number in done:
                continue
            rng = random.Random(f"{seed}/{experiment.name}/{subject}/{number}")
            start = time.monotonic()
            with scratch() as directory:
                outcome = experiment.trial(subject, number, rng, directory)
            log.add(experiment.name, subject, number, outcome, time.monotonic() - start)
            if sys.stdout.isatty():
                print(f"\r{experiment.name} {subject} {number + 1}/{count}", end="\033[K", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="")


class scratch:
    """An empty directory that is gone afterwards; in memory where there is such a place."""

    def __enter__(self) -> Path:
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._path = Path(tempfile.mkdtemp(prefix="faults-", dir=place))
        return self._path

    def __exit__(self, *_):
        shutil.rmtree(self._path, ignore_errors=True)


def table(rows: Sequence[dict]) -> str:
    """n, failures, the bound on their rate, and what came of the trials, for each fault and subject.

    No failure in n trials: with 95 % confidence the rate is below 3/n, if their faults were drawn by chance. What
    follows a colon in an outcome is left to the rows.
    """
    lines = [
        "| fault | subject | trials | failures | rate below (95 %) | outcomes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for fault, subject in dict.fromkeys((row["fault"], row["subject"]) for row in rows):
        mine = [row for row in rows if (row["fault"], row["subject"]) == (fault, subject)]
        failed = sum(row["ok"] != "True" for row in mine)
        bound = "" if failed else f"{min(100, 300 / len(mine)):.2g} %"
        counted = Counter(row["outcome"].split(":")[0] for row in mine).most_common()
        told = ", ".join(f"{outcome} {count:,}" for outcome, count in counted)
        lines.append(f"| {fault} | {subject} | {len(mine):,} | {failed:,} | {bound} | {told} |")
    return "\n".join(lines)


# Children --------------------------------------------------------------------------------------------------------


def fork(call: Callable[[], Any], output: Path | None = None) -> int:
    """A child that calls `call` and ends with what it returns as exit code; its process id.

    It leads a process group of its own; what it prints goes to a file, or nowhere.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        file = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = call() or 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with open(os.devnull, "w") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    nowhere.write("")
        os._exit(code if isinstance(code, int) else 1)


def wait(child: int, timeout: float) -> int | None:
    """A child's exit code, or -number of the signal that ended it; None, and it is killed, if it takes too long."""
    end = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.002)


def in_child(call: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> Any:
    """What `call(*arguments)` returns or raises in a child; `TimeoutError` if it does not answer in time."""
    with children(call, timeout) as ask:
        return ask(*arguments)


class children:
    """`with children(call) as ask:` a child answers `ask(*arguments)`, as often as one likes, with what `call` returns
    or raises there. One that dies or hangs is a `ChildDied`, and the next question gets a new one."""

    def __init__(self, call: Callable[..., Any], timeout: float = 120.0):
        self._call, self._timeout, self._child = call, timeout, 0

    def __enter__(self) -> Callable[..., Any]:
        return self._ask

    def __exit__(self, *_):
        self._end()

    def _ask(self, *arguments: Any) -> Any:
        if not self._child:
            self._begin()
        _send(self._to, arguments)
        ready, _, _ = select.select([self._from], [], [], self._timeout)
        answer = _receive(self._from) if ready else None
        if answer is None:
            self._end()
            raise ChildDied("hung" if not ready else "died")
        kind, value = answer
        if kind == "raised":
            raise value
        return value

    def _begin(self) -> None:
        from_parent, self._to = os.pipe()
        self._from, to_parent = os.pipe()

        def answer_all():
            os.close(self._to)
            while (arguments := _receive(from_parent)) is not None:
                try:
                    answer = "returned", self._call(*arguments)
                except Exception as error:
                    answer = "raised", Raised(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
                _send(to_parent, answer)

        self._child = fork(answer_all)
        os.close(from_parent)
        os.close(to_parent)

    def _end(self) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            os.close(self._to)
            os.close(self._from)
            self._child = 0


class Raised(Exception):
    """What a child raised, in words: `DataLossError: ...`."""


class ChildDied(Exception):
    """A child that gave no answer."""


def _send(pipe: int, value: Any) -> None:
    data = pickle.dumps(value)
    data = len(data).to_bytes(8, "big") + data
    while data:
        data = data[os.write(pipe, data) :]


def _receive(pipe: int) -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count and (more := os.read(pipe, count - len(data))):
            data += more
        return data

    head = exactly(8)
    return pickle.loads(exactly(int.from_bytes(head, "big"))) if len(head) == 8 else None


def files_of(directory: Path) -> Iterator[Path]:
    """Every file below, in one order."""
    return iter(sorted(path for path in directory.rglob("*") if path.is_file()))
