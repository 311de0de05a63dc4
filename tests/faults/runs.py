"""Whole training runs as child processes; kills at random moments; runs of one seed compared;
resources of a long run.

A run is the program itself in a forked child. One in ten is the script: the command from `exec` on,
with the import of TensorFlow and the full synthetic set.
"""

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from cifar_towers import files
from cifar_towers.reporting.records import read_records
from cifar_towers.runs import checkpoint
from tests.faults import harness, hooks, subjects
from tests.faults.harness import Child, Experiment, Trial, check
from tests.faults.subjects import BACKUP, MANAGER, OURS
from tests.helpers.programs import COMMAND

STEPS = 30
FLAGS = (
    *(
        "--dataset=synthetic",
        "--model=speednet93",
        "--crop=18",
        "--shift=0",
        "--batch_size=20",
        "--precision=float32",
    ),
    *(
        "--num_gpus=2",
        "--nesterov",
        "--weight_decay=0.001",
        "--ema_decay=0.5",
    ),
    *("--checkpoint_every_steps=3", "--summary_every_steps=1"),
)
CHILD_FLAGS = ("--epochs=2", "--eval_every_epochs=0.5")  # evaluates after steps 8, 16, 24
SCRIPT_FLAGS = ("--epochs=0.06", "--eval_every_epochs=0.04")  # after step 20
LONG_FLAGS = (
    "--epochs=400",
    "--eval_every_epochs=20",
    "--summary_every_steps=20",
    "--checkpoint_every_steps=0",
)
# after the first evaluation, which opens files that stay open; and each length
SAMPLED_STEPS = (400, 1000, 5000)
MAX_GROWTH_MB = 20.0  # between the samples; the allocator alone takes about 10 once
MAX_SAVING = 0.02  # of the time
PEER_STARTS = 3  # until an undisturbed run of a peer must have finished; ours has one


class Run(Child):
    """`with Run(scratch, function) as run:` a child that trains in `directory`, by default
    `scratch/run`.
    """

    def __init__(
        self, scratch: Path, function: Callable[[], object], directory: Path | None = None
    ):
        self.directory = directory or scratch / "run"
        super().__init__(function, scratch / f"output-{len(list(scratch.glob('output-*')))}")

    def records_signals(self) -> bool:
        """Whether it runs and has a handler for SIGTERM."""
        if self.exit_code is not None:
            return False
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{self.pid}/status").read_text())
        return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    @property
    def steps(self) -> list[int]:
        """The steps of our training records, in their order: all finished ones unless the run was
        killed.
        """
        path = self.directory / files.METRICS
        return (
            [record["step"] for record in read_records(path) if record["kind"] == "train"]
            if path.exists()
            else []
        )

    @property
    def saved(self) -> int:
        """The newest step that it logged as saved, or whose checkpoint, damaged or not, stands
        under its final name.
        """
        on_disk = map(checkpoint.step_of, checkpoint.list_checkpoints(self.directory))
        return max([0, *on_disk, *map(int, hooks.SAVED.findall(self.output))])

    @property
    def weights(self) -> str:
        """SHA-256 of the final weights; empty if there are none."""
        return files.read_json(self.directory / files.RESULT).get("weights_sha256", "")

    def check_resumed(self, saved: int) -> None:
        """End the trial as failed if this run resumed from an older step than the saved one."""
        resumed = hooks.RESUMED.search(self.output)
        check(
            int(resumed[1] if resumed else 0) >= saved,
            "resumed from an older step" if resumed else "restarted at 0",
        )


def train(
    subject: str,
    scratch: Path,
    script: bool = False,
    flags: Sequence[str] = (),
    prepare: Callable[[], None] = lambda: None,
) -> Run:
    """Start or resume a run of a subject; `prepare` is called in the child first, unless it is the
    script.
    """
    flags = [
        *FLAGS,
        *(SCRIPT_FLAGS if script else CHILD_FLAGS),
        f"--train_dir={scratch / 'run'}",
        *flags,
    ]
    if subject != OURS:
        return Run(scratch, functools.partial(subjects.train_peer, subject, scratch / "run"))
    if script:
        return Run(scratch, command("train", flags))
    hooks.small_data()  # once, in the parent
    return Run(scratch, functools.partial(hooks.train, flags, prepare))


def command(program: str, flags: Sequence[str]) -> Callable[[], object]:
    """Return a function that replaces its process by a program."""
    return functools.partial(os.execv, sys.executable, [*COMMAND, program, *flags])


@functools.cache
def reference(subject: str, script: bool = False, flags: Sequence[str] = ()) -> tuple[float, str]:
    """Return the duration and the final weights of an undisturbed run."""
    with harness.scratch_directory() as scratch, train(subject, scratch, script, flags) as run:
        run.wait()
        if run.exit_code != 0 or not run.weights:
            raise RuntimeError(
                f"an undisturbed run of {subject} ended with {run.exit_code}: {run.output[-3000:]}"
            )
        return run.end - run.start, run.weights


def finish(trial: Trial, script: bool, saved: int, outcome: str = "same weights") -> str:
    """Restarts a run, which must resume from step `saved` or later and end with the weights of the
    reference.
    """
    for _ in range(1 if trial.subject == OURS else PEER_STARTS):
        with train(trial.subject, trial.scratch, script) as run:
            run.wait()
        if run.exit_code == 0:
            break
    check(run.exit_code == 0, f"cannot resume: {run.ending}")
    run.check_resumed(saved)
    check(run.weights == reference(trial.subject, script)[1], "other weights")
    in_order = trial.subject != OURS or run.steps == list(range(1, STEPS + 1))
    check(in_order, "steps missing or repeated in the records")
    return outcome


@contextlib.contextmanager
def interrupted_run(trial: Trial) -> Iterator[tuple[Run, bool]]:
    """Yield a run that still runs at a random moment of its usual duration, and whether it is the
    script.
    """
    script = trial.subject == OURS and trial.index % 10 == 0
    seconds, _ = reference(trial.subject, script)
    while True:
        with train(trial.subject, trial.scratch, script) as run:
            run.wait(trial.rng.uniform(0, seconds))
            if run.exit_code != 0:
                yield run, script
                return
        shutil.rmtree(run.directory)


def kill(trial: Trial) -> str:
    """`kill -9` at a random moment, every second time once more in the restarted run, then a run to
    the end.
    """
    with interrupted_run(trial) as (run, script):
        pass
    saved = run.saved
    trial.details = (
        f"{'script' if script else 'run'} killed after {run.end - run.start:.3f} s, "
        f"{saved} steps saved"
    )
    check(run.exit_code in (0, -signal.SIGKILL), f"ended by itself with exit code {run.exit_code}")
    if trial.rng.randrange(2):
        moment = trial.rng.uniform(0, reference(trial.subject, script)[0])
        with train(trial.subject, trial.scratch, script) as again:
            end = "done" if again.wait(moment) else "killed"
        trial.details += f"; then {end} after {again.end - again.start:.3f} s, {again.saved} saved"
        if hooks.RESUMED.search(again.output):
            again.check_resumed(saved)
        saved = max(saved, again.saved)
    return finish(trial, script, saved)


def kill_in_bfloat16(trial: Trial) -> str:
    """`kill -9` at a random moment of a run in bfloat16, emulated where the processor has none."""
    flags = ("--precision=bfloat16",)
    seconds, weights = reference(OURS, flags=flags)
    with train(OURS, trial.scratch, flags=flags) as run:
        run.wait(trial.rng.uniform(0, seconds))
    saved = run.saved
    trial.details = f"killed after {run.end - run.start:.3f} s, {saved} steps saved"
    with train(OURS, trial.scratch, flags=flags) as again:
        again.wait()
    check(again.exit_code == 0, again.ending)
    if hooks.RESUMED.search(again.output):
        again.check_resumed(saved)
    check(again.weights == weights, "other weights")
    return "same weights"


def repeat(trial: Trial) -> str:
    """Make a run of the same seed in another directory, with other reporting, interruptions or
    process.
    """
    variant = trial.index % 5
    script = variant == 0
    same = ("--deterministic",) if variant == 1 else ()
    starts = [same] if variant < 2 else _other_reporting(trial.rng)
    trial.details = "script" if script else "; ".join(" ".join(flags) for flags in starts)
    for flags in starts:
        with train(OURS, trial.scratch, script, flags) as run:
            run.wait()
        check(run.exit_code == 0, run.ending)
    check(run.weights == reference(OURS, script, same)[1], "other weights")
    return "same weights"


def _other_reporting(rng: random.Random) -> list[tuple[str, ...]]:
    """Return the flags of each start of a run that reports otherwise, and is stopped up to
    twice.
    """
    flags = (
        f"--summary_every_steps={rng.choice((0, 1, 7))}",
        f"--eval_every_epochs={rng.choice((0, 0.2, 0.5, 1))}",
        f"--checkpoint_every_steps={rng.choice((0, 1, 4, 100))}",
        f"--keep_checkpoints={rng.choice((1, 3))}",
    )
    stops = sorted(rng.sample(range(1, STEPS), rng.randrange(3)))
    return [*((*flags, f"--max_steps={stop}") for stop in stops), flags]


def check_leaks(trial: Trial) -> str:
    """Train for thousands of steps with summaries, evaluations and checkpoints at intervals of
    time.
    """
    flags = (*LONG_FLAGS, f"--max_steps={SAMPLED_STEPS[trial.index + 1] + 1}")
    prepare = functools.partial(hooks.before, "update", _sample)
    with train(OURS, trial.scratch, flags=flags, prepare=prepare) as run:
        run.wait(3600.0)
    check(run.exit_code == 0, run.ending)
    first, *_, last = map(json.loads, re.findall(r"^sample: (.+)$", run.output, re.MULTILINE))
    seconds = files.read_json(run.directory / files.RESULT)["seconds"]
    saving = seconds["save"] / sum(seconds.values())
    trial.details = f"{first} to {last}: saving took {100 * saving:.2f} % of the time"
    leaks = [name for name in ("traced", "threads", "files") if last[name] > first[name]]
    check(not leaks, f"more {' and '.join(leaks)}")
    check(last["resident_mb"] - first["resident_mb"] <= MAX_GROWTH_MB, "memory grows")
    check(saving < MAX_SAVING, "saving takes too long")
    return "nothing grows"


def _sample(run, step: int, *_) -> None:
    """Print the resources of this process before the step that follows one of SAMPLED_STEPS."""
    if step in SAMPLED_STEPS:
        process = psutil.Process()
        traced = run.runner.train_step.experimental_get_tracing_count()
        sample = {"traced": traced, "threads": process.num_threads(), "files": process.num_fds()}
        print(
            "sample:",
            json.dumps(sample | {"resident_mb": process.memory_info().rss / 1e6}),
            flush=True,
        )


EXPERIMENTS = [
    Experiment("kill -9 at a random moment", (OURS,), 10, 200, kill),
    Experiment("kill -9 at a random moment", (MANAGER, BACKUP), 4, 60, kill),
    Experiment("kill -9, bfloat16", (OURS,), 2, 20, kill_in_bfloat16),
    Experiment("same seed", (OURS,), 3, 10, repeat),
    Experiment("a long run", (OURS,), 1, 2, check_leaks),
]
