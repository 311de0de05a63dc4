"""A save that is killed at each of its file system calls, and a power loss at any moment of a run
that saves.
"""

import contextlib
import functools
import os
import shutil
import signal
from pathlib import Path

from tests.faults import harness, subjects, tracing
from tests.faults.disk import Disk, write_state
from tests.faults.harness import Experiment, Trial, check

STEPS = (1, 2, 3, 4, 5)
KILLED_STEP = 4  # the first that also removes a checkpoint
MARKER = "returned"  # its removal, which fails, marks in the trace that a save has returned
ATTEMPTS = 5


def kill(trial: Trial) -> str:
    """Kill the save of step 4 when it is about to make one call."""
    call = _calls_of_save(trial.subject)[trial.index]
    trial.details = f"killed at {call.name} {call.path}"
    inject = f"inject={call.name}:signal=KILL:when={call.number}"
    # a call elsewhere in between, as to wake up a thread, may shift the count by one
    for attempt in range(ATTEMPTS):
        root = trial.scratch / str(attempt) / "run"
        _, calls = _save(trial.subject, root, "-e", inject)
        if calls[-1][:2] == call[:2]:  # its temporary file has another name
            return _recover(trial.subject, root, returned=KILLED_STEP - 1)
    raise RuntimeError(f"{trial.subject} was not killed where it should have been, at {call}")


def lose_power(settles: bool, trial: Trial) -> str:
    """Cut the power at some moment while steps 1 to 5 are saved; what was not synced may have
    reached the disk.

    With `settles`, the system has meanwhile written everything up to the newest save but one.
    """
    disk, calls = record(trial.subject)
    moment = trial.rng.randint(0, len(disk))
    returns = [
        call.num_operations
        for call in calls
        if call.path == MARKER and call.num_operations <= moment
    ]
    settled = returns[-2] if settles and len(returns) > 1 else 0
    write_state(disk.lose_power(moment, trial.rng, settled), trial.scratch)
    trial.details = f"power lost before operation {moment} of {len(disk)}"
    return _recover(trial.subject, trial.scratch, returned=len(returns))


def _recover(subject: str, root: Path, returned: int) -> str:
    """Guaranteed: a restart finds, intact, the newest step whose save has returned, or the step
    after it.
    """
    step, state = harness.in_worker(subjects.recover, subject, root)
    check(state == "intact", state)
    if step == 0:
        check(not returned, "restart at 0")
        return "nothing yet"
    check(step in (returned, returned + 1), "older" if step < returned else "never saved")
    return "old" if step == returned else "new"


def _calls_of_save(subject: str) -> list[tracing.Call]:
    """Return the calls by which the save of step 4 changes or syncs something, and its end."""
    _, calls = record(subject)
    ends = [number for number, call in enumerate(calls, 1) if call.path == MARKER]
    return calls[ends[KILLED_STEP - 2] : ends[KILLED_STEP - 1]]


@functools.cache
def record(subject: str) -> tuple[Disk, list[tracing.Call]]:
    """Save STEPS; return a disk on which the same happened, and the calls that did it."""
    with harness.scratch_directory() as scratch:
        return _save(subject, scratch / "run")


def _save(subject: str, root: Path, *options: str) -> tuple[Disk, list[tracing.Call]]:
    """Save STEPS in a child that is traced with these options."""
    trace = root.with_name("trace")

    def save() -> None:
        save_step = subjects.make_save(subject, root)
        with tracing.strace(trace, *options):
            for step in STEPS:
                save_step(step)
                with contextlib.suppress(FileNotFoundError):
                    (root / MARKER).rmdir()
            os._exit(0)

    root.mkdir(parents=True)
    with harness.Child(save, root.with_name("output")) as child:
        child.wait()
        if child.exit_code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{subject} does not save: {child.output}")
        output = Path(f"{trace}.{child.pid}")
        child.wait_until(lambda: "+++" in output.read_text(), "strace has not written the end")
    return tracing.replay(output, root, MARKER)


MISSING = "" if shutil.which("strace") else "strace, which traces and kills saves"
EXPERIMENTS = [
    Experiment("kill in a save", subjects.ALL, _calls_of_save, _calls_of_save, kill, MISSING),
    Experiment(
        "power loss", subjects.ALL, 200, 5_000, functools.partial(lose_power, False), MISSING
    ),
    Experiment(
        "power loss, older saves on disk",
        subjects.ALL,
        200,
        5_000,
        functools.partial(lose_power, True),
        MISSING,
    ),
]
