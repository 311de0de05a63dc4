"""Wall-clock seconds of a run by phase and images per second."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, Literal

Phase = Literal["start", "train", "input", "report", "compile", "evaluate", "save"]
STEP_PHASES = ("train", "input", "report")  # of every step: the step, the wait for its batch, logging
TRAINING_PHASES = (*STEP_PHASES, "compile", "lost")
RECENT_STEPS = 20  # steps that recent rates are averaged over


class PhaseTimer:
    """The seconds of a run by phase.

    `lost` is the time of steps that were rolled back or not saved, `not_running` the time between processes.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by phase
        self.images = 0  # trained on in kept steps that needed no compilation
        self.step = self.lost_steps = 0  # numbers of steps kept and lost
        self.first_start: float | None = time.time()  # Unix time; None if an earlier version began the run
        self._last_end = time.monotonic()
        self._input_wait = 0.0  # of the current step
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=RECENT_STEPS)  # images, input wait, seconds

    def resume(self, saved: Mapping[str, Any], newest: Mapping[str, Any]) -> None:
        """Continue the times of a run from the `saved` metadata of a checkpoint, which is empty at step 0.

        The `newest` times are the last that the run wrote. Steps after the checkpoint count as lost.
        """
        saved_seconds = saved.get("seconds", {})
        self.seconds, self.images = defaultdict(float, saved_seconds), saved.get("images", 0)
        for phase, seconds in newest.get("seconds", {}).items():
            later = max(0.0, seconds - saved_seconds.get(phase, 0.0))  # negative if a power loss left older times
            self.seconds["lost" if phase in STEP_PHASES else phase] += later
        self.step, self.first_start = saved.get("step", 0), (saved or newest).get("first_start")
        lost_steps = newest.get("lost_steps", 0) + max(0, newest.get("step", 0) - self.step)
        self.lost_steps = max(saved.get("lost_steps", 0), lost_steps)
        if self.first_start:
            elapsed = time.time() - (time.monotonic() - self._last_end) - self.first_start
            self.seconds["not_running"] += max(0.0, elapsed - sum(self.seconds.values()))

    def metadata(self) -> dict[str, Any]:
        """Return what checkpoints store."""
        return {name: getattr(self, name) for name in ("seconds", "images", "step", "lost_steps", "first_start")}

    def summary(self) -> dict[str, Any]:
        """Return what a run's result says; `goodput` is the fraction of the time that went into the steps kept."""
        seconds, total = {phase: round(each, 3) for phase, each in self.seconds.items()}, sum(self.seconds.values())
        goodput = self.seconds.get("train", 0.0) / total if self.first_start and total else None
        rates = {"images_per_sec": self.images_per_sec(), "goodput": goodput}
        return {"seconds": seconds, "lost_steps": self.lost_steps, **rates}

    def end_phase(self, phase: Phase) -> float:
        """Book the seconds since the end of the last phase, and return them."""
        now = time.monotonic()
        seconds, self._last_end = now - self._last_end, now
        self.seconds[phase] += seconds
        if phase == "input":
            self._input_wait = seconds
        return seconds

    def end_step(self, images: int, is_traced: bool) -> None:
        """End the phase of a step over `images` images: "train", or "compile" if the step was not traced before."""
        seconds = self.end_phase("train" if is_traced else "compile")
        self.step += 1
        if is_traced:
            self.images += images
            self._recent.append((images, self._input_wait, self._input_wait + seconds))

    def recent_rates(self) -> tuple[float, float] | tuple[None, None]:
        """Return the images per second of the last 20 steps, and the fraction of their time spent waiting for batches.

        Compilation, logging, evaluation and saving do not count. Both are None before this process has timed a step.
        """
        images, waits, seconds = map(sum, zip(*self._recent, strict=True)) if self._recent else (0, 0.0, 0.0)
        return (images / seconds, waits / seconds) if seconds else (None, None)

    def images_per_sec(self) -> float | None:
        """Return the rate of all steps that needed no compilation, with their logging; None if there are none."""
        seconds = sum(self.seconds.get(phase, 0.0) for phase in STEP_PHASES)
        return self.images / seconds if self.images else None


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of steps, kept or lost, and compilation, from the `seconds` of a timer or of a result."""
    return math.fsum(seconds.get(phase, 0.0) for phase in TRAINING_PHASES)
