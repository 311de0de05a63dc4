"""Goodput of runs that are killed at intervals: the share of all time that went into training steps that were kept.

A run is the whole program, from the start of Python on, and is started again at once. After the last kill, the steps
kept are those that one more start would resume with. The useful time is their number times the median time of a step.
A run of ours must come to the same share by its own account.

Ours saves as its defaults say. `BackupAndRestore` saves at the end of each epoch, its default, or after as many steps
as take the half minute between saves of ours. In the second case a start repeats the epoch from its first batch; the
steps kept are all that the weights have had.
"""

import functools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import latest_checkpoint, read_metadata
from cifar_towers.checkpointing.manager import DEFAULT_INTERVAL_SECONDS
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.run_records import read_records, read_times
from tests.faults import harness, runs
from tests.faults.harness import Child, Experiment, Trial, TrialLog, check
from tests.faults.subjects import OURS

EPOCH, STEPS = "BackupAndRestore, by epoch", "BackupAndRestore, by steps"
SUBJECTS = (OURS, EPOCH, STEPS)
SMOKE = ("--recipe=smoke", "--epochs=1000")
SPEED94 = ("--recipe=speed94", "--epochs=1000", "--image_size_schedule=", "--dataset=auto")
MAX_DIFFERENCE = 0.1  # of our own goodput from the one by the median time of a step
MEASURED_STEPS = 9  # of Keras, before a trial begins
MAX_LATE_SECONDS = 5.0  # from the start of Python to the first start of our account
BEGIN, STEP = re.compile(r"begins with step (\d+)"), re.compile(r"step (\d+) at (\S+)")
DETAILS = re.compile(
    r"(killed every .*): (\d+) steps kept, (\d+) lost, (.*) s a step, useful (.*), start-up (\S+ %)(?:, own (.*))?"
)
HEADER = ("run", "kills", "steps kept", "steps lost", "seconds per step", "useful", "start-up", "by its own account")


class Process(NamedTuple):
    """A process that was killed: Unix times of its start and end, and what it printed."""

    start: float
    end: float
    output: str


def train_with_kills(interval: float, total: float, flags: Sequence[str], trial: Trial) -> str:
    """Kill a run every `interval` seconds until `total` seconds are over, and tell what is left of its work."""
    directory = trial.scratch / "run"
    if trial.subject == OURS:
        function = runs.script("train.py", [*flags, f"--train_dir={directory}"])
    else:
        save_freq = "epoch" if trial.subject == EPOCH else steps_per_save(trial.scratch, flags)
        function = keras_fit(directory, save_freq, flags)
    processes = start_and_kill(function, trial.scratch, interval, total)
    trial.details = f"killed every {interval:g} s for {total:g} s: "
    if trial.subject == OURS:
        trial.details += describe_ours(directory, processes[0].start, total)
    else:
        trial.details += describe_keras(processes, step_restored(function, trial.scratch), total)
    return f"{len(processes)} starts"


def keras_fit(directory: Path, save_freq: str, flags: Sequence[str]) -> Callable[[], object]:
    """Return a function that replaces its process by Keras `fit` with `BackupAndRestore`."""
    command = [sys.executable, "-m", "tests.faults.backup_and_restore", str(directory), save_freq, *flags]
    return functools.partial(os.execv, sys.executable, command)


def steps_per_save(scratch: Path, flags: Sequence[str]) -> str:
    """Measure how many steps Keras takes in the time between two saves of ours."""
    with Child(keras_fit(scratch / "measured", "epoch", flags), scratch / "output-measured") as child:
        while len(moments := [float(moment) for _, moment in STEP.findall(child.output)]) <= MEASURED_STEPS:
            check(not child.wait(0.1), f"ends by itself: {child.last_line}")
    return str(max(1, round(DEFAULT_INTERVAL_SECONDS / statistics.median(np.diff(moments)))))


def start_and_kill(function: Callable[[], object], scratch: Path, interval: float, total: float) -> list[Process]:
    """Start a process again and again; kill it whenever another interval has passed since the beginning."""
    processes: list[Process] = []
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < total - 0.01:
        start = time.time()
        with Child(function, scratch / f"output-{len(processes)}") as child:
            child.wait(min((elapsed // interval + 1) * interval, total) - elapsed)
        processes.append(Process(start, time.time(), child.output))
    return processes


def describe_ours(directory: Path, start: float, total: float) -> str:
    """Describe the outcome of a run of ours; the steps lost and the start-up are by its own account."""
    timer, newest = PhaseTimer(), latest_checkpoint(directory)
    timer.resume(read_metadata(newest) if newest else {}, read_times(directory))
    own = timer.summary()["goodput"] or 0.0
    batch_size = files.read_json(directory / files.CONFIG)["batch_size"]
    records = read_records(directory / files.METRICS)
    seconds = [batch_size / each["images_per_sec"] for each in records if each.get("images_per_sec")]
    start_seconds = sum(timer.seconds[phase] for phase in ("start", "compile", "not_running"))
    text, useful = _describe(timer.step, timer.lost_steps, seconds, start_seconds, total)
    late = (timer.first_start or 0.0) - start
    check(0 <= late < MAX_LATE_SECONDS, f"its account begins {late:.1f} s after its start: {text}")
    check(abs(own - useful) < MAX_DIFFERENCE, f"by its own account the share is {100 * own:.1f} %: {text}")
    return f"{text}, own {100 * own:.1f} %"


def describe_keras(processes: Sequence[Process], kept: int, total: float) -> str:
    """Describe the outcome of Keras, which ended with `kept` steps. The first step ends the start-up of a process."""
    ends = [[(int(step), float(moment)) for step, moment in STEP.findall(each.output)] for each in processes]
    seconds = [float(each) for moments in ends for each in np.diff([moment for _, moment in moments])]
    firsts = [moments[0][1] if moments else each.end for each, moments in zip(processes, ends, strict=True)]
    start_seconds = sum(first - each.start for first, each in zip(firsts, processes, strict=True))
    return _describe(kept, sum(map(len, ends)) - kept, seconds, start_seconds, total)[0]


def step_restored(function: Callable[[], object], scratch: Path) -> int:
    """Start Keras once more, and return the step with which it begins; 0 if it does not."""
    with Child(function, scratch / "output-restored") as child:
        while not (match := BEGIN.search(child.output)) and not child.wait(0.1):
            pass
    return int(match[1]) if match else 0


def _describe(
    kept: int, lost: int, step_seconds: Sequence[float], start_seconds: float, total: float
) -> tuple[str, float]:
    """Return the outcome as `DETAILS` reads it, and the useful share of the time."""
    median = statistics.median(step_seconds) if step_seconds else 0.0
    useful = kept * median / total
    parts = f"{median:.3f} s a step, useful {100 * useful:.1f} %, start-up {100 * start_seconds / total:.1f} %"
    return f"{kept} steps kept, {lost} lost, {parts}", useful


def table(log: TrialLog) -> str:
    """Return the outcome of each trial with kills at intervals."""
    rows = [(row["subject"], *match.groups("")) for row in log.rows if (match := DETAILS.match(row["details"]))]
    return harness.table(HEADER, rows)


EXPERIMENTS = [
    # a kill every so many seconds, for so many
    Experiment("goodput of smoke", SUBJECTS, 1, 0, functools.partial(train_with_kills, 60.0, 120.0, SMOKE)),
    Experiment("goodput of speed94", SUBJECTS, 0, 1, functools.partial(train_with_kills, 60.0, 1800.0, SPEED94)),
]
