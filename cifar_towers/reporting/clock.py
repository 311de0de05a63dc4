"""Where the seconds of a run go."""

import time
from collections import Counter


class Clock:
    """Where the seconds of a run go, by activity; carried on in checkpoints."""

    RECENT = 20  # steps that the rate shown is taken over

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self.images = 0  # of the steps charged to "train"
        self._since = time.monotonic()
        self._steps: list[tuple[float, int]] = []

    def charge(self, activity: str) -> None:
        """Books the time since the last call."""
        now = time.monotonic()
        self.seconds[activity] += now - self._since
        self._last, self._since = now - self._since, now

    def count(self, images: int) -> None:
        """Counts the images of the step just charged."""
        self.images += images
        if images:
            self._steps = [*self._steps[1 - self.RECENT :], (self._last, images)]

    def recent_rate(self) -> float:
        """Images a second over the last steps, evaluation, saving and compilation excluded."""
        seconds = sum(spent for spent, _ in self._steps)
        return sum(images for _, images in self._steps) / seconds if seconds else 0.0

    def resume(self, seconds: dict[str, float], images: int) -> None:
        """Goes on from what an earlier start of the run had booked."""
        self.seconds.update(seconds)
        self.images = images

    @property
    def training_seconds(self) -> float:
        """Steps and compilation, without start, evaluation and saving."""
        return self.seconds["train"] + self.seconds["compile"]
