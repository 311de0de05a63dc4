"""What is kept of one run: which steps are saved, what could not be, and what it goes back to."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cifar_towers.checkpointing import checkpoint as checkpoints
from cifar_towers.errors import RunError
from cifar_towers.files import atomic_io
from cifar_towers.training.state import TrainState

SECONDS = 30.0  # between checkpoints where no number of steps is asked for
SHARE = 0.01  # of the time, that saving may take there


class CheckpointManager:
    """The checkpoints of one run in its directory.

    Args:
      every: steps between checkpoints; 0: by the clock.
      keep: how many of the newest to keep.

    Attributes:
      failed_saves: how many could not be made when they were due.
    """

    def __init__(self, directory: Path, state: TrainState, every: int, keep: int, say: Callable[[str], None]):
        self.failed_saves = 0
        self._directory, self._state, self._every, self._keep, self._say = directory, state, every, keep, say
        self._saved_step: int | None = None
        self._went_back_to: int | None = None
        self._cost, self._since = 0.0, time.monotonic()  # seconds that a save takes; when the last one ended

    def due(self, step: int, evaluated: bool) -> bool:
        """Whether to save after `step`; its score is worth keeping if it was `evaluated`."""
        if self._every:
            return step % self._every == 0
        return time.monotonic() - self._since >= max(self._cost / SHARE, 0.0 if evaluated else SECONDS)

    def save(self, step: int, facts: Mapping) -> bool:
        """Saves the state after `step`, or says why it cannot be; whether it is saved.

        A state with a number that is not finite is never saved.
        """
        if step == self._saved_step:
            return True
        start = time.monotonic()
        bad, why = self._state.first_nonfinite_variable(), ""
        try:
            if not bad:
                checkpoints.save(self._directory, step, self._state.named_variables(), facts, self._keep)
        except OSError as error:
            why = error.strerror or str(error)
        self._since = time.monotonic()
        self._cost = self._since - start
        if bad or why:
            self.failed_saves += 1
            self._say(f"step {step} could not be saved ({why or f'{bad} is not finite'}); {self.what_is_kept()}")
            return False
        self._saved_step = step
        self._say(f"saved step {step}")
        return True

    def what_is_kept(self) -> str:
        """The newest checkpoint, in words."""
        kept = checkpoints.saved(self._directory)
        return f"{kept[-1].name} is kept" if kept else "no checkpoint was written"

    def tidy(self) -> None:
        """Clears up after an earlier start that was killed, and says what was damaged."""
        for told in checkpoints.tidy(self._directory):
            self._say(told)

    def restore(self, checkpoint: Path) -> None:
        """Gives the state the values of a checkpoint."""
        checkpoints.restore(checkpoint, self._state.named_variables())
        self._saved_step = checkpoints.read_metadata(checkpoint)["step"]

    def go_back(self, last_good_step: int) -> int | None:
        """Restores the newest whole checkpoint up to a step after which no step was good, and removes those after it;
        the step it is of, or None if there is none. From where going back has not helped, it goes further back.

        Raises:
          RunError: those after it cannot be removed, and would be mistaken for what the run comes to now.
        """
        whole = [path for path in checkpoints.saved(self._directory) if not checkpoints.damage(path)]
        steps = [step for path in whole if (step := checkpoints.read_metadata(path)["step"]) <= last_good_step]
        if not steps:
            return None
        further = steps[-1] == last_good_step == self._went_back_to and len(steps) > 1
        self._went_back_to = step = steps[-2 if further else -1]
        checkpoint = checkpoints.path_of(self._directory, step)
        self.restore(checkpoint)
        for path in checkpoints.saved(self._directory):
            if path > checkpoint:
                try:
                    atomic_io.remove(path)
                except OSError as error:
                    raise RunError(f"{path} cannot be removed to go back to step {step}: {error.strerror}") from error
        return step
