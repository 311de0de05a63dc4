"""Programs of this project run as subprocesses: trainings, and peers that make steps on request."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError, UsageError
from cifar_towers.files import run_files


def script_path(name: str) -> str:
    """The path of a program in `scripts/`.

    Raises:
      UsageError: it does not exist, as in an installed copy.
    """
    path = Path(__file__).resolve().parents[2] / "scripts" / name
    if not path.exists():
        raise UsageError(
            f"{path} does not exist; this needs a checkout of the project: git clone it, and start it there"
        )
    return str(path)


def run_training(config: TrainConfig, quiet: bool = False) -> dict:
    """Runs `scripts/train.py` with these settings; returns the content of its result.json.

    Raises:
      RunError: it failed, or left no result.
      UsageError: this is no checkout.
    """
    with tempfile.TemporaryFile("w+") as captured:
        output = {"stdout": captured, "stderr": captured} if quiet else {}
        process = subprocess.Popen(train_command(config), **output)
        try:
            code = process.wait()
        except BaseException:  # on a signal, let the training save its last step
            process.terminate()
            process.wait()
            raise
        if code:
            error = _last_line(captured) if quiet else "its error is printed above"
            raise RunError(
                f"the training in {config.directory} ended with exit code {code} ({error}); the same command resumes it"
            )
    result = run_files.read_json_if_any(config.directory / run_files.RESULT)
    if not result:
        raise RunError(
            f"the training in {config.directory} left no {run_files.RESULT}; free disk space and repeat the command"
        )
    return result


def train_command(config: TrainConfig) -> list[str]:
    """The command of a training with these settings."""
    settings = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
    flags = [f"--{field.name}={value}" for field, value in settings if value != field.default]
    return [sys.executable, script_path("train.py"), *flags]


@contextlib.contextmanager
def open_peer(command: Sequence[str], trained_parameters: int) -> Iterator[Callable[[int], list[float]]]:
    """A peer's process as a function (steps) -> seconds of each; see scripts/peers/protocol.py.

    Raises:
      RunError: it cannot be started, ends early (the message is its last line of output), or trains another number of
        parameters than `trained_parameters`.
    """
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise RunError(f"{command[0]} cannot be started: {error.strerror}") from error

        def read_line() -> str:
            line = process.stdout.readline().strip()
            if not line:
                process.wait()
                raise RunError(_last_line(errors) or f"it ended with exit code {process.returncode}")
            return line

        def time_steps(steps: int) -> list[float]:
            with contextlib.suppress(BrokenPipeError):  # `read_line` raises the error
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
            return json.loads(read_line())

        try:
            _, trained = read_line().split()
            if int(trained) != trained_parameters:
                raise RunError(
                    f"it trains {int(trained):,} parameters where ours trains {trained_parameters:,}: another model"
                )
            yield time_steps
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # unread requests
                process.stdin.close()


def _last_line(file: TextIO) -> str:
    file.seek(0)
    lines = [line.strip() for line in file.read().splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
