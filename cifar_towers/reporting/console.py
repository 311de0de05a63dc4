"""Training progress in the terminal: a live line for a person, one plain line per epoch for a pipe."""

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cifar_towers.config.schedules import RunLength

MIN_BAR, MAX_BAR = 5, 20  # characters
OPTIONAL_FIELDS = ("rate", "step", "accuracy", "speed")  # left out in this order where the terminal is narrow


class ProgressStatus(NamedTuple):
    """What a line shows, of one step or as means of an epoch."""

    step: int
    loss: float
    accuracy: float
    learning_rate: float
    images_per_sec: float  # 0 while compiling


class _TolerantConsole(Console):
    """Prints nothing more once its pipe is closed, and ignores a full disk."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects, **options) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)


class Progress:
    """Prints the progress of a run of this length, unless `quiet`; the live line needs a terminal."""

    def __init__(self, length: RunLength, console: Console | None = None, quiet: bool = False):
        self.console = console or _TolerantConsole(
            highlight=False, soft_wrap=True, quiet=quiet, force_terminal=False if quiet else None
        )
        self._length = length
        self._live: Live | None = None
        self._start: tuple[float, int] | None = None  # time and step

    def log(self, line: str) -> None:
        """Prints a line that stays."""
        self.console.print(line, markup=False)

    def step(self, status: ProgressStatus) -> None:
        """Updates the live line, if there is a terminal."""
        self._start = self._start or (time.monotonic(), status.step)
        if not self.console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        self._live.update(Text(self._live_line(status), overflow="ellipsis", no_wrap=True))

    def epoch(self, status: ProgressStatus, scores: Sequence[str] = ()) -> None:
        """Prints the means of an epoch, and the scores of an evaluation at its end."""
        self.pause()
        self.log("  ".join([*self._fields(status).values(), *scores]))

    def pause(self) -> None:
        """Removes the live line, so that other lines can be printed."""
        if self._live:
            self._live.stop()
            self._live = None

    def _live_line(self, status: ProgressStatus) -> str:
        """The fields and the bar that fit the width of the terminal."""
        fields, width = self._fields(status), self.console.width
        for name in OPTIONAL_FIELDS:
            if len("  ".join(fields.values())) > width:
                del fields[name]
        line = "  ".join(fields.values())
        bar_width = min(MAX_BAR, width - len(line) - 1)
        if bar_width < MIN_BAR:
            return line
        done = (status.step - 1) % self._length.steps_per_epoch + 1  # of the epoch
        filled = min(bar_width, round(bar_width * done / self._length.steps_per_epoch))
        return "━" * filled + "╺" * (bar_width - filled) + " " + line

    def _fields(self, status: ProgressStatus) -> dict[str, str]:
        epoch, epochs = (step / self._length.steps_per_epoch for step in (status.step, self._length.last))
        fields = {
            "epoch": f"epoch {epoch:5.2f}/{epochs:.2f}",
            "step": f"step {status.step}/{self._length.last}",
            "loss": f"loss {status.loss:.4f}",
            "accuracy": f"accuracy {100 * status.accuracy:5.2f} %",
            "rate": f"rate {status.learning_rate:.4g}",
            "speed": f"{status.images_per_sec:,.0f} images/s" if status.images_per_sec else "compiling",
        }
        started, first = self._start or (0.0, status.step)
        if first < status.step < self._length.last:  # the remaining time is estimated from two steps on
            seconds = int((time.monotonic() - started) / (status.step - first) * (self._length.last - status.step))
            fields["left"] = f"{seconds // 60}:{seconds % 60:02d} left"
        return fields
