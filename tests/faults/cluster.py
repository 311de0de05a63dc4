"""A worker of a local cluster is killed, stopped or interrupted: the others end, and the restarted run loses no bit.

`scripts/launch.py` starts the workers, and restarts all of them from the last checkpoint.
"""

import functools
import os
import re
import select
import signal
import time
from pathlib import Path

from tests.faults import harness
from tests.faults.harness import Experiment, Trial, check
from tests.faults.runs import Run, last_recorded, script
from tests.faults.subjects import OURS

STEPS = 60
TIMEOUT = 240.0  # seconds that no run takes
MAX_RESPONSE = 30.0  # seconds from the signal to the end of the other workers
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--batch_size=24", "--precision=float32", "--intra_op_threads=1"),
    *("--checkpoint_every_steps=7", "--summary_every_steps=1", "--eval_every_epochs=0", f"--max_steps={STEPS}"),
)


def signal_worker(number: signal.Signals, trial: Trial) -> str:
    """One signal to one of two or three workers after a random step."""
    count = 2 + trial.index % 2
    victim, after = trial.rng.randrange(count), trial.rng.randint(1, STEPS - 10)
    trial.details = f"{number.name} to worker {victim} of {count} after step {after}"
    with launched(count, trial.scratch) as launcher:
        while last_recorded(launcher.directory) < after:
            running = launcher.exit_code is None and time.monotonic() < launcher.start + TIMEOUT
            check(running, "step not reached")
            time.sleep(0.002)
        workers = worker_pids(launcher.pid)
        victim_pid = workers.pop(victim)
        others = list(map(os.pidfd_open, workers.values()))
        os.kill(victim_pid, number)
        sent = time.monotonic()
        for descriptor in others:
            select.select([descriptor], [], [], TIMEOUT)  # until it has ended
            os.close(descriptor)
        response = time.monotonic() - sent
        launcher.wait(TIMEOUT)
    trial.details += f": all others ended {response:.3f} s after the signal"
    in_time = launcher.exit_code == 0 and response <= MAX_RESPONSE
    check(in_time, f"exit code {launcher.exit_code}: {launcher.last_line}")
    named = number == signal.SIGTERM or f"lost: worker {victim} of {count}" in launcher.output
    check(named, "the lost worker was not named")
    restarts = len(re.findall(r"restart \d+ of at most", launcher.output))
    same = launcher.weights == undisturbed_weights(count)
    outcome = f"{restarts} restart, {'same weights' if same else 'OTHER WEIGHTS'}"
    check(same and restarts == 1, outcome)
    return outcome


def launched(count: int, scratch: Path) -> Run:
    """`launch.py` with this many workers that train in `scratch/run`."""
    return Run(scratch, script("launch.py", (f"--num_workers={count}", "--", *FLAGS, f"--train_dir={scratch / 'run'}")))


@functools.cache
def undisturbed_weights(count: int) -> str:
    """SHA-256 of the final weights of an undisturbed run of this many workers."""
    with harness.scratch_directory() as scratch, launched(count, scratch) as launcher:
        launcher.wait(TIMEOUT)
        return launcher.weights


def worker_pids(launcher: int) -> dict[int, int]:
    """Worker index -> process id, of the launcher's children."""
    pids = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        index = re.search(r"--worker_index=(\d+)", Path(f"/proc/{pid}/cmdline").read_text())
        if index:
            pids[int(index[1])] = pid
    return pids


EXPERIMENTS = [
    Experiment(f"a worker: {number.name}", (OURS,), 1, 12, functools.partial(signal_worker, number))
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
]
