"""Progress in the terminal: a live line for a person, one plain line per epoch for a pipe or a notebook."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich import progress
from rich.console import Console
from rich.table import Column

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.run_records import format_rate


class ProgressStatus(NamedTuple):
    """The values on a line, of one step or as means of an epoch."""

    step: int
    loss: float
    accuracy: float
    learning_rate: float
    images_per_sec: float | None  # None before the first step that needed no compilation
    seconds_left: float | None = None  # None: unknown
    saved_step: int = 0  # of the newest checkpoint; 0: none


class _TolerantConsole(Console):
    """A console that prints nothing more once its pipe is closed, and ignores a full disk."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects, **options) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)


class Progress:
    """The progress of a run of this length, printed unless `quiet`; the live line needs a terminal."""

    def __init__(self, length: RunLength, console: Console | None = None, quiet: bool = False):
        self.console = console or _TolerantConsole(
            # not rich's own guess: in notebooks FORCE_COLOR is set
            highlight=False, soft_wrap=True, quiet=quiet, force_terminal=sys.stdout.isatty(), force_jupyter=False
        )  # fmt: skip
        self._length = length
        self._live: progress.Progress | None = None

    def log(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, markup=False)

    def step(self, status: ProgressStatus) -> None:
        """Show a step on the live line, with a bar of its epoch."""
        done = (status.step - 1) % self._length.steps_per_epoch + 1
        self.activity(f"{self._describe(status)}  rate {status.learning_rate:.4g}", done / self._length.steps_per_epoch)

    def activity(self, text: str, done: float | None = None) -> None:
        """Show on the live line what the run does, with the fraction `done` of it or a moving bar."""
        if not self.console.is_terminal or self.console.quiet:
            return
        if not self._live:
            column = progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            bar = progress.BarColumn(20)
            stderr = sys.stderr.isatty()
            self._live = progress.Progress(bar, column, console=self.console, transient=True, redirect_stderr=stderr)
            self._live.add_task("")
            self._live.start()
        (task,) = self._live.tasks
        task.total = None if done is None else 1.0
        self._live.update(task.id, description=text, completed=done or 0.0)

    def epoch(self, status: ProgressStatus) -> None:
        """Print the means of an epoch."""
        self.pause()
        self.log(self._describe(status) + (f"  saved step {status.saved_step}" if status.saved_step else ""))

    def pause(self) -> None:
        """Remove the live line, so that other lines can be printed."""
        if self._live:
            self._live.stop()
            self._live = None

    def _describe(self, status: ProgressStatus) -> str:
        """Return the values of a line; an unknown one is as wide as a known one, and blank."""
        epoch, epochs = (f"{step / self._length.steps_per_epoch:.2f}" for step in (status.step, self._length.last))
        speed = f"{format_rate(status.images_per_sec):>6} images/s" if status.images_per_sec else " " * 15
        left = f"{format_estimate(status.seconds_left):>7} left" if status.seconds_left else " " * 12
        values = f"loss {status.loss:.4f}  accuracy {100 * status.accuracy:5.2f} %  {speed}  {left}"
        return f"epoch {epoch:>{len(epochs)}}/{epochs}  {values}".rstrip()


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on standard error, if that is a terminal, and remove it at the end.

    Yields:
      The function that sets the fraction of the work that is done.
    """
    console = Console(stderr=True)
    options = {"console": console, "transient": True, "disable": not console.is_terminal, "redirect_stdout": False}
    with progress.Progress(**options) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda done: bar.update(task, completed=done)


def format_seconds(seconds: float) -> str:
    """Return a duration as a clock shows it.

    >>> format_seconds(3725), format_seconds(65.4)
    ('1:02:05', '1:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_estimate(seconds: float) -> str:
    """Return an estimated duration: a long one in whole minutes, and one of hours in tenths of an hour.

    >>> format_estimate(65.4), format_estimate(2047), format_estimate(7264)
    ('1:05', '34 min', '2.0 h')
    """
    if seconds < 600:
        return format_seconds(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
