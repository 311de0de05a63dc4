"""Exceptions that end a run, with the exit code of each, and the words of messages: names and
counts.

Every error here carries one line for the user: what is wrong, why, what to type.
Other exceptions show a traceback, and exit with 1.
"""

from collections.abc import Sequence


class RunError(Exception):
    """A foreseen end of a run."""

    exit_code = 1
    label = "run"  # the beginning of the error's line

    def __init__(self, message: str):
        super().__init__(printable(message))


class UsageError(RunError, ValueError):
    """A flag, or a combination of flags, that cannot be used."""

    exit_code = 2
    label = "usage"


class DataError(RunError):
    """The data set is missing, cannot be downloaded, or is not what it should be."""

    exit_code = 3
    label = "data"


class DivergedError(RunError):
    """Losses, gradients or weights are not finite numbers."""

    exit_code = 4
    label = "diverged"


class WorkerLostError(RunError):
    """A worker of the cluster is missing or has stopped. All workers exit; restarted, they resume
    from a checkpoint.
    """

    exit_code = 5
    label = "lost"


class Interrupted(BaseException):
    """A signal asked the run to stop.

    Like `KeyboardInterrupt`, it is no `Exception`, so that no `except Exception` on the way takes
    it for a failure.
    """

    label = "interrupted"

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.exit_code = interrupt_exit_code(signal_number)


def interrupt_exit_code(signal_number: int) -> int:
    """Return the shell's exit code for a signal: 130 for SIGINT, 138 for SIGUSR1, 143 for
    SIGTERM.
    """
    return 128 + signal_number


def error_line(error: BaseException) -> str:
    """Describe an error in one line: `usage: ...`, or the type and the start of the message of an
    unforeseen error.
    """
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
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def printable(text: str) -> str:
    """Escape the characters of a text that are not printable, so that it is one line and no
    terminal interprets it.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
