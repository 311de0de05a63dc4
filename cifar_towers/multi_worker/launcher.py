"""Starting the workers of a cluster on one machine, and starting all again when one is lost."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cifar_towers.errors import DataError, DivergedError, UsageError, interrupt_exit_code
from cifar_towers.multi_worker.cluster_spec import COORDINATION_PORT_OFFSET, MAX_WORKER_PORT

if TYPE_CHECKING:
    from cifar_towers.cli.shutdown import ShutdownHandler

LAUNCH_VARIABLE = "CIFAR_TOWERS_LAUNCH"  # environment variable with an id that all processes of one launch share
FINAL = (0, UsageError.exit_code, DataError.exit_code, DivergedError.exit_code)  # another start would end the same
PATIENCE = 10.0  # seconds for the others to end once one has failed; then they are killed
Started = tuple[subprocess.Popen, threading.Thread | None]  # a process, and who reads what it says


def launch(
    command: Sequence[str],
    num_workers: int,
    max_restarts: int,
    say: Callable[[str], None],
    stop: "ShutdownHandler",
) -> int:
    """Runs a training to its end, on several local workers or as the flags say; the exit code it ends with.

    Args:
      command: a training's; what a worker has to know comes after it.
      num_workers: how many to start here, on the loopback; 0: one process, which may be one of a cluster.
      max_restarts: how often to start again what a lost worker or a signal to one of them has ended.
      stop: a signal that comes to this process is passed on, and then nothing is started again; a second one kills.
    """
    os.environ[LAUNCH_VARIABLE] = uuid.uuid4().hex
    for restart in range(max_restarts + 1):
        codes = _run(command, num_workers, stop)
        first_failed = next((worker for worker, code in codes.items() if code), None)
        if first_failed is None or stop.received_signal or codes[first_failed] in FINAL:
            break
        if restart < max_restarts:
            who = f"worker {first_failed}" if num_workers else "it"
            say(f"{who} ended with exit code {codes[first_failed]}; restart {restart + 1} of at most {max_restarts}")
    return next(filter(None, codes.values()), 0)


def free_addresses(count: int) -> tuple[str, ...]:
    """Addresses on the loopback whose ports are free, as is the one that the first worker talks at."""
    while True:
        with contextlib.ExitStack() as held:
            listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            ports = [listener.getsockname()[1] for listener in listeners]
            talk = ports[0] + COORDINATION_PORT_OFFSET
            with contextlib.suppress(OSError):
                if max(ports) <= MAX_WORKER_PORT and talk not in ports:
                    held.enter_context(socket.create_server(("127.0.0.1", talk)))
                    return tuple(f"127.0.0.1:{port}" for port in ports)


def _run(command: Sequence[str], num_workers: int, stop: "ShutdownHandler") -> dict[int, int]:
    """Starts all, waits for all; worker -> exit code, in the order in which they ended."""
    workers = _start_all(command, num_workers) if num_workers else [_start(command)]
    processes = [process for process, _ in workers]
    stop.before_exit = lambda: _signal(processes, signal.SIGKILL)  # who asks twice wants none of them left
    codes: dict[int, int] = {}
    passed_on, deadline = 0, float("inf")
    while len(codes) < len(processes):
        for worker, process in enumerate(processes):
            if worker not in codes and (code := process.poll()) is not None:
                codes[worker] = code if code >= 0 else interrupt_exit_code(-code)
                if code:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        if stop.received_signal and not passed_on:
            passed_on = stop.received_signal
            _signal(processes, passed_on)
        if time.monotonic() > deadline:
            _signal(processes, signal.SIGKILL)
        time.sleep(0.05)
    for _, reader in workers:
        if reader:
            reader.join(1.0)  # its last words
    return codes


def _start_all(command: Sequence[str], count: int) -> list[Started]:
    """A worker each on its share of this machine's cores and GPUs, where there are enough of them."""
    addresses = ",".join(free_addresses(count))
    cores, gpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [], _gpus()
    workers = []
    for index in range(count):
        own = ["--strategy=multi_worker", f"--workers={addresses}", f"--worker_index={index}"]
        share = _share(gpus, index, count)
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {}
        started = _start([*command, *own], environment, "" if index == 0 else f"worker {index}: ")
        if share := _share(cores, index, count):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(started[0].pid, share)
        workers.append(started)
    return workers


def _start(command: Sequence[str], environment: Mapping[str, str] = {}, prefix: str = "") -> Started:
    """A process that writes where this one does; with a prefix, line by line after it, by a thread."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"} if prefix else {}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **pipe)
    if not prefix:
        return process, None
    reader = threading.Thread(target=_pass_on, args=(process.stdout, prefix), daemon=True)
    reader.start()
    return process, reader


def _pass_on(lines, prefix: str) -> None:
    for line in lines:
        with contextlib.suppress(OSError):
            print(prefix + line, end="", file=sys.stderr, flush=True)


def _share(things: Sequence, index: int, count: int) -> Sequence:
    """This one's of `count` equal shares; nothing where there are too few for all."""
    return things[len(things) * index // count : len(things) * (index + 1) // count] if len(things) >= count else []


def _gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name and name != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index in range(len(listed.stdout.splitlines()))]


def _signal(workers: Sequence[subprocess.Popen], number: int) -> None:
    for process in workers:
        if process.poll() is None:
            process.send_signal(number)
