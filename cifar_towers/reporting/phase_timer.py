"""Wall-clock seconds of a run by phase, images per second, and the time that a run will still take."""

import dataclasses
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from cifar_towers.config.schedules import RunLength

Phase = Literal["start", "train", "input", "report", "compile", "evaluate", "save"]
STEP_PHASES = ("train", "input", "report")  # of every step: the step, the wait for its batch, logging
TRAINING_PHASES = (*STEP_PHASES, "compile", "lost")
BOOKED_PHASES = (*STEP_PHASES, "save", "profile")  # phases that estimates count into the time of a step
RECENT_STEPS = 20  # steps that recent rates are averaged over
FORWARD_SHARE = 0.4  # evaluation time over training time of an image, until one is timed; runs had 0.3 to 0.5
MIN_STEPS = 5  # timed steps that an estimate needs


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


@dataclasses.dataclass
class TimeLeft:
    """The estimate of the time that a run will still take.

    The step time of an image size that has not been timed is scaled from the largest timed size by the number of
    pixels.
    """

    length: RunLength
    batch_size: int
    timer: PhaseTimer
    image_size_at: Callable[[int], int]  # step -> height and width of its images in pixels
    images_left: Callable[[int], int]  # step -> images that evaluations will still classify, each view counted

    def __post_init__(self) -> None:
        self._booked = dict(self.timer.seconds)
        self._steps: Counter[int] = Counter()  # timed, by image size
        self._seconds: defaultdict[int, float] = defaultdict(float)  # of these steps
        self._steps_left: Counter[int] = Counter()
        self._compile_seconds = self._evaluate_seconds = 0.0
        self._evaluated_images = 0  # in these seconds
        self._last_step: int | None = None

    def end_step(self, step: int, is_traced: bool) -> bool:
        """Add the seconds measured since the last call, which ends with finished step number `step`.

        Return True once: when enough steps were timed for an estimate, if more steps are left than were timed.
        """
        new = {phase: max(0.0, s - self._booked.get(phase, 0.0)) for phase, s in self.timer.seconds.items()}
        self._booked = dict(self.timer.seconds)
        size = self.image_size_at(step - 1)
        self._compile_seconds += new.get("compile", 0.0)
        if is_traced:
            self._steps[size] += 1
            self._seconds[size] += sum(new.get(phase, 0.0) for phase in BOOKED_PHASES)
        if step - 1 == self._last_step:
            self._steps_left[size] -= 1
            self._evaluate_seconds += new.get("evaluate", 0.0)
            self._evaluated_images += self.images_left(step - 1) - self.images_left(step)
        else:  # the first, or the first after a rollback
            self._steps_left = Counter(map(self.image_size_at, range(step, self.length.last)))
        self._last_step = step
        return is_traced and self._steps.total() == MIN_STEPS < self._steps_left.total()

    def seconds(self) -> float | None:
        """Return the seconds until the run ends; None before there is enough to tell."""
        if self._steps.total() < MIN_STEPS or self._last_step is None:
            return None
        training = sum(count * self._step_seconds(size) for size, count in self._steps_left.items())
        unseen = [size for size, count in self._steps_left.items() if count and not self._steps[size]]
        compilation = len(unseen) * self._compile_seconds / len(self._steps)
        return training + compilation + self.images_left(self._last_step) * self._evaluation_seconds_per_image()

    def _step_seconds(self, size: int) -> float:
        seen = size if self._steps[size] else max(self._steps)
        return self._seconds[seen] / self._steps[seen] * (size / seen) ** 2

    def _evaluation_seconds_per_image(self) -> float:
        if self._evaluated_images:
            return self._evaluate_seconds / self._evaluated_images
        full_size = self.image_size_at(self.length.total)  # not `last`, where images may still be small
        return FORWARD_SHARE * self._step_seconds(full_size) / self.batch_size
