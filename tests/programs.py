"""The command `cifar-towers`, started as a user starts it or called in this process."""

import os
import subprocess
import sys
from pathlib import Path

from cifar_towers.cli import main

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "cifar_towers"]


def start(program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
    """Start a program, with more variables in its environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(
        [*COMMAND, program, *map(str, arguments)],
        env=environment,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def finish(process, answer=None, timeout=120):
    """Return the exit code of a program and what it printed to standard output and error."""
    try:
        out, err = process.communicate(answer, timeout)
    finally:
        process.kill()  # it may have exceeded its time
    return process.returncode, out, err


def call(patch, program, *arguments):
    """Call a program in this process and return its exit code; its errors are raised."""
    patch.setenv("KERAS_BACKEND", "tensorflow")  # as the program would leave it set
    return main.call(program, [*map(str, arguments)])
