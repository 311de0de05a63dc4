"""What is kept of one run: which steps are saved, what could not be, and what it goes back to."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cifar_towers.training import checkpoints, storage
from cifar_towers.training.state import TrainState

SECONDS = 30.0  # between checkpoints where no number of steps is asked for
SHARE = 0.01  # of the time, that saving may take there


class Keeper:
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
        try:
            bad = self._state.not_finite()
            if bad:
                raise OSError(None, f"{bad} is not finite")
            checkpoints.save(self._directory, step, self._state.named_variables(), facts, self._keep)
        except OSError as error:
            self.failed_saves += 1
            self._say(f"step {step} could not be saved ({error.strerror}); {self.what_is_kept()}")
            return False
        finally:
            self._since = time.monotonic()
            self._cost = self._since - start
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
        self._saved_step = checkpoints.read_facts(checkpoint)["step"]

    def last_good(self, step: int) -> dict:
        """The facts of the newest whole checkpoint that is older than `step`, after which nothing was good any more; of
        the oldest one if none is; empty if there is none at all."""
        whole = [path for path in checkpoints.saved(self._directory) if not checkpoints.damage(path)]
        kept = [checkpoints.read_facts(path) for path in whole]
        return next((facts for facts in reversed(kept) if facts["step"] < step), kept[0] if kept else {})

    def go_back(self, step: int) -> None:
        """Restores the checkpoint of `step` and removes those after it: the run comes to their steps again."""
        checkpoint = checkpoints.path_of(self._directory, step)
        for path in checkpoints.saved(self._directory):
            if path > checkpoint:
                storage.remove(path)
        self.restore(checkpoint)
