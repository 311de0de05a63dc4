"""Wall-clock seconds of a run by phase and images per second."""

import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

Phase = Literal["start", "train", "input", "report", "compile", "evaluate", "save"]
# of every step: the step, the wait for its batch, logging
STEP_PHASES = ("train", "input", "report")
TRAINING_PHASES = (*STEP_PHASES, "compile")
RECENT_STEPS = 20  # steps that recent rates are averaged over
Item = TypeVar("Item")


class TimedStep(NamedTuple):
    """The times of the host's turn in which a step was started."""

    images: int  # of the steps that finished in it: none, this one or the one before, or both
    idle: float  # seconds in which the device had no batch
    seconds: float


class PhaseTimer:
    """The seconds of a run by phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by phase
        self.images = 0  # trained on in steps that needed no compilation
        self._made = time.monotonic()
        self._asked = 0.0  # when the current batch was asked for
        self._received = 0.0  # when it came
        self._step_ended = 0.0  # when the last step ended of which this is known
        self._seconds_before = 0.0  # in the phases of steps, at the end of the step before
        self._idle = 0.0
        self._recent: deque[TimedStep] = deque(maxlen=RECENT_STEPS)

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Add the times of a checkpoint, as `metadata` returned them."""
        for phase, seconds in metadata["seconds"].items():
            self.seconds[phase] += seconds
        self.images += metadata["images"]

    def metadata(self) -> dict[str, Any]:
        """Return what checkpoints store."""
        return {"seconds": dict(self.seconds), "images": self.images}

    def summary(self) -> dict[str, Any]:
        """Return what a run's result says."""
        seconds = {phase: round(each, 3) for phase, each in self.seconds.items()}
        return {"seconds": seconds, "images_per_sec": self.images_per_sec()}

    # Phases

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Book the seconds of the context."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - start

    def end_start(self) -> None:
        """Book the seconds since the timer was made as the start."""
        self.seconds["start"] += time.monotonic() - self._made

    def inputs(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches, and book the seconds of the wait for each."""
        remaining = iter(batches)
        while True:
            self._asked = time.monotonic()
            with self.phase("input"):
                batch = next(remaining, None)
            self._received = time.monotonic()
            if batch is None:
                return
            yield batch

    # Steps

    def note_idle(self, previous_end: float | None) -> None:
        """Note how long the device waited for the current batch.

        The wait begins when the batch was asked for, or when the step before ended, if that was
        later. It ends when the batch came.

        Args:
          previous_end: when the step before ended, by `time.monotonic`; None if that is unknown.
        """
        if previous_end:
            self._step_ended = previous_end
        idle_from = max(self._asked, self._step_ended)
        self._idle = max(0.0, self._received - idle_from)

    def end_step(self, images: int) -> None:
        """Note the end of a turn of the host, in which a step was started and steps with so many
        images have finished.
        """
        self.images += images
        seconds = self._step_seconds()
        self._recent.append(TimedStep(images, self._idle, seconds - self._seconds_before))
        self._seconds_before = seconds

    def end_compilation(self) -> None:
        """Note the end of a step that was compiled. It counts in no rate."""
        self._seconds_before = self._step_seconds()

    def recent_rates(self) -> tuple[float, float] | tuple[None, None]:
        """Return the images per second of the last 20 steps, and the fraction of their time in
        which the device had no batch.

        Compilation, evaluation and saving do not count. Both are None until a step finished that
        needed no compilation.
        """
        images = sum(step.images for step in self._recent)
        if not images:
            return None, None
        seconds = sum(step.seconds for step in self._recent)
        idle = sum(step.idle for step in self._recent)
        return images / seconds, idle / seconds

    def images_per_sec(self) -> float | None:
        """Return the rate of all steps that needed no compilation, with their logging; None if
        there are none.
        """
        return self.images / self._step_seconds() if self.images else None

    def _step_seconds(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in STEP_PHASES)


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of steps and compilation, from the `seconds` of a timer or of a result."""
    return math.fsum(seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
