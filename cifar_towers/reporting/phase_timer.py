"""Wall-clock seconds of a run by phase, and images per second."""

import time
from collections import Counter, deque
from typing import Any

STEP_PHASES = ("train", "input", "report")  # of every step: the step, the wait for its batch, logging
TRAINING_PHASES = (*STEP_PHASES, "compile")
PHASES = ("start", *TRAINING_PHASES, "evaluate", "save", "profile")
RECENT_STEPS = 20  # steps that recent rates are averaged over


class PhaseTimer:
    """Adds up the seconds of each phase over all starts of a run."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()  # by phase
        self.images = 0  # trained on in steps that did not compile
        self._last_end = time.monotonic()
        self._input_wait = 0.0  # of the current step
        self._recent: deque[Counter] = deque(maxlen=RECENT_STEPS)  # images, and seconds by phase, of a step

    def resume(self, seconds: dict[str, float], images: int) -> None:
        """Add what earlier starts of the run took."""
        self.seconds.update(seconds)
        self.images = images

    def metadata(self) -> dict[str, Any]:
        """What checkpoints store."""
        return {"seconds": self.seconds, "images": self.images}

    def summary(self) -> dict[str, Any]:
        """What a run's result says: seconds by phase, and images per second."""
        seconds = {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
        return {"seconds": seconds, "images_per_sec": self.images_per_sec()}

    def end_phase(self, phase: str) -> float:
        """Book the seconds since the end of the last phase, and return them."""
        if phase not in PHASES:
            raise ValueError(f"phase {phase}: one of {', '.join(PHASES)}")
        now = time.monotonic()
        seconds, self._last_end = now - self._last_end, now
        self.seconds[phase] += seconds
        if phase == "input":
            self._input_wait = seconds
        return seconds

    def end_step(self, images: int, compiled: bool) -> None:
        """End the phase "train" of a step over so many images; "compile" if the step was not `compiled` before."""
        seconds = self.end_phase("train" if compiled else "compile")
        if compiled:
            self.images += images
            self._recent.append(Counter(images=images, input=self._input_wait, train=seconds))

    def recent_images_per_sec(self) -> float | None:
        """Of this start's last steps, without evaluation, saving and compilation; None before the first."""
        recent = sum(self._recent, Counter())
        return recent["images"] / (recent["input"] + recent["train"]) if recent["train"] else None

    def recent_input_wait(self) -> float | None:
        """Fraction of the last steps' time spent waiting for their batches; None before the first."""
        recent = sum(self._recent, Counter())
        return recent["input"] / (recent["input"] + recent["train"]) if recent["train"] else None

    def images_per_sec(self) -> float | None:
        """Of all steps that did not compile, with their logging; None before the first."""
        seconds = sum(self.seconds[phase] for phase in STEP_PHASES)
        return self.images / seconds if self.images else None

    @property
    def training_seconds(self) -> float:
        """Of steps and compilation, without start, evaluation and saving."""
        return sum(self.seconds[phase] for phase in TRAINING_PHASES)
