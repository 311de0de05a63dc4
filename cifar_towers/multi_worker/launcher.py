"""The launcher: it starts the workers of a cluster on one machine, and restarts all of them when
one fails.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cifar_towers.errors import DataError, DivergedError, UsageError, interrupt_exit_code
from cifar_towers.signals import StopSignals

# a restart would not help
FINAL = (0, UsageError.exit_code, DataError.exit_code, DivergedError.exit_code)
# for the other workers to exit once one has failed; then they are killed
EXIT_TIMEOUT_SECONDS = 15.0
# a process, and the thread that prints its output
Started = tuple[subprocess.Popen, threading.Thread | None]


def launch(
    command: Sequence[str], num_workers: int, max_restarts: int, log: Callable[[str], None]
) -> int:
    """Run a training in `num_workers` local workers, or in one process if it is 0; return its exit
    code.

    Workers meet on the loopback interface, and `TF_CONFIG` tells them of each other. A single
    process may be part of a cluster. After an exit code that is not in `FINAL` all restart, at most
    `max_restarts` times, and resume. The first signal is forwarded and prevents restarts. A second
    one ends this process, and the workers stop on their own.

    Raises:
      UsageError: this machine has GPUs, and fewer than workers.
    """
    signals = StopSignals()
    for restart in range(max_restarts + 1):
        with signals.recorded():
            codes = _run(command, num_workers, signals)
        first_failed = next((worker for worker, code in codes.items() if code), None)
        if first_failed is None or signals.received or codes[first_failed] in FINAL:
            break
        name = f"worker {first_failed}" if num_workers else "the process"
        consequence = (
            f"restart {restart + 1} of at most {max_restarts}"
            if restart < max_restarts
            else "no restart is left"
        )
        log(f"{name} ended with exit code {codes[first_failed]}; {consequence}")
    return next(filter(None, codes.values()), 0)


def free_addresses(count: int) -> tuple[str, ...]:
    """Return loopback addresses with free ports."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return tuple(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)


def _run(command: Sequence[str], num_workers: int, signals: StopSignals) -> dict[int, int]:
    """Start all workers, wait, and return worker -> exit code, in the order in which the workers
    ended.
    """
    workers = _start_all(command, num_workers) if num_workers else [_start(command)]
    processes = [process for process, _ in workers]
    codes: dict[int, int] = {}
    forwarded = 0
    deadline = float("inf")
    while len(codes) < len(processes):
        for worker, process in enumerate(processes):
            code = process.poll()
            if code is not None and worker not in codes:
                codes[worker] = code if code >= 0 else interrupt_exit_code(-code)
                if code:
                    deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT_SECONDS)
        if signals.received and not forwarded:
            forwarded = signals.received
            _signal(processes, forwarded)
        if time.monotonic() > deadline:
            _signal(processes, signal.SIGKILL)
        time.sleep(0.05)
    for _, reader in workers:
        if reader:
            reader.join(1.0)  # its last lines
    return codes


def _start_all(command: Sequence[str], count: int) -> list[Started]:
    """Start each worker on its share of this machine's GPUs, and of its cores if there are enough
    for all.
    """
    addresses = free_addresses(count)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus = _gpus()
    if 0 < len(gpus) < count:
        raise UsageError(
            f"num_workers={count} needs one GPU per worker, and this machine has {len(gpus)}; "
            "start fewer workers, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    workers = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        cluster = {"cluster": {"worker": addresses}, "task": task}
        # gRPC would ask a proxy for the way to this machine
        environment = {"TF_CONFIG": json.dumps(cluster), "no_grpc_proxy": "127.0.0.1"}
        gpus_of_worker = _share(gpus, index, count)
        if gpus_of_worker:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of_worker)
        started = _start(command, environment, "" if index == 0 else f"worker {index}: ")
        cores_of_worker = _share(cores, index, count)
        if cores_of_worker:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(started[0].pid, cores_of_worker)
        workers.append(started)
    return workers


def _start(
    command: Sequence[str], environment: Mapping[str, str] = {}, prefix: str = ""
) -> Started:
    """Start a process that shares this one's output. With a `prefix`, a thread puts the prefix
    before each line.

    It has a process group of its own: after Ctrl-C it gets the signal from this process, and not
    from the terminal too.
    """
    output: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, process_group=0, **(output if prefix else {})
    )
    if not prefix:
        return process, None
    reader = threading.Thread(target=_print_lines, args=(process.stdout, prefix), daemon=True)
    reader.start()
    return process, reader


def _print_lines(lines: Iterable[str], prefix: str) -> None:
    for line in lines:
        with contextlib.suppress(OSError):
            print(prefix + line, end="", file=sys.stderr, flush=True)


def _share(items: Sequence, index: int, count: int) -> Sequence:
    """Return the share of one of `count` workers; empty if there are fewer items than workers."""
    return (
        items[len(items) * index // count : len(items) * (index + 1) // count]
        if len(items) >= count
        else []
    )


def _gpus() -> list[str]:
    """List the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [
            name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name and name != "-1"
        ]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index in range(len(listed.stdout.splitlines()))]


def _signal(workers: Sequence[subprocess.Popen], number: int) -> None:
    for process in workers:
        if process.poll() is None:
            process.send_signal(number)
