"""A worker of a cluster is killed, stopped, interrupted or cut off, or its Slurm job is preempted: the others end, and
the restarted run loses no bit.

The launcher starts the workers, and restarts all of them from the last checkpoint.
"""

import contextlib
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults import harness
from tests.faults.harness import Experiment, Trial, check
from tests.faults.runs import Run, command, last_recorded
from tests.faults.subjects import OURS
from tests.programs import COMMAND

STEPS = 60
TIMEOUT = 240.0  # seconds that no run takes
MAX_RESPONSE = 30.0  # seconds from the fault to the end of the workers
FLAGS = (
    *("--dataset=synthetic", "--model=cifarnet", "--batch_size=24", "--precision=float32"),
    *("--checkpoint_every_steps=7", "--summary_every_steps=1", "--eval_every_epochs=0", f"--max_steps={STEPS}"),
)
BATCH_SCRIPT = Path(__file__).parents[2] / "docs/cluster/train.sbatch"
SRUN = f"""#!{sys.executable}
# Starts the tasks as `srun` does, and passes signals on to all of them.
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
tasks = []
for index in map(str, range(int(os.environ["SLURM_STEP_NUM_TASKS"]))):
    tasks.append(subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": index, "SLURM_LOCALID": index}}))
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> "$SLURM_SUBMIT_DIR/scontrol"\n'


def signal_worker(number: signal.Signals, victims: Sequence[int], trial: Trial) -> str:
    """One signal to one of two or three workers after a random step."""
    count = 2 + trial.index % 2
    victim, after = trial.rng.choice(victims[:count]), trial.rng.randint(1, STEPS - 10)
    trial.details = f"{number.name} to worker {victim} of {count} after step {after}"
    with launched(count, trial.scratch) as launcher:
        wait_for_step(launcher, after)
        workers = worker_pids(launcher.pid)
        victim_pid = workers.pop(victim)
        response = time_to_end(workers.values(), lambda: os.kill(victim_pid, number))
        launcher.wait(TIMEOUT)
    trial.details += f": all others ended {response:.3f} s after the signal"
    in_time = launcher.exit_code == 0 and response <= MAX_RESPONSE
    check(in_time, f"exit code {launcher.exit_code}: {launcher.last_line}")
    named = number == signal.SIGTERM or f"lost: worker {victim} of {count}" in launcher.output
    check(named, "the lost worker was not named")
    return check_recovered(launcher, count)


def cut_network(trial: Trial) -> str:
    """Take the link between two workers, in network namespaces of their own, down after a random step, and up again."""
    after = trial.rng.randint(1, STEPS - 10)
    trial.details = f"the link between two workers down after step {after}"
    with network_namespace() as (namespace, hosts), contextlib.ExitStack() as stack:
        workers = []
        for index, prefix in enumerate(([], ["ip", "netns", "exec", namespace])):
            flags = ["--max_restarts=3", "--", *FLAGS, f"--train_dir={trial.scratch / 'run'}"]
            flags += [
                "--strategy=multi_worker",
                f"--workers={','.join(f'{host}:5000' for host in hosts)}",
                f"--worker_index={index}",
            ]
            words = [*prefix, *COMMAND, "launch", *flags]
            scratch = trial.scratch / f"worker{index}"
            scratch.mkdir()
            workers.append(stack.enter_context(Run(scratch, functools.partial(os.execvp, words[0], words))))
            workers[-1].directory = trial.scratch / "run"
        wait_for_step(workers[0], after)
        link = ["ip", "-n", namespace, "link", "set", "link1"]
        pids = [pid for worker in workers for pid in worker_pids(worker.pid).values()]
        response = time_to_end(pids, lambda: subprocess.run([*link, "down"], check=True))
        subprocess.run([*link, "up"], check=True)
        for worker in workers:
            worker.wait(TIMEOUT)
    trial.details += f": all ended {response:.3f} s after the signal"
    check(response <= MAX_RESPONSE, "not ended in time")
    for worker in workers:
        check(worker.exit_code == 0, f"exit code {worker.exit_code}: {worker.last_line}")
        check("lost: worker " in worker.output, "the lost worker was not named")
    return check_recovered(workers[0], 2)


def preempt_job(trial: Trial) -> str:
    """SIGUSR1 to docs/cluster/train.sbatch after a random step, with stand-ins for srun and scontrol."""
    after = trial.rng.randint(1, STEPS - 10)
    trial.details = f"SIGUSR1 to the batch script after step {after}"
    job = functools.partial(run_batch_script, trial.scratch)
    with Run(trial.scratch, job) as first:
        first.directory = trial.scratch / "runs" / "slurm-job"
        wait_for_step(first, after)
        start = time.monotonic()
        os.kill(first.pid, signal.SIGUSR1)
        first.wait(TIMEOUT)
    trial.details += f": ended {time.monotonic() - start:.3f} s after the signal"
    check(first.exit_code == 128 + signal.SIGUSR1, f"exit code {first.exit_code}: {first.last_line}")
    requeued = trial.scratch / "scontrol"
    check(requeued.exists() and requeued.read_text().startswith("requeue "), "the job was not queued again")
    with Run(trial.scratch, job) as second:
        second.directory = first.directory
        second.wait(TIMEOUT)
    check(second.exit_code == 0, f"exit code {second.exit_code}: {second.last_line}")
    check("resuming from step" in second.output, "restarted at 0")
    check(second.weights == undisturbed_weights(2), "OTHER WEIGHTS")
    return "requeued, same weights"


def launched(count: int, scratch: Path) -> Run:
    """Start the launcher with this many workers, which train in `scratch/run`."""
    return Run(scratch, command("launch", (f"--num_workers={count}", "--", *FLAGS, f"--train_dir={scratch / 'run'}")))


def run_batch_script(submit: Path) -> None:
    """Replace this process by the batch script, as Slurm runs it on one node with two tasks."""
    if not (submit / ".venv").exists():
        (submit / ".venv").symlink_to(sys.prefix)
    programs = submit / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(submit), "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": str(os.getppid() % 20_000)}
    variables |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    variables |= {"SLURM_STEP_NODELIST": "localhost", "SLURMD_NODENAME": "localhost"}
    variables["PATH"] = f"{programs}:{os.environ['PATH']}"
    os.execve("/bin/bash", ["bash", str(BATCH_SCRIPT), *FLAGS], os.environ | variables)


@contextlib.contextmanager
def network_namespace() -> Iterator[tuple[str, tuple[str, str]]]:
    """Make a network namespace that a link joins with this one; return its name, and the two ends' addresses."""
    namespace, hosts = f"faults{os.getpid()}", ("10.213.7.1", "10.213.7.2")
    inside = ["ip", "-n", namespace]
    commands = [
        ["ip", "netns", "add", namespace],
        ["ip", "link", "add", "link0", "type", "veth", "peer", "name", "link1", "netns", namespace],
        *(["ip", "addr", "add", f"{hosts[0]}/24", "dev", "link0"], ["ip", "link", "set", "link0", "up"]),
        *([*inside, "addr", "add", f"{hosts[1]}/24", "dev", "link1"], [*inside, "link", "set", "link1", "up"]),
        [*inside, "link", "set", "lo", "up"],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        yield namespace, hosts
    finally:
        subprocess.run(["ip", "netns", "del", namespace], check=False)  # and with it the link


def wait_for_step(run: Run, step: int) -> None:
    """Wait until a run has recorded a step."""
    while last_recorded(run.directory) < step:
        check(run.exit_code is None and time.monotonic() < run.start + TIMEOUT, "step not reached")
        time.sleep(0.002)


def time_to_end(pids: Sequence[int], fault: Callable[[], object]) -> float:
    """Seconds from the fault to the end of all these processes."""
    descriptors = list(map(os.pidfd_open, pids))
    fault()
    start = time.monotonic()
    for descriptor in descriptors:
        select.select([descriptor], [], [], TIMEOUT)
        os.close(descriptor)
    return time.monotonic() - start


def check_recovered(run: Run, count: int) -> str:
    """Check that the workers were restarted once, and ended with the weights of an undisturbed run."""
    restarts = len(re.findall(r"restart \d+ of at most", run.output))
    same = run.weights == undisturbed_weights(count)
    outcome = f"{restarts} restart, {'same weights' if same else 'OTHER WEIGHTS'}"
    check(same and restarts == 1, outcome)
    return outcome


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
    *(
        Experiment(f"a worker: {number.name}", (OURS,), 1, 12, functools.partial(signal_worker, number, (0, 1, 2)))
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
    ),
    Experiment("worker 0: SIGKILL", (OURS,), 1, 6, functools.partial(signal_worker, signal.SIGKILL, (0,))),
    Experiment("a Slurm job: SIGUSR1", (OURS,), 1, 5, preempt_job),
]
if os.geteuid() == 0 and shutil.which("ip"):
    EXPERIMENTS.append(Experiment("a worker: network cut", (OURS,), 1, 6, cut_network))
else:
    print("no right to make a network namespace, or no ip: no worker is cut off")
