"""A worker of a local cluster is killed, stopped or interrupted: the others end, and the restarted run loses no bit.

`scripts/launch.py` starts the workers, and restarts all of them from the last checkpoint.
"""

import contextlib
import functools
import os
import re
import signal
import sys
import time
from pathlib import Path

from cifar_towers.files import run_files
from tests.faults import harness
from tests.faults.harness import Experiment, Outcome, Trial
from tests.faults.runs import last_recorded
from tests.faults.subjects import OURS

STEPS = 60
TIMEOUT = 240.0  # seconds that no run takes
MAX_RESPONSE = 30.0  # seconds from the signal to the end of the other workers
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--batch_size=24", "--precision=float32", "--intra_op_threads=1"),
    *("--checkpoint_every_steps=7", "--summary_every_steps=1", "--eval_every_epochs=0", f"--max_steps={STEPS}"),
)
LAUNCH = Path(__file__).parents[2] / "scripts" / "launch.py"


def signal_worker(number: signal.Signals, trial: Trial) -> Outcome:
    """One signal to one of two or three workers after a random step."""
    count = 2 + trial.index % 2
    victim, after = trial.rng.randrange(count), trial.rng.randint(1, STEPS - 10)
    with launched(count, trial.scratch) as launcher:
        start = time.monotonic()
        while last_recorded(trial.scratch / "run") < after:
            if launcher.exitcode is not None or time.monotonic() - start > TIMEOUT:
                return Outcome(f"{number.name} after step {after}", "step not reached", False)
            time.sleep(0.002)
        workers = worker_pids(launcher.pid)
        os.kill(workers.pop(victim), number)
        sent = time.monotonic()
        while any(map(_is_running, workers.values())) and time.monotonic() - sent < TIMEOUT:
            time.sleep(0.002)
        response = time.monotonic() - sent
        harness.wait(launcher, TIMEOUT)
    output = (trial.scratch / "output").read_text(errors="replace")
    details = f"{number.name} to worker {victim} of {count} after step {after}"
    details += f": all others ended {response:.3f} s after the signal"
    if launcher.exitcode != 0 or response > MAX_RESPONSE:
        return Outcome(details, f"exit code {launcher.exitcode}: {output.strip().splitlines()[-1][:100]}", False)
    if number != signal.SIGTERM and f"lost: worker {victim} of {count}" not in output:
        return Outcome(details, "the lost worker was not named", False)
    restarts = len(re.findall(r"restart \d+ of at most", output))
    same = final_weights(trial.scratch / "run") == undisturbed_weights(count)
    weights = "same weights" if same else "OTHER WEIGHTS"
    return Outcome(details, f"{restarts} restart, {weights}", same and restarts == 1)


@contextlib.contextmanager
def launched(count: int, scratch: Path):
    """`launch.py` with this many workers that train in `scratch/run`; all are killed at the end of the block."""
    train_dir = f"--train_dir={scratch / 'run'}"
    command = [sys.executable, str(LAUNCH), f"--num_workers={count}", "--", *FLAGS, train_dir]
    launcher = harness.fork(functools.partial(os.execv, sys.executable, command), scratch / "output")
    try:
        yield launcher
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.join()


@functools.cache
def undisturbed_weights(count: int) -> str:
    """SHA-256 of the final weights of an undisturbed run of this many workers."""
    with harness.scratch_directory() as scratch, launched(count, scratch) as launcher:
        harness.wait(launcher, TIMEOUT)
        return final_weights(scratch / "run")


def final_weights(directory: Path) -> str:
    """SHA-256 of the weights of a finished run; empty if it did not finish."""
    return run_files.read_json_if_any(directory / "result.json").get("weights_sha256", "")


def worker_pids(launcher: int) -> dict[int, int]:
    """Worker index -> process id, of the launcher's children."""
    pids = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        index = re.search(r"--worker_index=(\d+)", Path(f"/proc/{pid}/cmdline").read_text())
        if index:
            pids[int(index[1])] = pid
    return pids


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


EXPERIMENTS = [
    Experiment(f"a worker: {number.name}", (OURS,), 1, 12, functools.partial(signal_worker, number))
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
]
