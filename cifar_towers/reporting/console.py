"""Progress in the terminal: a live line for a person, one plain line per epoch for a pipe or a
notebook.
"""

import contextlib
import datetime
import sys
from typing import NamedTuple

from rich import progress
from rich.console import Console
from rich.table import Column

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.records import format_rate


class ProgressStatus(NamedTuple):
    """The values on a line, of one step or as means of an epoch."""

    step: int
    loss: float
    accuracy: float
    learning_rate: float
    images_per_sec: float | None  # None before the first step that needed no compilation
    seconds_left: float | None = None  # None: unknown
    saved_step: int = 0  # of the newest checkpoint since the last epoch; 0: none


class _TolerantConsole(Console):
    """A console that prints nothing more once its pipe or file is closed, and ignores a full
    disk.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects, **options) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().print(*objects, **options)


class Progress:
    """The progress of a run of this length, printed unless `quiet`; the live line needs a
    terminal.
    """

    def __init__(self, length: RunLength, console: Console | None = None, quiet: bool = False):
        self.console = console or _TolerantConsole(
            # not rich's own guess: in notebooks FORCE_COLOR is set
            highlight=False,
            soft_wrap=True,
            quiet=quiet,
            force_terminal=sys.stdout.isatty(),
            force_jupyter=False,
        )
        self._length = length
        self._live: progress.Progress | None = None

    def log(self, line: str) -> None:
        """Print a line that stays. Characters that the terminal cannot encode become backslash
        escapes.
        """
        encoding = self.console.encoding
        self.console.print(line.encode(encoding, "backslashreplace").decode(encoding), markup=False)

    def step(self, status: ProgressStatus) -> None:
        """Show a step on the live line, with a bar of its epoch."""
        done = (status.step - 1) % self._length.steps_per_epoch + 1
        self.activity(
            f"{self._describe(status)}  rate {status.learning_rate:.4g}",
            done / self._length.steps_per_epoch,
        )

    def activity(self, text: str, done: float | None = None) -> None:
        """Show on the live line what the run does, with the fraction `done` of it or a moving
        bar.
        """
        if not self.console.is_terminal or self.console.quiet:
            return
        if not self._live:
            column = progress.TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True)
            )
            bar = progress.BarColumn(20)
            stderr = sys.stderr.isatty()
            self._live = progress.Progress(
                bar, column, console=self.console, transient=True, redirect_stderr=stderr
            )
            self._live.add_task("")
            self._live.start()
        (task,) = self._live.tasks
        task.total = None if done is None else 1.0
        self._live.update(task.id, description=text, completed=done or 0.0)

    def epoch(self, status: ProgressStatus) -> None:
        """Print the means of an epoch."""
        self.pause()
        self.log(
            self._describe(status)
            + (f"  saved step {status.saved_step}" if status.saved_step else "")
        )

    def pause(self) -> None:
        """Remove the live line, so that other lines can be printed."""
        if self._live:
            self._live.stop()
            self._live = None

    def _describe(self, status: ProgressStatus) -> str:
        """Return the values of a line; an unknown one is `-`."""
        epoch = f"{status.step / self._length.steps_per_epoch:.2f}"
        epochs = f"{self._length.last / self._length.steps_per_epoch:.2f}"
        left = format_seconds(status.seconds_left) if status.seconds_left else "-"
        values = f"loss {status.loss:.4f}  accuracy {100 * status.accuracy:5.2f} %"
        speed = f"{format_rate(status.images_per_sec):>6} images/s  {left:>8} left"
        return f"epoch {epoch:>{len(epochs)}}/{epochs}  {values}  {speed}"


def format_seconds(seconds: float) -> str:
    """Return a duration as a clock shows it, e.g. `0:01:05`."""
    return str(datetime.timedelta(seconds=round(seconds)))
