"""The terminal: one live line an epoch for a person, one plain line an epoch for a pipe."""

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cifar_towers.config.schedules import RunLength

WIDEST_BAR, NARROWEST_BAR = 20, 5  # characters


class Status(NamedTuple):
    """What a line tells: of one step, or as means of an epoch."""

    step: int
    loss: float
    accuracy: float
    rate: float
    images_per_sec: float  # 0 while compiling


class _Console(Console):
    """Says nothing more where nobody can hear it: into a closed pipe, or onto a full disk."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def print(self, *objects, **options) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)


class Progress:
    """Shows training as it goes, unless `quiet`; `console` decides by itself whether a person is looking."""

    def __init__(self, length: RunLength, console: Console | None = None, quiet: bool = False):
        self.console = console or _Console(
            highlight=False, soft_wrap=True, quiet=quiet, force_terminal=False if quiet else None
        )
        self._length = length
        self._live: Live | None = None
        self._started: tuple[float, int] | None = None

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False)

    def step(self, status: Status) -> None:
        """After each step. Does nothing unless a person is looking, but for the clock."""
        self._started = self._started or (time.monotonic(), status.step)
        if not self.console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        self._live.update(Text(self._line(status), overflow="ellipsis", no_wrap=True))

    def epoch(self, status: Status, scores: Sequence[str] = ()) -> None:
        """At the end of an epoch: its means, and what an evaluation adds."""
        self.pause()
        self.say("  ".join([*self._facts(status).values(), *scores]))

    def pause(self) -> None:
        """Takes the live line away, so that other lines can be printed."""
        if self._live:
            self._live.stop()
            self._live = None

    def _line(self, status: Status) -> str:
        """As much as there is room for on the terminal: what can be missed the most easily goes first."""
        facts, room = self._facts(status), self.console.width
        for name in ("rate", "step", "accuracy", "speed"):
            if len("  ".join(facts.values())) > room:
                del facts[name]
        told = "  ".join(facts.values())
        width = min(WIDEST_BAR, room - len(told) - 1)
        return f"{self._bar(status.step, width)} {told}" if width >= NARROWEST_BAR else told

    def _facts(self, status: Status) -> dict[str, str]:
        epoch, epochs = (step / self._length.steps_per_epoch for step in (status.step, self._length.last))
        speed = f"{status.images_per_sec:,.0f} images/s" if status.images_per_sec else "compiling"
        facts = {
            "epoch": f"epoch {epoch:5.2f}/{epochs:.2f}",
            "step": f"step {status.step}/{self._length.last}",
            "loss": f"loss {status.loss:.4f}",
            "accuracy": f"accuracy {100 * status.accuracy:5.2f} %",
            "rate": f"rate {status.rate:.4g}",
            "speed": speed,
            "left": self._remaining(status.step),
        }
        return {name: fact for name, fact in facts.items() if fact}

    def _remaining(self, step: int) -> str:
        started, first = self._started or (0.0, step)
        if step <= first or step >= self._length.last:
            return ""
        seconds = (time.monotonic() - started) / (step - first) * (self._length.last - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def _bar(self, step: int, width: int) -> str:
        done = (step - 1) % self._length.steps_per_epoch + 1
        filled = min(width, round(width * done / self._length.steps_per_epoch))
        return "━" * filled + "╺" * (width - filled)
