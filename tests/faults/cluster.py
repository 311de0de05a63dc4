"""A worker of a cluster is killed, stopped, interrupted or cut off, or its Slurm job is preempted:
the others end, and the run that the launcher restarts loses no bit.
"""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.faults import harness
from tests.faults.harness import Experiment, Trial, check
from tests.faults.runs import Run, command
from tests.faults.subjects import OURS

STEPS = 60
TIMEOUT = 240.0  # seconds that no run takes
MAX_RESPONSE = 30.0  # seconds from the fault to the end of the workers
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--batch_size=24", "--precision=float32"),
    *(
        "--checkpoint_every_steps=7",
        "--summary_every_steps=1",
        "--eval_every_epochs=0",
        f"--max_steps={STEPS}",
    ),
)
BATCH_SCRIPT = Path(__file__).parents[2] / "docs/cluster/train.sbatch"
SRUN = f"""#!{sys.executable}
# Starts two tasks as `srun` does, each on half of the cores, and passes SIGUSR1 on to both.
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
variables = [os.environ | {{"SLURM_PROCID": index, "SLURM_LOCALID": index}} for index in "01"]
tasks = [subprocess.Popen(command, env=environment) for environment in variables]
cores = sorted(os.sched_getaffinity(0))
for index, task in enumerate(tasks):
    os.sched_setaffinity(task.pid, cores[index::2] or cores)
signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> "$SLURM_SUBMIT_DIR/scontrol"\n'
# the command that follows
ISOLATED = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def signal_worker(number: signal.Signals, victims: Sequence[int], trial: Trial) -> str:
    """One signal to one of two or three workers after a random step."""
    count = 2 + trial.index % 2
    victim = trial.rng.choice(victims[:count])
    after = trial.rng.randint(1, STEPS - 10)
    trial.details = f"{number.name} to worker {victim} of {count} after step {after}"
    message = "" if number == signal.SIGTERM else f"lost: worker {victim} of {count}"
    with launched(count, trial.scratch) as launcher:
        wait_for_step(launcher, after)
        workers = psutil.Process(launcher.pid).children()  # in the order of their indices
        workers.pop(victim).send_signal(number)
        trial.response = time_to_end(workers)
        launcher.wait(TIMEOUT)
    return check_restarted(trial, launcher, count, message)


def cut_network(trial: Trial) -> str:
    """Cut the workers of a Slurm job off, in a network namespace of their own, until both have
    ended.
    """
    after = trial.rng.randint(1, STEPS - 10)
    trial.details = f"the loopback of two workers down after step {after}"
    with batch_job(trial.scratch, *ISOLATED) as job:
        wait_for_step(job, after)
        workers = [
            each for each in psutil.Process(job.pid).children(recursive=True) if not each.children()
        ]
        link = ["nsenter", f"--net=/proc/{job.pid}/ns/net", "ip", "link", "set", "lo"]
        subprocess.run([*link, "down"], check=True)
        trial.response = time_to_end(workers)
        subprocess.run([*link, "up"], check=True)
        job.wait(TIMEOUT)
    return check_restarted(trial, job, 2, "lost: worker ")


def check_restarted(trial: Trial, launcher: Run, count: int, message: str) -> str:
    """Check that a run's workers were restarted once, and ended with the weights of an undisturbed
    run.
    """
    check(trial.response <= MAX_RESPONSE, "not ended in time")
    check(launcher.exit_code == 0, launcher.ending)
    check(message in launcher.output, "the lost worker was not named")
    restarts = set(re.findall(r"restart \d+ of at most", launcher.output))
    same = launcher.weights == undisturbed_weights(count)
    outcome = f"{len(restarts)} restart, {'same weights' if same else 'OTHER WEIGHTS'}"
    check(same and len(restarts) == 1, outcome)
    return outcome


def preempt_job(trial: Trial) -> str:
    """SIGUSR1 to docs/cluster/train.sbatch after a random step, with stand-ins for srun and
    scontrol.
    """
    after = trial.rng.randint(1, STEPS - 10)
    trial.details = f"SIGUSR1 to the batch script after step {after}"
    requeued = trial.scratch / "scontrol"
    with batch_job(trial.scratch) as first:
        wait_for_step(first, after)
        start = time.monotonic()
        os.kill(first.pid, signal.SIGUSR1)
        first.wait(TIMEOUT)
        trial.response = first.end - start
    check(first.exit_code == 128 + signal.SIGUSR1, first.ending)
    check(
        requeued.exists() and requeued.read_text().startswith("requeue "),
        "the job was not queued again",
    )
    with batch_job(trial.scratch) as second:
        second.wait(TIMEOUT)
    check(second.exit_code == 0, second.ending)
    second.check_resumed(after)
    check(second.weights == undisturbed_weights(2), "OTHER WEIGHTS")
    return "requeued, same weights"


def batch_job(submit: Path, *before: str) -> Run:
    """Start the batch script as Slurm does on one node with two tasks; words of another command may
    stand before it.
    """
    if not (submit / ".venv").exists():
        (submit / ".venv").symlink_to(sys.prefix)
    programs = submit / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    variables = {
        "SLURM_SUBMIT_DIR": str(submit),
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": str(os.getpid() % 20_000),
    }
    variables |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    variables |= {"SLURM_STEP_NODELIST": "localhost", "SLURMD_NODENAME": "localhost"}
    variables["PATH"] = f"{programs}:{os.environ['PATH']}"
    words = [*before, "bash", str(BATCH_SCRIPT), *FLAGS]
    job = functools.partial(os.execvpe, words[0], words, os.environ | variables)
    return Run(submit, job, submit / "runs" / "slurm-job")


def launched(count: int, scratch: Path) -> Run:
    """Start the launcher with this many workers, which train in `scratch/run`."""
    return Run(
        scratch,
        command(
            "launch", (f"--num_workers={count}", "--", *FLAGS, f"--train_dir={scratch / 'run'}")
        ),
    )


@functools.cache
def undisturbed_weights(count: int) -> str:
    """SHA-256 of the final weights of an undisturbed run of this many workers."""
    with harness.scratch_directory() as scratch, launched(count, scratch) as launcher:
        launcher.wait(TIMEOUT)
        if not launcher.weights:
            raise RuntimeError(f"undisturbed workers ended with {launcher.output[-3000:]}")
        return launcher.weights


def wait_for_step(run: Run, step: int) -> None:
    """Wait until a run has recorded a step."""
    run.wait_until(lambda: step in run.steps or run.exit_code is not None, "step not reached")
    check(run.exit_code is None, f"ended before step {step}")


def time_to_end(processes: Sequence[psutil.Process]) -> float:
    """Return the seconds until all these processes have ended."""
    start = time.monotonic()
    psutil.wait_procs(processes, TIMEOUT)
    return time.monotonic() - start


CAN_CUT = os.geteuid() == 0 and shutil.which("ip")
MISSING = "" if CAN_CUT else "the right to make a network namespace, or ip"
EXPERIMENTS = [
    *(
        Experiment(
            f"a worker: {number.name}",
            (OURS,),
            1,
            12,
            functools.partial(signal_worker, number, (0, 1, 2)),
        )
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
    ),
    Experiment(
        "worker 0: SIGKILL", (OURS,), 1, 6, functools.partial(signal_worker, signal.SIGKILL, (0,))
    ),
    Experiment("a Slurm job: SIGUSR1", (OURS,), 1, 5, preempt_job),
    Experiment("a worker: network cut", (OURS,), 1, 6, cut_network, MISSING),
]
