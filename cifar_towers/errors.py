"""What can end a run, and the exit code each end answers with.

Every error here carries one line for the user: what is wrong, why, what to type.
A traceback appears only for an exception that is not one of these: a bug, exit 1.
"""

NOTHING_TO_SAVE = "before the first step; nothing to save"  # message of an interrupt


def printable(text: str) -> str:
    """A text as one line that a terminal shows and never obeys: what is not printable, as in files' names, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def error_text(error: BaseException, most: int = 200) -> str:
    """What any exception says, on one line of at most so many characters. Of an `OSError` it is the system's words
    alone: the message around them names the file."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:most]


class RunError(Exception):
    """A foreseen end of a run; `exit_code` is what the process returns."""

    exit_code = 1

    def __init__(self, message: str):
        super().__init__(printable(message))


class UsageError(RunError, ValueError):
    """A flag, or a combination of flags, that cannot be used."""

    exit_code = 2


class DataError(RunError):
    """The data set is missing, cannot be fetched, or is not what it should be."""

    exit_code = 3


class DivergedError(RunError):
    """Losses, gradients or weights stopped being finite numbers."""

    exit_code = 4


class WorkerLostError(RunError):
    """A worker of the cluster did not come, or is gone. All end; started again, they go on from the last checkpoint."""

    exit_code = 5


class Interrupted(BaseException):
    """A signal asked the run to stop: 130 for SIGINT, 143 for SIGTERM. Like `KeyboardInterrupt`, no `Exception`:
    it can be raised anywhere, and nobody on the way may take it for a failure of their own.
    """

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def one_line(error: RunError | Interrupted) -> str:
    """What is shown of it, as `usage: ...`."""
    return f"{type(error).__name__.removesuffix('Error').lower()}: {error}"


def caused_by_interrupt(error: BaseException | None) -> bool:
    """Whether an error is what others have made of `Interrupted`."""
    while error and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error is not None
