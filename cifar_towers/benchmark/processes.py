"""Programs of this project, started as a user starts them: trainings, and peers that wait for orders."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from cifar_towers.cli import tf_import
from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError
from cifar_towers.files import run_files


def train(config: TrainConfig, quiet: bool = False) -> dict:
    """Runs `scripts/train.py` with these settings to its end; the content of its result.json.

    Raises:
      RunError: it ended with another code than 0, or without a result. UsageError: this is no checkout.
    """
    with tempfile.TemporaryFile("w+") as said:
        output = {"stdout": said, "stderr": said} if quiet else {}
        process = subprocess.Popen(train_command(config), **output)
        try:
            code = process.wait()
        except BaseException:  # a signal: let it save its last step
            process.terminate()
            process.wait()
            raise
        if code:
            told = _last_line(said) if quiet else "its last words are above"
            raise RunError(f"the training in {config.directory} ended with {code} ({told}); the same command goes on")
    result = run_files.read_json_if_any(config.directory / run_files.RESULT)
    if not result:
        raise RunError(
            f"the training in {config.directory} left no {run_files.RESULT}; make room, and the same command goes on"
        )
    return result


def train_command(config: TrainConfig) -> list[str]:
    """The command of a training with these settings."""
    given = {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config) if getattr(config, f.name) != f.default
    }
    return [sys.executable, tf_import.script("train.py"), *(f"--{name}={value}" for name, value in given.items())]


@contextlib.contextmanager
def peer(command: Sequence[str], trained: int) -> Iterator[Callable[[int], list[float]]]:
    """A peer's process as a function (steps) -> seconds of each, once it is ready; see scripts/peers/protocol.py.

    Raises:
      RunError: it cannot run, or has ended; the message holds its last words. Or its steps train more or fewer numbers
        than are to be `trained`.
    """
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True)
        except OSError as error:
            raise RunError(f"{command[0]} cannot be started: {error.strerror}") from error

        def answer() -> str:
            line = process.stdout.readline().strip()
            if not line:
                process.wait()
                raise RunError(_last_line(said) or f"it ended with {process.returncode}")
            return line

        def run(steps: int) -> list[float]:
            with contextlib.suppress(BrokenPipeError):  # there is no answer then
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
            return json.loads(answer())

        try:
            _, found = answer().split()
            if int(found) != trained:
                raise RunError(f"it trains {int(found):,} numbers where ours trains {trained:,}: another net")
            yield run
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # what was not read
                process.stdin.close()


def _last_line(file: TextIO) -> str:
    file.seek(0)
    lines = [line.strip() for line in file.read().splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
