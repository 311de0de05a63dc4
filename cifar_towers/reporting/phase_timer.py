"""Wall-clock seconds of a run by phase and images per second."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, Literal

Phase = Literal["start", "train", "input", "report", "compile", "evaluate", "save"]
STEP_PHASES = (
    "train",
    "input",
    "report",
)  # of every step: the step, the wait for its batch, logging
TRAINING_PHASES = (*STEP_PHASES, "compile")
RECENT_STEPS = 20  # steps that recent rates are averaged over


class PhaseTimer:
    """The seconds of a run by phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by phase
        self.images = 0  # trained on in steps that needed no compilation
        self._last_end = time.monotonic()
        self._input_wait = 0.0  # of the current step
        # seconds of input and of logging since the last step, while a GPU may compute the next one
        self._beside = 0.0
        self._recent: deque[tuple[int, float, float]] = deque(
            maxlen=RECENT_STEPS
        )  # images, input wait, seconds

    def resume(self, metadata: Mapping[str, Any]) -> None:
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

    def end_phase(self, phase: Phase) -> float:
        """Book the seconds since the end of the last phase, and return them."""
        now = time.monotonic()
        seconds, self._last_end = now - self._last_end, now
        self.seconds[phase] += seconds
        if phase == "input":
            self._input_wait = seconds
        if phase in ("input", "report"):
            self._beside += seconds
        return seconds

    def end_step(self, images: int, is_traced: bool) -> None:
        """End the phase of a step: "train", or "compile" if the step was not traced before.

        `images` are those of the steps that finished in it: none, this one or the one before, or
        both.
        """
        seconds = self.end_phase("train" if is_traced else "compile")
        if is_traced:
            self.images += images
            self._recent.append((images, self._input_wait, self._beside + seconds))
        self._beside = 0.0

    def recent_rates(self) -> tuple[float, float] | tuple[None, None]:
        """Return the images per second of the last 20 steps, and the fraction of their time spent
        waiting for batches.

        Compilation, evaluation and saving do not count. Both are None until a step finished that
        needed no compilation.
        """
        images, waits, seconds = (
            map(sum, zip(*self._recent, strict=True)) if self._recent else (0, 0.0, 0.0)
        )
        return (images / seconds, waits / seconds) if images else (None, None)

    def images_per_sec(self) -> float | None:
        """Return the rate of all steps that needed no compilation, with their logging; None if
        there are none.
        """
        seconds = sum(self.seconds.get(phase, 0.0) for phase in STEP_PHASES)
        return self.images / seconds if self.images else None


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of steps and compilation, from the `seconds` of a timer or of a result."""
    return math.fsum(seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
