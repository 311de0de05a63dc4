"""Programs run as subprocesses: trainings, and processes that measure steps on request."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from cifar_towers import errors, files
from cifar_towers.config import TrainConfig
from cifar_towers.errors import RunError, UsageError


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
        output = captured if quiet else None
        with subprocess.Popen(train_command(config), stdout=output, stderr=output) as process:
            try:
                code = process.wait()
            except BaseException:  # on a signal, let the training save its last step
                process.terminate()
                raise
        if code:
            error = _last_line(captured) if quiet else "its error is printed above"
            raise RunError(
                f"the training in {config.directory} ended with exit code {code} ({error}); the same command resumes it"
            )
    result = files.read_json_if_any(config.directory / files.RESULT)
    if not result:
        raise RunError(
            f"the training in {config.directory} left no {files.RESULT}; free disk space and repeat the command"
        )
    return result


def train_command(config: TrainConfig) -> list[str]:
    """The command of a training with these settings; those of its recipe are in a flagfile in the run's directory.

    The run is named after that file, as the recipe may be of the user's own, with no name in `configs/`.

    Raises:
      RunError: the file cannot be written.
    """
    flags: dict[bool, list[str]] = {True: [], False: []}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.name != "recipe":
            flags[field.metadata["per_run"]].append(f"--{field.name}={value}")
    flagfile = config.directory / f"{config.name}.cfg"
    try:
        files.make(config.directory)
        files.write_whole(flagfile, "\n".join(["# as it was timed", *flags[False], ""]))
    except OSError as error:
        raise RunError(f"{flagfile} cannot be written: {errors.error_text(error)}") from error
    return [sys.executable, script_path("train.py"), f"--flagfile={flagfile}", *flags[True]]


@contextlib.contextmanager
def open_process(command: Sequence[str], quiet: bool = True) -> Iterator[Callable[..., Any]]:
    """A process that writes lines of JSON, as a function that sends a request (if given) and returns the next answer.

    The process should end with its standard input, as it receives no Ctrl-C.

    Raises:
      RunError: the process cannot be started, answers with an error, or has ended; with `quiet`, the message is the
        last line of its output.
    """
    with tempfile.TemporaryFile("w+") as captured:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": captured if quiet else None}
        try:
            process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        except OSError as error:
            raise RunError(f"{command[0]} cannot be started: {error.strerror}") from error

        def request(message: Any = None) -> Any:
            if message is not None:
                with contextlib.suppress(BrokenPipeError):  # the missing answer is the error
                    print(json.dumps(message), file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                raise RunError(_last_line(captured) or f"its process has ended with exit code {code}")
            return check_answer(json.loads(line))

        try:
            yield request
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # unread requests
                process.stdin.close()


def check_answer(answer: Any) -> Any:
    """The answer; one with the keys `error`, the name of a class of errors, and `message` is raised."""
    if isinstance(answer, dict) and "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer


def _last_line(file: TextIO) -> str:
    file.seek(0)
    return next((line.strip()[:200] for line in reversed(file.readlines()) if line.strip()), "")
