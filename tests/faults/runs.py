"""Whole training runs as child processes; kills at random moments; runs of one seed compared.

A run is the program itself in a forked child. One in ten is the command from `exec` on, with the import of
TensorFlow and the full synthetic set.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers import files
from cifar_towers.checkpointing import checkpoint
from cifar_towers.reporting.run_records import read_records
from tests.faults import harness, hooks, subjects
from tests.faults.harness import Child, Experiment, Trial, check
from tests.faults.subjects import BACKUP, MANAGER, OURS
from tests.programs import COMMAND

STEPS = 30
FLAGS = (
    *("--dataset=synthetic", "--model=speednet93", "--crop=18", "--shift=0", "--batch_size=20", "--precision=float32"),
    *("--num_gpus=2", "--whitening_images=200", "--nesterov", "--weight_decay=0.001", "--ema_decay=0.5"),
    *("--checkpoint_every_steps=3", "--summary_every_steps=1"),
)
SMALL, FULL, SCRIPT = "small", "full", "script"  # few images in a child, all in a child, all by the command
SMALL_FLAGS = ("--epochs=2", "--eval_every_epochs=0.5")  # evaluates after steps 8, 16, 24
FULL_FLAGS = ("--epochs=0.06", "--eval_every_epochs=0.04")  # after step 20
PEER_STARTS = 3  # until an undisturbed run of a peer must have finished; ours has one


class Run(Child):
    """`with Run(scratch, function) as run:` a child that trains in `scratch/run`."""

    def __init__(self, scratch: Path, function: Callable[[], object]):
        self.directory = scratch / "run"
        self.first_step = last_recorded(self.directory)
        super().__init__(function, scratch / f"output-{len(list(scratch.glob('output-*')))}")

    def records_signals(self) -> bool:
        """Whether it runs and has a handler for SIGTERM."""
        if self.exit_code is not None:
            return False
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{self.pid}/status").read_text())
        return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    @property
    def resumed_from(self) -> int | None:
        """The step it resumed from; None if it logged none."""
        match = hooks.RESUMED.search(self.output)
        return int(match[1]) if match else None

    @property
    def saved(self) -> int:
        """The newest step that it logged as saved, or whose checkpoint stands under its final name."""
        return max(newest_saved(self.directory), *map(int, hooks.SAVED.findall(self.output)), 0)

    @property
    def weights(self) -> str:
        """SHA-256 of the final weights; empty if there are none."""
        return files.read_json_if_any(self.directory / files.RESULT).get("weights_sha256", "")

    def check_resumed(self, saved: int) -> None:
        """End the trial as failed if this run resumed from an older step than the saved one."""
        start = self.resumed_from or 0
        check(start >= saved, "resumed from an older step" if start else "restarted at 0")


def train(
    subject: str,
    scratch: Path,
    kind: str = SMALL,
    flags: Sequence[str] = (),
    prepare: Callable[[], None] = lambda: None,
) -> Run:
    """Start or resume a run of a subject; `prepare` is called in the child first, unless it is the script."""
    flags = [*FLAGS, *(SMALL_FLAGS if kind == SMALL else FULL_FLAGS), f"--train_dir={scratch / 'run'}", *flags]
    if subject != OURS:
        return Run(scratch, functools.partial(subjects.train_peer, subject, scratch / "run"))
    if kind == SCRIPT:
        return Run(scratch, command("train", flags))
    hooks.small_data()  # once, in the parent
    return Run(scratch, functools.partial(hooks.train, flags, small=kind == SMALL, prepare=prepare))


def command(program: str, flags: Sequence[str]) -> Callable[[], object]:
    """Return a function that replaces its process by a program."""
    return functools.partial(os.execv, sys.executable, [*COMMAND, program, *flags])


def newest_saved(directory: Path) -> int:
    """Return the step of our newest checkpoint, damaged or not; 0 if there is none."""
    return max(map(checkpoint.step_of, checkpoint.list_checkpoints(directory)), default=0)


def recorded_steps(directory: Path) -> list[int]:
    """Return the steps of our training records, in the order of the file."""
    path = directory / files.METRICS
    return [record["step"] for record in read_records(path) if record["kind"] == "train"] if path.exists() else []


def last_recorded(directory: Path) -> int:
    """Return the last finished step of a run of ours that was not killed; 0 if there is none."""
    return max(recorded_steps(directory), default=0)


class Reference(NamedTuple):
    """The duration and final weights of an undisturbed run."""

    seconds: float
    weights: str


@functools.cache
def reference(subject: str, kind: str = SMALL, flags: Sequence[str] = ()) -> Reference:
    """Make an undisturbed run from start to end."""
    with harness.scratch_directory() as scratch, train(subject, scratch, kind, flags) as run:
        run.wait()
        if run.exit_code != 0 or not run.weights:
            raise RuntimeError(f"an undisturbed run of {subject} ended with {run.exit_code}: {run.output[-3000:]}")
        return Reference(run.end - run.start, run.weights)


def finish(trial: Trial, kind: str, saved: int, outcome: str = "same weights") -> str:
    """Restarts a run, which must resume from step `saved` or later and end with the weights of the reference."""
    for _ in range(1 if trial.subject == OURS else PEER_STARTS):
        with train(trial.subject, trial.scratch, kind) as run:
            run.wait()
        if run.exit_code == 0:
            break
    check(run.exit_code == 0, f"cannot resume: {run.last_line}")
    run.check_resumed(saved)
    check(run.weights == reference(trial.subject, kind).weights, "other weights")
    if trial.subject == OURS:
        in_order = recorded_steps(run.directory) == list(range(1, STEPS + 1))
        check(in_order, "steps missing or repeated in the records")
    return outcome


def kind_of(trial: Trial) -> str:
    """Every tenth run of ours is the script."""
    return SCRIPT if trial.subject == OURS and trial.index % 10 == 0 else SMALL


@contextlib.contextmanager
def interrupted_run(trial: Trial, kind: str) -> Iterator[Run]:
    """Start a run that still runs at a random moment of its usual duration; repeat that if it finished earlier."""
    seconds = reference(trial.subject, kind).seconds
    while True:
        moment = trial.rng.uniform(0, seconds)
        with train(trial.subject, trial.scratch, kind) as run:
            if not run.wait(moment) or run.exit_code != 0:
                yield run
                return
        seconds = run.end - run.start
        shutil.rmtree(run.directory)


def kill(trial: Trial) -> str:
    """`kill -9` at a random moment, every second time once more in the restarted run, then a run to the end."""
    kind = kind_of(trial)
    with interrupted_run(trial, kind) as run:
        pass
    if run.exit_code == 0:  # it ended just before the kill
        shutil.rmtree(run.directory)
        return kill(trial)
    saved = run.saved
    trial.details = f"{kind} run killed after {run.end - run.start:.3f} s, {saved} steps saved"
    check(run.exit_code == -signal.SIGKILL, f"ended by itself with exit code {run.exit_code}")
    if trial.rng.randrange(2):
        moment = trial.rng.uniform(0, reference(trial.subject, kind).seconds)
        with train(trial.subject, trial.scratch, kind) as again:
            end = "done" if again.wait(moment) else "killed"
        trial.details += f"; then {end} after {again.end - again.start:.3f} s, {again.saved} saved"
        if again.resumed_from is not None:
            again.check_resumed(saved)
        saved = max(saved, again.saved)
    return finish(trial, kind, saved)


def repeat(trial: Trial) -> str:
    """Make a run of the same seed in another directory, with other reporting, interruptions or process."""
    variant = trial.index % 5
    if variant == 0:
        expected, starts = reference(OURS, FULL), [(SCRIPT, ())]
    elif variant == 1:
        expected, starts = reference(OURS, SMALL, ("--deterministic",)), [(SMALL, ("--deterministic",))]
    else:
        expected, starts = reference(OURS), _other_reporting(trial.rng)
    trial.details = "; ".join(" ".join((kind, *flags)) for kind, flags in starts)
    for kind, flags in starts:
        with train(OURS, trial.scratch, kind, flags) as run:
            run.wait()
        check(run.exit_code == 0, f"exit code {run.exit_code}: {run.last_line}")
    check(run.weights == expected.weights, "other weights")
    return "same weights"


def _other_reporting(rng: random.Random) -> list[tuple[str, Sequence[str]]]:
    flags = (
        f"--summary_every_steps={rng.choice((0, 1, 7))}",
        f"--eval_every_epochs={rng.choice((0, 0.2, 0.5, 1))}",
        f"--checkpoint_every_steps={rng.choice((0, 1, 4, 100))}",
        f"--keep_checkpoints={rng.choice((1, 3))}",
    )
    stops = sorted(rng.sample(range(1, STEPS), rng.randrange(3)))
    return [*((SMALL, (*flags, f"--max_steps={stop}")) for stop in stops), (SMALL, flags)]


EXPERIMENTS = [
    Experiment("kill -9 at a random moment", (OURS,), 10, 200, kill),
    Experiment("kill -9 at a random moment", (MANAGER, BACKUP), 4, 60, kill),
    Experiment("same seed", (OURS,), 3, 10, repeat),
]
