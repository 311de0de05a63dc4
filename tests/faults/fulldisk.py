"""Runs on a disk that is full or read-only, for a while or for good.

The directory of a whole run is a small disk in memory. The run itself begins and ends the fault, at
two of its `POINTS`, so that a trial can be repeated. Needs root, to mount the disk.
"""

import contextlib
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers.errors import DataError
from cifar_towers.runs import checkpoint
from tests.faults import hooks, runs
from tests.faults.harness import Experiment, Trial, check
from tests.faults.runs import Run
from tests.faults.subjects import OURS

LAST = runs.STEPS
KEPT = 3
STEPS = range(3, LAST + 1, 3)  # those that are saved
POINTS = ["start", "training"]
for _step in STEPS:
    POINTS += [f"saving {_step}", f"after {_step}"]
POINTS.append("again")

FAULTS = (  # how the point begins where the fault does, and what it is
    ("start", "full"),
    ("start", "read-only"),
    ("training", "full"),
    ("after", "full"),
    ("after", "few files"),
    ("saving", "full"),
    ("saving", "few files"),
    (f"saving {LAST}", "full"),
    (f"saving {LAST}", "few files"),
)
MAX_FILES = 500
LIMITS = f"size=500m,nr_inodes={MAX_FILES}"
FIRST_BYTES = 10_000_000  # that a checkpoint is taken to have before there is one


class Fault(NamedTuple):
    """A fault from one point to another; for good if `last` is empty."""

    kind: str
    amount: float  # checkpoints for which there is room, or eighths of the files
    first: str
    last: str


def fill_disk(trial: Trial) -> str:
    """Guaranteed: the run continues, older checkpoints stay and the weights are as without the
    fault. If the last step could not be saved, one line says so, and the same command resumes when
    there is room.
    """
    rng = trial.rng
    begins, kind = FAULTS[trial.index % len(FAULTS)]
    first = rng.choice([point for point in POINTS if point.startswith(begins)])
    last = rng.choice(("", rng.choice(POINTS[POINTS.index(first) + 1 :])))
    fault = Fault(kind, rng.choice((0.0, rng.random())), first, last)
    trial.details = str(fault)
    with small_disk(trial.scratch / "run") as disk:
        run, events = _train(trial, fault)
        check("fault" in events, "fault not reached")
        if run.exit_code == 0:
            return "done, saves failed" if "failed" in " ".join(events) else "done, all saved"
        saved = run.saved
        _mount("-o", f"remount,rw,{LIMITS}", str(disk))
        again, _ = _train(trial, Fault("none", 0.0, "", ""))
        check(again.exit_code == 0, f"restarted: {again.ending}")
        again.check_resumed(saved)
        if hooks.STARTED in run.output:
            return "last not saved, then done"
        return "not started, then done"


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a small tmpfs. One page of it is used, because a size of 0 would set no limit."""
    path.mkdir()
    _mount("-t", "tmpfs", "-o", LIMITS, "tmpfs", str(path))
    try:
        (path / ".page").write_bytes(b"used")
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def _remounted(disk: Path, fault: Fault) -> Iterator[None]:
    for _ in range(20):  # the run may write meanwhile, and more be used than is allowed
        checkpoints = checkpoint.list_checkpoints(disk)
        status = os.statvfs(disk)
        size = checkpoints[-1].stat().st_size if checkpoints else FIRST_BYTES
        options = {
            "full": f"size={shutil.disk_usage(disk).used + int(fault.amount * size)}",
            "few files": f"nr_inodes={MAX_FILES - status.f_ffree + int(8 * fault.amount)}",
            "read-only": "ro",
        }
        with contextlib.suppress(subprocess.CalledProcessError):
            _mount("-o", f"remount,{options[fault.kind]}", str(disk))
            break
    else:
        raise RuntimeError(f"{disk} cannot be remounted")
    yield
    _mount("-o", f"remount,rw,{LIMITS}", str(disk))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def _train(trial: Trial, fault: Fault) -> tuple[Run, list[str]]:
    """Return a run that ended, and its events, after a check of all guarantees."""
    prepare = functools.partial(_watch, trial.scratch / "run", fault)
    with runs.train(OURS, trial.scratch, prepare=prepare) as run:
        run.wait()

    events = re.findall(r"^event: (.+)$", run.output, re.MULTILINE)
    begin = events.index("fault") if "fault" in events else len(events)
    end = events.index("lifted") if "lifted" in events else len(events)
    started = hooks.STARTED in run.output
    done = f"saved {LAST}" in events
    errors = re.findall(r"^(?:run|usage): .+$", run.output, re.MULTILINE)
    _, weights = runs.reference(OURS)
    with_room = events[:begin] + events[end:]
    if done:
        exit_codes = (0,)
    elif started:
        exit_codes = (1,)
    else:
        exit_codes = (1, 2)

    failures = {
        "traceback": "Traceback" in run.output,
        f"exit code {run.exit_code}": run.exit_code not in exit_codes,
        "not one line of error": len(errors) != (0 if done else 1),
        "ended before the last step": started and not done and f"failed {LAST}" not in events,
        "a save failed with room": any(event.startswith("failed") for event in with_room),
        "a checkpoint was lost": "lost" in events or _has_lost_checkpoint(events, run.directory),
        "other weights": started and weights[:16] not in run.output,
        "other result": run.weights not in ("", weights),
        "no result": done and not run.weights and (begin == len(events) or end < len(events)),
    }
    for outcome, failed in failures.items():
        check(not failed, outcome)
    return run, events


def _watch(directory: Path, fault: Fault) -> None:
    """Let the run in this process begin and end the fault, and print these and its saves as
    events.
    """
    active = contextlib.ExitStack()
    events = []

    def report(event: str) -> None:
        events.append(event)
        os.write(1, f"event: {event}\n".encode())

    def reach(point: str) -> None:
        if point == fault.first:
            report("fault")
            active.enter_context(_remounted(directory, fault))
        elif point == fault.last:
            active.close()
            report("lifted")

    def watched(save: Callable) -> Callable:
        def wrapped(run, step, *args):
            reach("again" if f"failed {step}" in events else f"saving {step}")
            saved = save(run, step, *args)
            report(f"{'saved' if saved else 'failed'} {step}")
            if _has_lost_checkpoint(events, directory):
                report("lost")
            reach(f"after {step}")
            return saved

        return wrapped

    hooks.wrap("save", watched)
    hooks.before("loop", lambda *_: reach("training"))
    reach("start")


def _has_lost_checkpoint(events: Sequence[str], directory: Path) -> bool:
    """Return whether a checkpoint is damaged, or one of the newest that were saved is gone."""
    saved = [int(event.split()[1]) for event in events if event.startswith("saved")]
    left = []
    for path in checkpoint.list_checkpoints(directory):
        try:
            checkpoint.read_checkpoint(path)
        except DataError:
            return True
        left.append(checkpoint.step_of(path))
    return not set(saved[-KEPT:]) <= set(left)


CANNOT_MOUNT = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
MISSING = "the right to mount a disk" if CANNOT_MOUNT else ""
EXPERIMENTS = [Experiment("full disk", (OURS,), 10, 100, fill_disk, MISSING)]
