"""Whole runs that are killed, interrupted and repeated: none of it may be seen in the weights they end with.

A run of ours is the program itself, called in a forked child; one in ten is `scripts/train.py` from exec on, with the
import of TensorFlow and the whole synthetic set.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers import trainer
from cifar_towers.checkpointing import checkpoint
from cifar_towers.cli import main
from cifar_towers.data import sources, synthetic
from cifar_towers.files import run_files
from cifar_towers.reporting import jsonl
from cifar_towers.reporting.console import Progress
from cifar_towers.training import build, step
from tests.faults import harness, peers
from tests.faults.harness import Experiment, Outcome
from tests.faults.subjects import BACKUP, MANAGER, OURS

STEPS = 30
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FLAGS = (
    *("--dataset=synthetic", "--model=speednet93", "--crop=18", "--shift=0", "--batch_size=20", "--precision=float32"),
    *("--num_gpus=2", "--whitening_images=200", "--nesterov", "--weight_decay=0.001", "--ema_decay=0.5"),
    *("--checkpoint_every_steps=3", "--summary_every_steps=1"),
)
# How a run of ours is made: on few images in a child, on all of them in a child, or as a user makes it.
SMALL, WHOLE, REAL = "small", "whole", "real"
SMALL_FLAGS = ("--epochs=2", "--eval_every_epochs=0.5")  # evaluates after steps 8, 16, 24
WHOLE_FLAGS = ("--epochs=0.06", "--eval_every_epochs=0.04")  # after step 20
SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"
LIMIT = 120.0  # seconds that no run takes
PEERS_STARTS = 3  # of a peer's run that nobody disturbs, to end it; ours has one


class Run:
    """`with Run(...) as run:` a process that trains in `scratch/run`; it and all it started are gone afterwards."""

    def __init__(
        self,
        subject: str,
        scratch: Path,
        how: str = SMALL,
        flags: Sequence[str] = (),
        prepare: Callable[[], None] = lambda: None,
    ):
        self.directory = scratch / "run"
        self.started_after = last_recorded(self.directory)
        self._output = scratch / f"output-{len(list(scratch.glob('output-*')))}"
        if subject != OURS:
            call = functools.partial(peers.RUNS[subject], self.directory)
        else:
            flags = [*FLAGS, *(SMALL_FLAGS if how == SMALL else WHOLE_FLAGS), f"--train_dir={self.directory}", *flags]
            call = functools.partial(_exec if how == REAL else _train, flags, how, prepare)
        self.code: int | None = None  # -number of the signal that ended it
        self.began = time.monotonic()
        self.process = harness.fork(call, self._output)
        with contextlib.suppress(OSError):  # the child does it too; whoever is first
            os.setpgid(self.process, self.process)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_):
        self.kill()

    def wait(self, seconds: float = LIMIT) -> bool:
        """Whether it ends within these seconds."""
        end = time.monotonic() + seconds
        while self.code is None:
            done, status = os.waitpid(self.process, os.WNOHANG)
            self.ended = time.monotonic()
            if done:
                self.code = os.waitstatus_to_exitcode(status)
            elif self.ended > end:
                return False
            else:
                time.sleep(0.001)
        return True

    def kill(self) -> None:
        """Ends it and what it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        self.wait()

    def listens(self) -> bool:
        """Whether it is there and has a handler for SIGTERM."""
        if self.code is not None:
            return False
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{self.process}/status").read_text())
        return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    @property
    def output(self) -> str:
        """All it printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    @property
    def last_line(self) -> str:
        """Of what it printed, without what differs from trial to trial."""
        line = self.output.strip().rpartition("\n")[2]
        return re.sub(r"\d+", "N", line.replace(str(self.directory.parent), ""))[:100] or "nothing printed"

    @property
    def went_on_from(self) -> int | None:
        """The step it says it goes on from; None if it says nothing of it."""
        found = re.search(r"(?:going on from|is complete at) step (\d+)", self.output)
        return int(found[1]) if found else None

    @property
    def saved(self) -> int:
        """The newest step that it told it had saved, or whose checkpoint is there under its final name."""
        told = [int(number) for number in re.findall(r"saved step (\d+)", self.output)]
        return max(*told, newest_saved(self.directory), 0)

    @property
    def weights(self) -> str:
        """SHA-256 of what it ended with; empty if it did not."""
        with contextlib.suppress(OSError, ValueError):
            return run_files.read_json(self.directory / "result.json")["weights_sha256"]
        found = re.search(r"weights sha256 (\w{64})", self.output)
        return found[1] if found else ""


def _train(flags: Sequence[str], how: str, prepare: Callable[[], None]) -> None:
    if how == SMALL:
        synthetic.load = lambda seed=0: (synthetic.make(300, seed, 0), synthetic.make(100, seed, 1))
    prepare()
    sys.argv = ["train.py", *flags]
    main.train()


def _exec(flags: Sequence[str], how: str, prepare: Callable[[], None]) -> None:
    os.execv(sys.executable, [sys.executable, str(SCRIPT), *flags])


def newest_saved(directory: Path) -> int:
    """The step of our newest checkpoint, undamaged or not; 0 if there is none."""
    return max((int(path.name.rpartition("-")[2]) for path in checkpoint.list_checkpoints(directory)), default=0)


def recorded(directory: Path) -> list[int]:
    """The steps of our records of training, as they stand in the file."""
    path = directory / "metrics.jsonl"
    return [record["step"] for record in jsonl.read_records(path) if record["kind"] == "train"] if path.exists() else []


def last_recorded(directory: Path) -> int:
    """The last step that was finished, of a run of ours that was not killed; 0 if none was."""
    return max(recorded(directory), default=0)


class Reference(NamedTuple):
    """What an undisturbed run takes, and ends with."""

    seconds: float
    weights: str


@functools.cache
def reference(subject: str, how: str = SMALL, flags: Sequence[str] = ()) -> Reference:
    """Of a run from start to end."""
    with harness.scratch() as scratch, Run(subject, scratch, how, flags) as run:
        run.wait()
        if run.code != 0 or not run.weights:
            raise RuntimeError(f"an undisturbed run of {subject} ended with {run.code}: {run.output[-3000:]}")
        return Reference(run.ended - run.began, run.weights)


def finish(subject: str, scratch: Path, promised: int, how: str = SMALL) -> Outcome:
    """Starts a run again, which is to end it: whether it lost none of the `promised` steps and ends as the reference.
    Peers may need some more starts."""
    for _ in range(1 if subject == OURS else PEERS_STARTS):
        with Run(subject, scratch, how) as run:
            run.wait()
        if run.code == 0:
            break
    return Outcome("", wrong, False) if (wrong := _wrong(subject, run, promised, how)) else SAME


SAME = Outcome("", "same weights", True)


def _wrong(subject: str, run: Run, promised: int, how: str) -> str:
    if run.code != 0:
        return f"cannot resume: {run.last_line}"
    if (run.went_on_from or 0) < promised:
        return _older(run)
    if run.weights != reference(subject, how).weights:
        return "other weights"
    if subject == OURS and recorded(run.directory) != list(range(1, STEPS + 1)):
        return "steps missing or twice in the records"
    return ""


def _older(run: Run) -> str:
    return "went on from an older step" if run.went_on_from else "restarted at 0"


# kill -9 ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def going(subject: str, scratch: Path, how: str, rng: random.Random) -> Iterator[Run]:
    """A run that is still going at a random moment of the time that one takes; one that was quicker is made again."""
    seconds = reference(subject, how).seconds
    while True:
        moment = rng.uniform(0, seconds)
        with Run(subject, scratch, how) as run:
            if not run.wait(moment) or run.code != 0:
                yield run
                return
        seconds = run.ended - run.began
        shutil.rmtree(run.directory)


def kill(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """Kills a run at a random moment, every second time once more as it goes on, and lets it end."""
    how = _how(number) if subject == OURS else SMALL
    while True:
        with going(subject, scratch, how, rng) as run:
            pass
        if run.code != 0:
            break
        shutil.rmtree(run.directory)  # it ended just before the kill
    if run.code != -signal.SIGKILL:
        return Outcome(f"{how} run", f"ended by itself with exit code {run.code}", False)
    promised, what = run.saved, f"{how} run killed after {run.ended - run.began:.3f} s, {run.saved} steps saved"
    if rng.randrange(2):
        moment = rng.uniform(0, reference(subject, how).seconds)
        with Run(subject, scratch, how) as again:
            struck = not again.wait(moment)
        what += f"; then {'killed' if struck else 'done'} after {again.ended - again.began:.3f} s, {again.saved} saved"
        if again.went_on_from is not None and again.went_on_from < promised:
            return Outcome(what, _older(again), False)
        promised = max(promised, again.saved)
    return finish(subject, scratch, promised, how)._replace(what=what)


def _how(number: int) -> str:
    return REAL if number % 10 == 0 else SMALL


# SIGTERM and SIGINT ----------------------------------------------------------------------------------------------


def interrupt(signal_number: int) -> Callable[..., Outcome]:
    """The trial that sends this signal at a random moment."""

    def trial(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
        how = _how(number)
        with going(subject, scratch, how, rng) as run:
            while how == SMALL and not run.listens() and not run.wait(0.001):
                pass  # a child is the program only from here on
            return _interrupt(run, signal_number, scratch, how)

    return trial


def interrupt_import(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """A signal while TensorFlow is imported."""
    with Run(subject, scratch, REAL) as run:
        run.wait(rng.uniform(0.3, 3.0))
        return _interrupt(run, SIGNALS[number % 2], scratch, REAL)


def interrupt_exit(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """A signal after the result is written, while the process ends."""
    pause = rng.uniform(0, 0.05)
    with Run(subject, scratch, REAL) as run:
        while not run.weights and not run.wait(0.001):
            pass
        run.wait(pause)
        return _interrupt(run, SIGNALS[number % 2], scratch, REAL)


def _interrupt(run: Run, signal_number: int, scratch: Path, how: str) -> Outcome:
    """Sends a signal, SIGINT to all of the group as Ctrl-C does, lets the run end, and judges how."""
    sent, written, listened = time.monotonic(), bool(run.weights), run.listens()
    if run.code is None:
        (os.killpg if signal_number == signal.SIGINT else os.kill)(run.process, signal_number)
        run.wait()
    what = f"{how} run, {signal.Signals(signal_number).name} after {sent - run.began:.3f} s"
    what += f", answered in {run.ended - sent:.3f} s" if run.ended > sent else ", had ended"
    return _after_signal(run, scratch, signal_number, how, listened, written)._replace(what=what)


def _after_signal(
    run: Run, scratch: Path, signal_number: int, how: str = SMALL, listened: bool = True, written: bool = False
) -> Outcome:
    """Judges how a run of ours ended that got one signal, and how it goes on."""
    step = last_recorded(run.directory)
    saved = newest_saved(run.directory)
    told = re.search(rf"saved step {step}\b|step {step} is saved", run.output)
    if "Traceback" in run.output and (listened or written):  # Python itself answers a SIGINT with one
        return Outcome("", "traceback", False)
    if written and run.code == 0:
        outcome = "had written its result"
    elif not listened and run.code == -signal_number:
        outcome = "ended on its way out" if written else "ended before it could listen"
    elif run.code != 128 + signal_number:
        return Outcome("", f"exit code {run.code}", False)
    elif saved != step:
        return Outcome("", f"saved step {saved} of {step}", False)
    elif step > run.started_after and not told:
        return Outcome("", "saved and did not tell", False)
    else:
        outcome = "saved and left" if step else "left before the first step"
    went_on = finish(OURS, scratch, saved, how)
    return Outcome("", outcome, True) if went_on.ok else went_on


# A signal in a named moment --------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """A function of a run of ours, during one of whose calls `first` .. `last` a signal comes, `longest` seconds
    after its begin at most. `put(during)` has it replaced by `during(function)`."""

    put: Callable[[Callable[[Callable], Callable]], None]
    first: int
    last: int
    longest: float


def _put_loading(during):
    sources.load = during(sources.load)


def _put_tracing(during):
    make = step.make_tower_fn
    step.make_tower_fn = lambda *arguments: during(make(*arguments))


def _put_step(during):
    make = build.make_training

    def make_training(*arguments):
        training = make(*arguments)
        train_step = during(training.train_step)
        train_step.get_concrete_function = training.train_step.get_concrete_function
        return training._replace(train_step=train_step)

    build.make_training = make_training


def _put_evaluation(during):
    make = trainer.make_evaluate_fn
    trainer.make_evaluate_fn = lambda *arguments: during(make(*arguments))


def _put_save(during):
    checkpoint.save_checkpoint = during(checkpoint.save_checkpoint)


def _put_between(during):
    Progress.step = during(Progress.step)


MOMENTS = {
    "loading the data": Moment(_put_loading, 1, 1, 0.1),
    "tracing": Moment(_put_tracing, 1, 2, 0.1),  # once a tower
    "the first step": Moment(_put_step, 1, 1, 0.1),
    "a step": Moment(_put_step, 2, STEPS, 0.01),
    "an evaluation": Moment(_put_evaluation, 1, 6, 0.01),  # three times, of two sets of weights
    "a save": Moment(_put_save, 1, STEPS // 3, 0.03),
    "the final evaluation": Moment(_put_evaluation, 7, 8, 0.01),
    "between steps": Moment(_put_between, 1, STEPS, 0.0),
}
SECOND_AFTER, AT_ONCE = 0.2, 0.5  # seconds between two signals; from the second to the end


def interrupt_in(name: str) -> Callable[..., Outcome]:
    """The trial that sends one signal in this moment."""

    def trial(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
        run, signal_number, what, sent = _signalled(name, number, 1, rng, scratch)
        if not sent:
            return Outcome(what, "the moment never came", False)
        return _after_signal(run, scratch, signal_number)._replace(what=what)

    return trial


def interrupt_twice(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """Two signals, the first in one of the named moments in turn: the second ends the run at once, nothing that was
    saved is lost, and the run goes on."""
    name = list(MOMENTS)[number % len(MOMENTS)]
    run, signal_number, what, sent = _signalled(name, number // len(MOMENTS), 2, rng, scratch)
    late = sent and run.ended - sent[-1] > AT_ONCE
    if not sent or late or run.code != 128 + signal_number or "Traceback" in run.output:
        outcome = "the moment never came" if not sent else f"exit code {run.code}{', late' * late}"
        return Outcome(what, outcome, False)
    went_on = finish(OURS, scratch, run.saved)
    return Outcome(what, f"ended by signal {len(sent)}", True) if went_on.ok else went_on._replace(what=what)


def _signalled(name: str, number: int, count: int, rng: random.Random, scratch: Path):
    """(a run that got `count` signals in a named moment, unless it ended sooner; which; in words; when)."""
    signal_number = SIGNALS[number % 2]
    moment = MOMENTS[name]
    call, delay = rng.randint(moment.first, moment.last), rng.uniform(0, moment.longest)
    arm = functools.partial(moment.put, functools.partial(_during, call, delay, signal_number, count))
    with Run(OURS, scratch, prepare=arm) as run:
        run.wait()
    sent = [float(moment) for moment in re.findall(r"signal sent at (\S+)", run.output)]
    what = f"{signal.Signals(signal_number).name} in {name}, call {call}, {delay:.3f} s after its begin"
    what += f", signal {len(sent)} answered in {run.ended - sent[-1]:.3f} s" if sent else ""
    return run, signal_number, what, sent


def _during(call: int, delay: float, signal_number: int, count: int, function: Callable) -> Callable:
    """`function`, during whose `call`-th call another thread sends signals to this process."""
    calls = 0

    def send():
        for index in range(count):
            time.sleep(SECOND_AFTER if index else delay)
            os.write(1, f"signal sent at {time.monotonic():.4f}\n".encode())
            os.kill(os.getpid(), signal_number)

    def called(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            threading.Thread(target=send, daemon=True).start()
        return function(*arguments, **options)

    return called


# The same seed ---------------------------------------------------------------------------------------------------


def repeat(subject: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """The same run in another directory, reporting otherwise, or as another process."""
    kind = number % 5
    if kind == 0:
        expected = reference(OURS, WHOLE).weights
        ways = [(REAL, ())]
    elif kind == 1:
        expected = reference(OURS, SMALL, ("--deterministic",)).weights
        ways = [(SMALL, ("--deterministic",))]
    else:
        expected = reference(OURS).weights
        flags = (
            f"--summary_every_steps={rng.choice((0, 1, 7))}",
            f"--eval_every_epochs={rng.choice((0, 0.2, 0.5, 1))}",
            f"--checkpoint_every_steps={rng.choice((0, 1, 4, 100))}",
            f"--keep_checkpoints={rng.choice((1, 3))}",
        )
        stops = sorted(rng.sample(range(1, STEPS), rng.randrange(3)))
        ways = [(SMALL, (*flags, f"--max_steps={stop}")) for stop in stops] + [(SMALL, flags)]
    what = "; ".join(" ".join((how, *flags)) for how, flags in ways)
    for how, flags in ways:
        with Run(OURS, scratch, how, flags) as run:
            run.wait()
        if run.code != 0:
            return Outcome(what, f"exit code {run.code}: {run.last_line}", False)
    same = run.weights == expected
    return Outcome(what, "same weights" if same else "other weights", same)


def latencies(rows: Sequence[dict]) -> str:
    """How long runs took to answer a signal, from the trials of a log."""
    found: dict[str, list[float]] = {}
    for row in rows:
        told = re.search(r"answered in ([\d.]+) s", row["what"])
        if told:
            found.setdefault(row["fault"], []).append(float(told[1]))
    lines = ["| signal | answered | median | largest |", "| --- | --- | --- | --- |"]
    for fault, seconds in found.items():
        lines.append(f"| {fault} | {len(seconds)} | {statistics.median(seconds):.3f} s | {max(seconds):.3f} s |")
    return "\n".join(lines)


EXPERIMENTS = [
    Experiment(
        "kill -9 at a random moment",
        (OURS, MANAGER, BACKUP),
        lambda subject: 10 if subject == OURS else 4,
        lambda subject: 200 if subject == OURS else 60,
        kill,
    ),
    Experiment("SIGTERM at a random moment", (OURS,), 6, 80, interrupt(signal.SIGTERM)),
    Experiment("SIGINT at a random moment", (OURS,), 3, 30, interrupt(signal.SIGINT)),
    Experiment("signal: the import", (OURS,), 2, 6, interrupt_import),
    *(Experiment(f"signal: {name}", (OURS,), 2, 6, interrupt_in(name)) for name in MOMENTS),
    Experiment("signal: the exit", (OURS,), 2, 6, interrupt_exit),
    Experiment("second signal", (OURS,), len(MOMENTS), 4 * len(MOMENTS), interrupt_twice),
    Experiment("same seed", (OURS,), 3, 10, repeat),
]
