"""The command `cifar-towers`, started as a user starts it or called in this process."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

from cifar_towers.cli import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "cifar_towers"]
STARTED: list[subprocess.Popen] = []  # by the test that runs
STARTED_BY = "CIFAR_TOWERS_STARTED_BY_TEST"  # a variable that programs hand on to their processes


def start(program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
    """Start a program, with more variables in its environment."""
    marks = {"PYTHONPATH": str(ROOT), STARTED_BY: str(os.getpid())}
    environment = os.environ | marks | environment
    process = subprocess.Popen(
        [*COMMAND, program, *map(str, arguments)],
        env=environment,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )
    STARTED.append(process)
    return process


def finish(process, answer=None, timeout=120):
    """Return the exit code of a program and what it printed to standard output and error."""
    try:
        out, err = process.communicate(answer, timeout)
    finally:
        end(process)  # it may have exceeded its time
    return process.returncode, out, err


def end(process):
    """Kill a program that still runs."""
    process.kill()
    process.wait()


def end_all():
    """Kill what the test has started and left running, and what those programs have."""
    if not STARTED:
        return
    while STARTED:
        end(STARTED.pop())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(STARTED_BY) == str(os.getpid()):
                process.kill()


def call(patch, program, *arguments):
    """Call a program in this process and return its exit code; its errors are raised."""
    patch.setenv("KERAS_BACKEND", "tensorflow")  # as the program would leave it set
    return main.call(program, [*map(str, arguments)])


# under `make test`
OUTER_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "CONFIG", "NUM_GPUS"}


def make(*arguments):
    """Return what `make` prints."""
    environment = {name: value for name, value in os.environ.items() if name not in OUTER_MAKE}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout
