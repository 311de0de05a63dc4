"""A save that is killed at each of its file system calls, and a power loss at any moment of a run that saves."""

import contextlib
import functools
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import disk, harness, subjects, tracing
from tests.faults.harness import Experiment, Trial, check

MARKER = "returned-"  # a failed removal of `returned-3` marks in the trace that the save of step 3 has returned
ATTEMPTS = 5


def kill(trial: Trial) -> str:
    """Kill the save of step 4, the first that also removes a checkpoint, when it is about to make one call."""
    points, index = _traced_save(trial.subject), trial.index
    inject = f"inject={points[index].name}:signal=KILL:when={points[index].number}"
    for attempt in range(ATTEMPTS):  # a call elsewhere in between, as to wake up a thread, may shift the count by one
        scratch = trial.scratch / str(attempt)
        exit_code, calls = _save(trial.subject, scratch, (1, 2, 3), (4,), "-e", inject)
        if exit_code == -signal.SIGKILL and len(calls) == index + 1:
            break
    else:
        raise RuntimeError(f"{trial.subject} was not killed where it should have been, at {points[index]}")
    trial.details = f"killed at {index + 1} of {len(points)}: {calls[-1]}"
    return _recover(trial.subject, scratch / "run", returned=3)


def lose_power(settles: bool, trial: Trial) -> str:
    """Cut the power at some moment while steps 1 to 5 are saved; writes that were not synced may have reached the disk.

    With `settles`, the system has meanwhile written everything up to the newest save but one, as it would in the
    minutes between two saves.
    """
    recorded, returns = _recording(trial.subject)
    moment = trial.rng.randint(0, len(recorded))
    before = [(done, step) for done, step in returns if done <= moment]
    settled = before[-2][0] if settles and len(before) > 1 else 0
    state, reached = recorded.lose_power(moment, trial.rng, settled)
    disk.write_state(state, trial.scratch)
    trial.details = f"power lost after {moment} of {len(recorded)}; reached the disk: {reached}"
    return _recover(trial.subject, trial.scratch, returned=max((step for _, step in before), default=0))


def _recover(subject: str, root: Path, returned: int) -> str:
    """Guaranteed: a restart finds, intact, the newest step whose save has returned, or the step after it."""
    step, state = harness.in_worker(subjects.recover, subject, root)
    check(state == "intact", state)
    if step == 0:
        check(not returned, "restart at 0")
        return "nothing yet"
    check(step in (returned, returned + 1), "older" if step < returned else "never saved")
    return "old" if step == returned else "new"


@functools.cache
def _traced_save(subject: str) -> list[tracing.Call]:
    """Each call by which the save of step 4 changes or syncs something, and its end."""
    with harness.scratch_directory() as scratch:
        return _save(subject, scratch, (1, 2, 3), (4,))[1]


@functools.cache
def _recording(subject: str) -> tuple[disk.Disk, list[tuple[int, int]]]:
    """Return the disk operations of a run that saves steps 1 to 5, and their number at the return of each save."""
    with harness.scratch_directory() as scratch:
        _, calls = _save(subject, scratch, (), (1, 2, 3, 4, 5))
        return tracing.replay(calls, scratch / "run", MARKER)


def _save(
    subject: str, scratch: Path, before: Sequence[int], steps: Sequence[int], *options: str
) -> tuple[int, list[tracing.Call]]:
    """Save the steps `before` in a child, then `steps` while it is traced; return (exit code, calls)."""
    root, trace = scratch / "run", scratch / "trace"

    def save() -> None:
        save_step = subjects.make_save(subject, root)
        for step in before:
            save_step(step)
        with tracing.strace(trace, tracing.TRACED, "-y", "-xx", "-s", "100000000", *options):
            for step in steps:
                save_step(step)
                with contextlib.suppress(FileNotFoundError):
                    (root / f"{MARKER}{step}").rmdir()
            os._exit(0)

    root.mkdir(parents=True)
    with harness.Child(save, scratch / "output") as child:
        child.wait()
        if child.exit_code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{subject} does not save: {child.output}")
        output = Path(f"{trace}.{child.pid}")
        while "+++" not in output.read_text():  # until strace has written the end of the child
            time.sleep(0.001)
    return child.exit_code, tracing.read_calls(output, root, MARKER)


def _count_calls(subject: str) -> int:
    return len(_traced_save(subject))


EXPERIMENTS = [
    Experiment("kill in a save", subjects.ALL, _count_calls, _count_calls, kill),
    Experiment("power loss", subjects.ALL, 200, 5_000, functools.partial(lose_power, False)),
    Experiment("power loss, older saves on disk", subjects.ALL, 200, 5_000, functools.partial(lose_power, True)),
]
if not shutil.which("strace"):
    print("no strace: no save is traced or killed")
    EXPERIMENTS.clear()
