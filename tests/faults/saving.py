"""A save that is killed at each of its file system calls, and a power loss at any moment of a run that saves."""

import contextlib
import functools
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults import disk, harness, subjects, tracing
from tests.faults.harness import ChildDied, ChildError, Experiment, Outcome, Trial

MARKER = "returned-"  # `access` to `returned-3` marks in the trace that the save of step 3 has returned
STRIDE = 4  # the quick form tries every fourth call
ATTEMPTS = 5
COUNTED = (*tracing.CHANGES, *tracing.MARKS)


class KillPoint(NamedTuple):
    """The call before which a save is killed."""

    name: str
    count: int  # it is the count-th call of this name
    calls: list[str]  # the names of all calls up to it


def kill(trial: Trial) -> Outcome:
    """The save of step 4, the first that also removes a checkpoint, is killed when it is about to make one call."""
    points = _kill_points(trial.subject)
    index = sorted(range(len(points)), key=lambda index: (index % STRIDE, index))[trial.index]
    name, count, expected = points[index]
    for attempt in range(ATTEMPTS):  # a call of another thread in between may shift the count by one
        root, trace = trial.scratch / f"run-{attempt}", trial.scratch / "trace"
        inject = f"inject={name}:signal=KILL:when={count}"
        pid, exit_code = _save(trial.subject, root, (1, 2, 3), (4,), trace, COUNTED, "-e", inject)
        calls = [call for call in tracing.read_calls(trace) if call.thread == pid]
        killed = exit_code == -signal.SIGKILL and calls[-1].result == "?"
        if killed and [call.name for call in calls] == expected:
            break
    else:
        raise RuntimeError(f"{trial.subject} was not killed where it should have been, at {name} {count}")
    details = f"killed at {index + 1} of {len(points)}: {calls[-1].describe(root)}"
    return _recover(details, functools.partial(harness.in_child, subjects.recover, trial.subject), root, returned=3)


def lose_power(settles: bool, trial: Trial) -> Outcome:
    """The power is lost at some moment while steps 1 to 5 are saved; what was not synced has reached the disk or not.

    With `settles`, the system has meanwhile written everything up to the newest save but one, as it would in the
    minutes between two saves.
    """
    recorded, returns = _recording(trial.subject)
    moment = trial.rng.randint(0, len(recorded))
    before = [(done, step) for done, step in returns if done <= moment]
    settled = before[-2][0] if settles and len(before) > 1 else 0
    state, how = recorded.lose_power(moment, trial.rng, settled)
    disk.write_state(state, trial.scratch)
    last = recorded.descriptions[moment - 1] if moment else "nothing"
    details = f"power lost after {moment} of {len(recorded)}: {last}; reached the disk: {how}"
    returned = max((int(step) for _, step in before), default=0)
    return _recover(details, _recovering_worker(trial.subject), trial.scratch, returned)


def _recover(details: str, recover: Callable[[Path], tuple[int, str]], root: Path, returned: int) -> Outcome:
    """Guaranteed: a restart finds, intact, the newest step whose save has returned, or the step after it."""
    try:
        step, weights = recover(root)
    except ChildError as error:
        return Outcome(details, f"refused: {str(error).split(':')[0]}", False)
    except ChildDied as error:
        return Outcome(details, str(error), False)
    if weights == "wrong weights":
        return Outcome(details, weights, False)
    if step == 0:
        return Outcome(details, "restart at 0" if returned else "nothing yet", not returned)
    names = {returned: "old", returned + 1: "new"}
    return Outcome(details, names.get(step, "older" if step < returned else "never saved"), step in names)


@functools.cache
def _recovering_worker(subject: str) -> Callable[[Path], tuple[int, str]]:
    return harness.Worker(functools.partial(subjects.recover, subject))


@functools.cache
def _kill_points(subject: str) -> list[KillPoint]:
    """Each call by which the save of step 4 changes or syncs something, and its end."""
    with harness.scratch_directory() as scratch:
        root, trace = scratch / "run", scratch / "trace"
        pid, exit_code = _save(subject, root, (1, 2, 3), (4,), trace, COUNTED)
        calls = tracing.read_calls(trace)
    if exit_code or any(call.thread != pid and call.changes(root) for call in calls):
        raise RuntimeError(f"{subject} does not save, or not from one thread")
    points, names = [], []
    for call in calls:
        if call.thread == pid:
            names.append(call.name)
            if call.changes(root) or MARKER in call.describe(root):
                points.append(KillPoint(call.name, names.count(call.name), names.copy()))
    return points


@functools.cache
def _recording(subject: str) -> tuple[disk.Disk, list[tuple[int, str]]]:
    """The disk operations of a run that saves steps 1 to 5, and after how many of them which save returned."""
    with harness.scratch_directory() as scratch:
        root, trace = scratch / "run", scratch / "trace"
        _, exit_code = _save(subject, root, (), (1, 2, 3, 4, 5), trace, tracing.REPLAYED)
        if exit_code:
            raise RuntimeError(f"{subject} does not save: exit code {exit_code}")
        return tracing.replay(tracing.read_calls(trace), root, MARKER)


def _save(
    subject: str,
    root: Path,
    before: Sequence[int],
    steps: Sequence[int],
    trace: Path,
    names: Sequence[str],
    *options: str,
) -> tuple[int, int | None]:
    """A child saves the steps `before`, then `steps` with its calls of these names traced: (its pid, exit code)."""

    def save() -> None:
        saver = subjects.SUBJECTS[subject](root)
        for step in before:
            saver.save(step)
        signal.raise_signal(signal.SIGSTOP)
        for step in steps:
            saver.save(step)
            os.access(root / f"{MARKER}{step}", os.F_OK)

    root.mkdir()
    child = harness.fork(save)
    if not os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1]):
        raise RuntimeError(f"{subject} does not save")
    strace = tracing.Strace(trace, names, "-y", "-xx", "-s", "100000000", *options)
    with contextlib.ExitStack() as stack:
        stack.callback(child.join)
        stack.callback(child.kill)
        strace.attach(child.pid)
        stack.callback(strace.detach)
        os.kill(child.pid, signal.SIGCONT)
        harness.wait(child, 60)
        strace.wait()
        return child.pid, child.exitcode


EXPERIMENTS = [
    Experiment(
        "kill in a save",
        subjects.ALL,
        quick=lambda subject: math.ceil(len(_kill_points(subject)) / STRIDE),
        long=lambda subject: len(_kill_points(subject)),
        trial=kill,
    ),
    Experiment("power loss", subjects.ALL, 200, 5_000, functools.partial(lose_power, False)),
    Experiment("power loss, older saves on disk", subjects.ALL, 200, 5_000, functools.partial(lose_power, True)),
]
if not shutil.which("strace"):
    print("no strace: no save is traced or killed")
    EXPERIMENTS.clear()
