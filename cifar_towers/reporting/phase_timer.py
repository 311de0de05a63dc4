"""Where the seconds of a run go."""

import time
from collections import Counter

TRAINING = ("train", "input", "report")  # what a step takes: itself, the wait for its batch, and telling of it


class PhaseTimer:
    """Where the seconds of a run go, by activity; carried on in checkpoints."""

    RECENT = 20  # steps that the rate shown is taken over

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self.images = 0  # of the steps charged to "train"
        self._since = time.monotonic()
        self._last: dict[str, float] = {}
        self._steps: list[tuple[float, float, int]] = []  # seconds, seconds of these spent waiting, images

    def charge(self, activity: str) -> None:
        """Books the time since the last call."""
        now = time.monotonic()
        self.seconds[activity] += now - self._since
        self._last[activity], self._since = now - self._since, now

    def count(self, images: int) -> None:
        """Counts the images of the step just charged to "train", and before it to "input"."""
        self.images += images
        if images:
            waited = self._last.get("input", 0.0)
            self._steps = [*self._steps[1 - self.RECENT :], (self._last["train"] + waited, waited, images)]

    def recent_rate(self) -> float:
        """Images a second over the last steps, evaluation, saving and compilation excluded."""
        seconds = sum(spent for spent, _, _ in self._steps)
        return sum(images for _, _, images in self._steps) / seconds if seconds else 0.0

    def recent_wait(self) -> float:
        """Share of the last steps' time in which they waited for their input."""
        seconds = sum(spent for spent, _, _ in self._steps)
        return sum(waited for _, waited, _ in self._steps) / seconds if seconds else 0.0

    def rate(self) -> float:
        """Images a second over all steps that did not compile, what is told of them included."""
        seconds = sum(self.seconds[activity] for activity in TRAINING)
        return self.images / seconds if seconds else 0.0

    def resume(self, seconds: dict[str, float], images: int) -> None:
        """Goes on from what an earlier start of the run had booked."""
        self.seconds.update(seconds)
        self.images = images

    @property
    def training_seconds(self) -> float:
        """Steps and compilation, without start, evaluation and saving."""
        return sum(self.seconds[activity] for activity in (*TRAINING, "compile"))
