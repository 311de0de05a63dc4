"""The programs of `scripts/`, started as a user starts them or called in this process."""

import os
import subprocess
import sys
from pathlib import Path

from cifar_towers.cli import main

SCRIPTS = Path(__file__).parents[1] / "scripts"


def start(script, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
    """Start a program, with more variables in its environment."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | environment, stdout=stdout, stderr=stderr, text=True)


def finish(process, answer=None, timeout=120):
    """Return the exit code of a program and what it printed to standard output and error."""
    try:
        out, err = process.communicate(answer, timeout)
    finally:
        process.kill()  # it may have exceeded its time
    return process.returncode, out, err


def call(patch, script, *arguments):
    """Call a program in this process and return its exit code; its errors are raised."""
    patch.setenv("KERAS_BACKEND", "tensorflow")  # as the program would leave it set
    patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    return getattr(main, Path(script).stem).__wrapped__() or 0
