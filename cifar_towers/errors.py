"""Exceptions that end a run, with the exit code of each, and the words of messages: names, counts, commands to type.

Every error here carries one line for the user: what is wrong, why, what to type.
Only other exceptions, which are bugs, show a traceback; they exit with 1.
"""

import functools
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from cifar_towers.signals import STOP_SIGNALS

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FLAG_DASHES = re.compile(r"(?<![\w/-])--(?!help)(?=[a-z])")  # before the name of a setting
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"  # in a checkout
PROGRAM = re.compile(
    r"(?<![\w/=.])(train|launch|benchmark|predict|export|evaluate|compare_runs|report|runs)\.py(?![\w/:])"
)


class RunError(Exception):
    """A foreseen end of a run."""

    exit_code = 1
    meaning = "failed"  # in help texts
    label = "run"  # the beginning of the error's line

    def __init__(self, message: str):
        super().__init__(printable(message))


class UsageError(RunError, ValueError):
    """A flag, or a combination of flags, that cannot be used."""

    exit_code = 2
    meaning = label = "usage"


class DataError(RunError):
    """The data set is missing, cannot be downloaded, or is not what it should be."""

    exit_code = 3
    meaning = label = "data"


class DivergedError(RunError):
    """Losses, gradients or weights are not finite numbers."""

    exit_code = 4
    meaning = label = "diverged"


class WorkerLostError(RunError):
    """A worker of the cluster is missing or has stopped. All workers exit; restarted, they resume from a checkpoint."""

    exit_code = 5
    meaning = "a worker was lost"
    label = "lost"


TRAINING_ERRORS = (DivergedError, WorkerLostError)


class Interrupted(BaseException):
    """A signal asked the run to stop.

    Like `KeyboardInterrupt`, it is no `Exception`, so that no `except Exception` on the way takes it for a failure.
    """

    label = "interrupted"

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.exit_code = interrupt_exit_code(signal_number)


def interrupt_exit_code(signal_number: int) -> int:
    """Return the shell's exit code for a signal: 130 for SIGINT, 138 for SIGUSR1, 143 for SIGTERM."""
    return 128 + signal_number


def describe_exit_codes(*errors: type[RunError], success: str = "done", failure: str = "a bug") -> str:
    """Describe the exit codes of a program that may raise these errors, for its help text."""
    codes = [f"0 {success}", *(f"{error.exit_code} {error.meaning}" for error in errors)]
    interrupts = "/".join(str(code) for code in sorted(map(interrupt_exit_code, STOP_SIGNALS)))
    return ", ".join([*codes, f"{interrupts} interrupted", f"{RunError.exit_code} {failure}"])


def with_errors_for_python(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function raise each RunError without its inner frames and causes, with settings in place of flags.

    In its message the flag `--batch_size=256` becomes `batch_size=256`, which one types in Python.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except RunError as error:
            error.args = (FLAG_DASHES.sub("", str(error)),)
            raise error.with_traceback(None) from None

    return call


def error_line(error: BaseException) -> str:
    """Describe an error in one line: `usage: ...`, or the type and the start of the message of an unforeseen error."""
    if isinstance(error, (RunError, Interrupted)):
        return f"{error.label}: {error}"
    return f"{type(error).__name__}: {error_text(error, 300)}"


def error_text(error: BaseException, max_length: int = 200) -> str:
    """Return the message of an exception on one line; for an `OSError` without the file's name."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:max_length]


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names of a list as a part of a message, `"a, b and 7 more"`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "step"), count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """Escape the characters of a text that are not printable, so that it is one line and no terminal interprets it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def command(program: str, *arguments: str) -> str:
    """Return the shell command that runs a program of this installation, such as `evaluate.py`, from this directory."""
    name = name_programs(program)
    words = [Path(sys.executable), SCRIPTS / name] if name.endswith(".py") else [Path(sys.executable).with_name(name)]
    return shlex.join([*map(_from_here, words), *arguments])


def name_programs(text: str) -> str:
    """Write `cifar-towers-evaluate` for `evaluate.py` in a text, and so on, unless a checkout's script was started."""
    if (SCRIPTS / "train.py").exists() and not Path(sys.argv[0]).name.startswith("cifar-towers-"):
        return text
    return PROGRAM.sub(lambda match: f"cifar-towers-{match[1].replace('_', '-')}", text)


def _from_here(program: Path) -> str:
    """Return a program's path as one would type it."""
    if shutil.which(program.name) == str(program) or not program.exists():
        return program.name
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
