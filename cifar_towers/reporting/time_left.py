"""How long a run will still take: from the times of its steps so far, the image sizes and the evaluations to come."""

from collections import Counter
from collections.abc import Callable

from cifar_towers.config.schedules import RunLength
from cifar_towers.reporting.phase_timer import STEP_PHASES, PhaseTimer

BOOKED_PHASES = (*STEP_PHASES, "save", "profile")  # that the time of a step includes
FORWARD_SHARE = 1 / 3  # of a step's operations, until an evaluation has been timed
MIN_STEPS = 5  # that an estimate is made from


class TimeLeft:
    """The estimate of one run.

    A step of an image size that has not been seen takes the time of the largest seen, in proportion to the pixels.

    Args:
      image_size_at: step -> side of its images in pixels.
      passes_left: step -> how many images the evaluations to come will classify, each view counted.
    """

    def __init__(
        self,
        length: RunLength,
        batch_size: int,
        timer: PhaseTimer,
        image_size_at: Callable[[int], int],
        passes_left: Callable[[int], int],
    ):
        self._length, self._batch_size, self._timer = length, batch_size, timer
        self._image_size_at, self._passes_left = image_size_at, passes_left
        self._booked = Counter(timer.seconds)
        self._steps: Counter[int] = Counter()  # timed, by image size
        self._seconds: Counter[int] = Counter()  # of these steps
        self._steps_left: Counter[int] = Counter()
        self._compile_seconds = self._evaluate_seconds = 0.0
        self._passes = 0  # in these seconds
        self._last_step: int | None = None

    def end_step(self, step: int, compiled: bool) -> bool:
        """Books what the timer has measured since the last call; `step` steps are done, the last `compiled` before it.

        Returns whether this step gives the first estimate, of a run that has more to do than it has done.
        """
        new, self._booked = Counter(self._timer.seconds) - self._booked, Counter(self._timer.seconds)
        size = self._image_size_at(step - 1)
        self._compile_seconds += new["compile"]
        if compiled:
            self._steps[size] += 1
            self._seconds[size] += sum(new[phase] for phase in BOOKED_PHASES)
        if step - 1 == self._last_step:
            self._steps_left[size] -= 1
            self._evaluate_seconds += new["evaluate"]
            self._passes += self._passes_left(step - 1) - self._passes_left(step)
        else:  # the first, or the first after a rollback
            self._steps_left = Counter(map(self._image_size_at, range(step, self._length.last)))
        self._last_step = step
        return compiled and self._steps.total() == MIN_STEPS < self._steps_left.total()

    def seconds(self) -> float | None:
        """Until the run ends; None before there is enough to tell."""
        if self._steps.total() < MIN_STEPS:
            return None
        training = sum(count * self._step_seconds(size) for size, count in self._steps_left.items())
        unseen = [size for size, count in self._steps_left.items() if count and not self._steps[size]]
        compilation = len(unseen) * self._compile_seconds / len(self._steps)
        return training + compilation + self._passes_left(self._last_step) * self._pass_seconds()

    def _step_seconds(self, size: int) -> float:
        seen = size if self._steps[size] else max(self._steps)
        return self._seconds[seen] / self._steps[seen] * (size / seen) ** 2

    def _pass_seconds(self) -> float:
        if self._passes:
            return self._evaluate_seconds / self._passes
        return FORWARD_SHARE * self._step_seconds(self._image_size_at(self._length.last)) / self._batch_size
