"""A save that is killed at every call to the file system, and a power loss at any moment of a run that saves."""

import atexit
import contextlib
import functools
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults import disk, harness, subjects, tracing

MARKER = "returned-"  # `access` to a file of this name says that the save of the step that follows has returned
STRIDE = 4  # a quick look takes every fourth place
ATTEMPTS = 5
COUNTED = (*tracing.CHANGES, *tracing.MARKS)


class Place(NamedTuple):
    """Where a save is killed: when it is about to make this call."""

    name: str
    count: int  # the how many-th call of this name it is
    made: list[str]  # the names of all calls up to it


def kill(subject: str, number: int, _: random.Random, scratch: Path) -> harness.Outcome:
    """The save of step 4, the first that also removes a checkpoint, is killed when it is about to make one call."""
    places = _places(subject)
    index = sorted(range(len(places)), key=lambda index: (index % STRIDE, index))[number]
    place = places[index]
    for attempt in range(ATTEMPTS):  # another thread's name, written on the way, may have moved the count by one
        root, output = scratch / f"run-{attempt}", scratch / "trace"
        root.mkdir()
        inject = f"inject={place.name}:signal=KILL:when={place.count}"
        child, code = _save(subject, root, (1, 2, 3), (4,), output, COUNTED, "-e", inject)
        made = [call for call in tracing.calls(output) if call.thread == child]
        if code == -signal.SIGKILL and [call.name for call in made] == place.made and made[-1].result == "?":
            break
    else:
        raise RuntimeError(f"{subject} was not killed where it should have been, at {place.name} {place.count}")
    what = f"killed at {index + 1} of {len(places)}: {made[-1].told(root)}"
    with harness.children(functools.partial(subjects.recover, subject)) as recover:
        return _judge(what, recover, root, returned=3)


def lose_power(subject: str, _: int, rng: random.Random, scratch: Path, settles: bool = False) -> harness.Outcome:
    """The power goes at some moment while steps 1 to 5 are saved, and what was not synced has reached the disk or not.

    If the disk settles, all but the newest save that has returned, and what came after it, has reached the disk: so
    it is where a save is minutes after the one before, and the system writes in the meantime what nobody synced.
    """
    recorded, returns = _recording(subject)
    moment = rng.randint(0, len(recorded))
    before = [0, 0, *(done for done, _ in returns if done <= moment)]
    state, how = recorded.lose_power(moment, rng, settled=before[-2] if settles else 0)
    disk.lay_out(state, scratch)
    last = recorded.tell(moment - 1) if moment else "nothing"
    what = f"power lost after {moment} of {len(recorded)}: {last}; reached the disk: {how}"
    returned = max((int(step) for done, step in returns if done <= moment), default=0)
    return _judge(what, _recoverer(subject), scratch, returned)


def _judge(what: str, recover: Callable[[Path], tuple[int, str]], root: Path, returned: int) -> harness.Outcome:
    """What is promised: a restart finds, whole, the newest step whose save has returned, or the one after it."""
    try:
        step, state = recover(root)
    except harness.Raised as error:
        return harness.Outcome(what, f"refused: {str(error).split(':')[0]}", False)
    except harness.ChildDied as error:
        return harness.Outcome(what, str(error), False)
    if state == "wrong weights":
        return harness.Outcome(what, state, False)
    if step == 0:
        return harness.Outcome(what, "restart at 0" if returned else "nothing yet", not returned)
    names = {returned: "old", returned + 1: "new"}
    return harness.Outcome(what, names.get(step, "older" if step < returned else "never saved"), step in names)


@functools.cache
def _places(subject: str) -> list[Place]:
    """Every call by which the save of step 4 changes or syncs something, and the end of it."""
    with harness.scratch() as scratch:
        root, output = scratch / "run", scratch / "trace"
        root.mkdir()
        child, code = _save(subject, root, (1, 2, 3), (4,), output, COUNTED)
        calls = tracing.calls(output)
    if code or any(call.thread != child and call.changes(root) for call in calls):
        raise RuntimeError(f"{subject} does not save, or not from one thread")
    calls = [call for call in calls if call.thread == child]
    places, names = [], []
    for call in calls:
        names.append(call.name)
        if call.changes(root) or MARKER in call.told(root):
            places.append(Place(call.name, names.count(call.name), names.copy()))
    return places


@functools.cache
def _recording(subject: str) -> tuple[disk.Disk, list[tuple[int, str]]]:
    """What a run that saves steps 1 to 5 does to the disk, and when which save returned."""
    with harness.scratch() as scratch:
        root, output = scratch / "run", scratch / "trace"
        root.mkdir()
        _, code = _save(subject, root, (), (1, 2, 3, 4, 5), output, tracing.REPLAYED)
        if code:
            raise RuntimeError(f"{subject} does not save: exit code {code}")
        return tracing.replay(tracing.calls(output), root, MARKER)


def _save(
    subject: str,
    root: Path,
    before: Sequence[int],
    steps: Sequence[int],
    output: Path,
    names: Sequence[str],
    *options: str,
) -> tuple[int, int | None]:
    """A child that saves some steps, and then more of them with its calls of these names traced: (its process id, its
    exit code)."""

    def save() -> None:
        saver = subjects.SUBJECTS[subject](root)
        for step in before:
            saver.save(step)
        signal.raise_signal(signal.SIGSTOP)
        for step in steps:
            saver.save(step)
            os.access(root / f"{MARKER}{step}", os.F_OK)

    child = harness.fork(save)
    stopped = os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    if not stopped:
        raise RuntimeError(f"{subject} does not save")
    try:
        with tracing.traced(child, output, names, *options):
            os.kill(child, signal.SIGCONT)
            return child, harness.wait(child, 60)
    except BaseException:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise


_askers = contextlib.ExitStack()
atexit.register(_askers.close)


@functools.cache
def _recoverer(subject: str) -> Callable[[Path], tuple[int, str]]:
    """A child that recovers as often as it is asked to."""
    return _askers.enter_context(harness.children(functools.partial(subjects.recover, subject)))


EXPERIMENTS = [
    harness.Experiment(
        "kill in a save",
        subjects.EVERY,
        quick=lambda subject: math.ceil(len(_places(subject)) / STRIDE),
        long=lambda subject: len(_places(subject)),
        trial=kill,
    ),
    harness.Experiment("power loss", subjects.EVERY, quick=200, long=5_000, trial=lose_power),
    harness.Experiment(
        "power loss, older saves on disk",
        subjects.EVERY,
        quick=200,
        long=5_000,
        trial=functools.partial(lose_power, settles=True),
    ),
]
if not shutil.which("strace"):
    print("no strace: no save is watched or killed")
    EXPERIMENTS.clear()
