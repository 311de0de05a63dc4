"""Processes that measure steps on request."""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from cifar_towers import errors
from cifar_towers.errors import RunError


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
                raise RunError(last_line(captured) or f"its process has ended with exit code {code}")
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


def last_line(file: TextIO) -> str:
    """Return the last line of a file that is not blank, of at most 200 characters."""
    file.seek(0)
    return next((line.strip()[:200] for line in reversed(file.readlines()) if line.strip()), "")
