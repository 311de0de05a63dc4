"""Progress in the terminal: a live line for a person, one plain line per epoch for a pipe."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.run_records import format_rate

NOTEBOOK_SECONDS = 0.5  # between two texts on the line of a notebook
MIN_BAR, MAX_BAR = 5, 20  # characters
EPOCH_FIELDS = ("epoch", "loss", "accuracy", "speed", "left", "saved")  # of a line that stays: 100 characters
OPTIONAL_FIELDS = ("rate", "saved", "step", "accuracy", "speed")  # left out in this order where a terminal is narrow


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
        self._in_notebook = "ipykernel" in sys.modules and not quiet
        force_terminal = False if quiet or self._in_notebook else None  # Jupyter sets FORCE_COLOR, which rich obeys
        self.console = console or _TolerantConsole(
            highlight=False, soft_wrap=True, quiet=quiet, force_terminal=force_terminal, force_jupyter=False
        )
        self._last_shown = 0.0  # in a notebook
        self._length = length
        self._live: Live | None = None
        self._live_text: Callable[[], str] = str

    def log(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, markup=False)

    def step(self, status: ProgressStatus) -> None:
        """Show a step on the live line."""
        self._show(lambda: self._step_line(status))

    def activity(self, name: str, done: float | None = None) -> None:
        """Show on the live line what the run does between steps, with the fraction `done` or the seconds it takes."""
        start = time.monotonic()
        bar = "" if done is None else f"{_bar(done, MAX_BAR)} {name}"
        self._show(lambda: bar or f"{name} ... {time.monotonic() - start:.0f} s")

    def epoch(self, status: ProgressStatus) -> None:
        """Print the means of an epoch."""
        self.pause()
        fields = self._fields(status)
        self.log("  ".join(fields[name] for name in EPOCH_FIELDS).rstrip())

    def pause(self) -> None:
        """Remove the live line, so that other lines can be printed."""
        if self._live:
            self._live.stop()
            self._live = None
        if self._last_shown:
            self._overwrite("")
            self._last_shown = 0.0

    def _show(self, text: Callable[[], str]) -> None:
        """Put a text, made anew at each refresh, on the live line, if there is a terminal."""
        self._live_text = text
        if self._in_notebook and time.monotonic() - self._last_shown > NOTEBOOK_SECONDS:
            self._last_shown = time.monotonic()
            self._overwrite(text())
        if self._live is None and self.console.is_terminal:
            self._live = Live(
                console=self.console,
                refresh_per_second=8,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
                get_renderable=lambda: Text(self._live_text(), overflow="ellipsis", no_wrap=True),
            )
            self._live.start()

    def _overwrite(self, text: str) -> None:
        """Replace the current line of a notebook's output, where the cursor can only return to the line's beginning."""
        width = self.console.width
        print(f"\r{text[:width]:<{width}}\r", end="", flush=True)

    def _step_line(self, status: ProgressStatus) -> str:
        """Return the fields and the bar that fit the width of the terminal."""
        width = self.console.width
        fields = {name: text.strip() for name, text in self._fields(status).items() if text.strip()}
        for name in OPTIONAL_FIELDS:
            if len("  ".join(fields.values())) > width:
                fields.pop(name, None)
        line = "  ".join(fields.values())
        bar_width = min(MAX_BAR, width - len(line) - 1)
        if bar_width < MIN_BAR:
            return line
        done = (status.step - 1) % self._length.steps_per_epoch + 1  # of the epoch
        return f"{_bar(done / self._length.steps_per_epoch, bar_width)} {line}"

    def _fields(self, status: ProgressStatus) -> dict[str, str]:
        """Return the parts of a line; an unknown value is as wide as a known one, and blank."""
        last = self._length.last
        epoch, epochs = (f"{step / self._length.steps_per_epoch:.2f}" for step in (status.step, last))
        left = None if status.seconds_left is None or status.step == last else format_estimate(status.seconds_left)
        return {
            "epoch": f"epoch {epoch:>{len(epochs)}}/{epochs}",
            "step": f"step {status.step:{len(str(last))}}/{last}",
            "loss": f"loss {status.loss:.4f}",
            "accuracy": f"accuracy {100 * status.accuracy:5.2f} %",
            "rate": f"rate {status.learning_rate:.4g}",
            "speed": f"{format_rate(status.images_per_sec):>6} images/s" if status.images_per_sec else " " * 15,
            "left": f"{left:>7} left" if left else " " * 12,
            "saved": f"saved step {status.saved_step}" if status.saved_step else "",
        }


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on standard error, if that is a terminal, and remove it at the end.

    Yields:
      The function that sets the fraction of the work that is done.
    """
    from rich import progress  # a training has no use for the time of this import

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


def _bar(done: float, width: int) -> str:
    filled = min(width, round(width * done))
    return "━" * filled + "╺" * (width - filled)
