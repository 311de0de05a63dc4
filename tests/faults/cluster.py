"""A worker of a local cluster that is killed, stopped or told to leave: the others notice, and all ends as undisturbed.

`scripts/launch.py` starts the workers, and starts all again from the last checkpoint.
"""

import contextlib
import functools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cifar_towers.files import run_files
from tests.faults.harness import Experiment, Outcome
from tests.faults.runs import last_recorded
from tests.faults.subjects import OURS

STEPS, LIMIT, NOTICED = 60, 240.0, 30.0  # seconds that no run takes, and within which all must have ended
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--batch_size=24", "--precision=float32", "--intra_op_threads=1"),
    *("--checkpoint_every_steps=7", "--summary_every_steps=1", "--eval_every_epochs=0", f"--max_steps={STEPS}"),
)
LAUNCH = Path(__file__).parents[2] / "scripts" / "launch.py"
FAULT = "a worker: "


def hurt(number: signal.Signals):
    """A trial of one signal to one worker after some step; the first has two workers, the second three, and so on."""

    def trial(_: str, index: int, rng: random.Random, scratch: Path) -> Outcome:
        count = 2 + index % 2
        victim, after = rng.randrange(count), rng.randint(1, STEPS - 10)
        with launched(count, scratch) as launcher:
            started = time.monotonic()
            while last_recorded(scratch / "run") < after:
                if launcher.poll() is not None or time.monotonic() - started > LIMIT:
                    return Outcome(f"{number.name} after step {after}", "did not come so far", False)
                time.sleep(0.002)
            workers = workers_of(launcher.pid)
            os.kill(workers[victim], number)
            signalled, others = time.monotonic(), [pid for place, pid in workers.items() if place != victim]
            while any(_runs(pid) for pid in others) and time.monotonic() - signalled < LIMIT:
                time.sleep(0.002)
            noticed = time.monotonic() - signalled
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(LIMIT)
        told = (scratch / "output").read_text(errors="replace")
        result = run_files.read_json_if_any(scratch / "run" / "result.json")
        what = f"{number.name} to worker {victim} of {count} after step {after}: all had ended in {noticed:.2f} s"
        restarts = len(re.findall(r"restart \d+ of at most", told))
        if launcher.returncode != 0 or noticed > NOTICED:
            return Outcome(what, f"exit code {launcher.returncode}: {told.strip().splitlines()[-1][:100]}", False)
        if number != signal.SIGTERM and f"lost: worker {victim} of {count}" not in told:
            return Outcome(what, "the lost worker was not named", False)
        same = result.get("weights_sha256") == undisturbed(count)
        return Outcome(what, f"{restarts} restart, {'same bits' if same else 'OTHER WEIGHTS'}", same and restarts == 1)

    return trial


@contextlib.contextmanager
def launched(count: int, scratch: Path, flags: Sequence[str] = ()):
    """`launch.py` with so many workers that train in `scratch/run`; all of them are gone afterwards."""
    with (scratch / "output").open("w") as output:
        command = [
            sys.executable,
            str(LAUNCH),
            f"--num_workers={count}",
            "--",
            *FLAGS,
            f"--train_dir={scratch / 'run'}",
        ]
        launcher = subprocess.Popen([*command, *flags], stdout=output, stderr=output, start_new_session=True)
        try:
            yield launcher
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


@functools.cache
def undisturbed(count: int) -> str:
    """SHA-256 of the weights that so many workers come to when nothing happens to them."""
    with tempfile.TemporaryDirectory() as scratch, launched(count, Path(scratch)) as launcher:
        launcher.wait(LIMIT)
        return run_files.read_json(Path(scratch, "run", "result.json"))["weights_sha256"]


def workers_of(launcher: int) -> dict[int, int]:
    """Worker -> process, of those that a launcher has started."""
    found = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        index = re.search(r"--worker_index=(\d+)", Path(f"/proc/{pid}/cmdline").read_text())
        if index:
            found[int(index[1])] = pid
    return found


def _runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def noticed(rows: Sequence[dict]) -> str:
    """How soon all workers had ended, by signal; empty where none was tried."""
    lines = []
    for name in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        told = (re.search(rf"^{name} to worker .* ended in ([\d.]+) s", row["what"]) for row in rows)
        seconds = [float(match[1]) for match in told if match]
        if seconds:
            lines.append(
                f"{name} to one worker, n={len(seconds)}: all had ended after {statistics.median(seconds):.2f} s in "
                f"the median, {max(seconds):.2f} s at most"
            )
    return "\n".join(lines)


EXPERIMENTS = [
    Experiment(f"{FAULT}{number.name}", (OURS,), 1, 12, hurt(number))
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
]
