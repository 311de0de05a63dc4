"""The checkpoints of a run: when to save, which to keep, what to restore, and how far to roll back."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf

from cifar_towers import files
from cifar_towers.checkpointing import variables as variable_files
from cifar_towers.checkpointing.checkpoint import (
    checkpoint_path,
    list_checkpoints,
    read_metadata,
    validate_checkpoint,
)
from cifar_towers.errors import DataError, RunError
from cifar_towers.files import CHECKPOINTS_DIR, best_effort_writes
from cifar_towers.multi_worker.cluster_spec import Workers

DEFAULT_INTERVAL_SECONDS = 30.0  # between checkpoints where no number of steps is asked for
MAX_TIME_FRACTION = 0.01  # of the run's time that saving may take there


class CheckpointManager:
    """The checkpoints of one run.

    Args:
      state: has `named_variables()` and `first_nonfinite_variable()`, as `TrainState`.
      every_steps: steps between checkpoints; 0: by the clock.
      max_to_keep: number of the newest to keep; the best is kept besides.
      log: called with lines for the user.

    Attributes:
      failed_saves: number of checkpoints that were due and could not be written.
    """

    def __init__(self, train_dir: Path, state, every_steps: int, max_to_keep: int, log: Callable[[str], None]):
        self.failed_saves = 0
        self._train_dir, self._state, self._log = train_dir, state, log
        self._every_steps, self._max_to_keep = every_steps, max_to_keep
        self._saved_step: int | None = None
        self._rolled_back_to: int | None = None
        self._save_seconds, self._last_save = 0.0, time.monotonic()

    def should_save(self, step: int, evaluated: bool) -> bool:
        """Return whether to save after `step`. An `evaluated` step is saved before its time, for its accuracy."""
        if self._every_steps:
            return step % self._every_steps == 0
        interval = max(self._save_seconds / MAX_TIME_FRACTION, 0.0 if evaluated else DEFAULT_INTERVAL_SECONDS)
        return time.monotonic() - self._last_save >= interval

    def save(self, step: int, metadata: Mapping) -> bool:
        """Save the state after `step` unless it is non-finite; return whether it is saved, and log why not."""
        if step == self._saved_step:
            return True
        start = time.monotonic()
        error = ""
        if nonfinite := self._state.first_nonfinite_variable():
            error = f"{nonfinite} is not finite"
        else:
            try:
                variables = self._state.named_variables()
                variable_files.save_checkpoint(self._train_dir, step, variables, metadata)
                prune_checkpoints(self._train_dir, self._max_to_keep)
            except OSError as failure:
                error = failure.strerror or str(failure)
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start
        if error:
            self.failed_saves += 1
            self._log(f"step {step} could not be saved ({error}); {self.describe_latest()}")
            return False
        self._saved_step = step
        return True

    def describe_latest(self) -> str:
        """Return what is left of the run: the name of its newest checkpoint, if there is one."""
        checkpoints = list_checkpoints(self._train_dir)
        return f"{checkpoints[-1].name} is kept" if checkpoints else "no checkpoint was written"

    def quarantine_damaged(self) -> None:
        """Remove what killed saves left; rename and log damaged checkpoints."""
        files.sweep(self._train_dir / CHECKPOINTS_DIR)
        for checkpoint in list_checkpoints(self._train_dir):
            if damage := validate_checkpoint(checkpoint):
                renamed = files.quarantine(checkpoint).name
                self._log(f"{checkpoint} is damaged ({damage}): set aside as {renamed}")

    def restore(self, checkpoint: Path) -> dict:
        """Restore the state from a checkpoint and return its metadata."""
        variable_files.restore_variables(checkpoint, self._state.named_variables())
        metadata = read_metadata(checkpoint)
        self._saved_step = metadata["step"]
        rollbacks = files.read_json_if_any(self._train_dir / files.ROLLBACKS).get("rollbacks", 0)
        return metadata | {"rollbacks": max(metadata.get("rollbacks", 0), rollbacks)}

    def roll_back(self, last_good_step: int, rollbacks: int) -> dict | None:
        """Restore the newest undamaged checkpoint up to `last_good_step` and remove the later ones.

        If the previous rollback ended at the same checkpoint, the one before it is taken.

        Args:
          rollbacks: the number of rollbacks with this one. A file of its own records it, as the next checkpoint will
            have it only later.

        Returns:
          The metadata of the restored checkpoint, or None if there is none to restore.

        Raises:
          RunError: a later checkpoint cannot be removed, and would be mistaken for one of the run as it continues.
        """
        path = self._train_dir / files.ROLLBACKS
        with best_effort_writes(path):
            files.write_json(path, {"rollbacks": rollbacks})
        undamaged = [path for path in list_checkpoints(self._train_dir) if not validate_checkpoint(path)]
        steps = [step for path in undamaged if (step := read_metadata(path)["step"]) <= last_good_step]
        if not steps:
            return None
        go_further = steps[-1] == last_good_step == self._rolled_back_to and len(steps) > 1
        self._rolled_back_to = step = steps[-2 if go_further else -1]
        checkpoint = checkpoint_path(self._train_dir, step)
        metadata = self.restore(checkpoint)
        for path in list_checkpoints(self._train_dir):
            if path > checkpoint:
                try:
                    files.remove(path)
                except OSError as error:
                    raise RunError(f"{path} cannot be removed to go back to step {step}: {error.strerror}") from error
        return metadata


def prune_checkpoints(train_dir: Path, max_to_keep: int) -> None:
    """Remove all checkpoints except the newest and the one of highest accuracy. What cannot be removed stays."""
    checkpoints = list_checkpoints(train_dir)
    best = max(checkpoints, key=_accuracy)
    for checkpoint in checkpoints[:-max_to_keep]:
        if checkpoint != best or _accuracy(best) < 0:
            with contextlib.suppress(OSError):
                files.remove(checkpoint)


def _accuracy(checkpoint: Path) -> float:
    """Return the accuracy measured at a checkpoint's step; negative if none was, or if the checkpoint is damaged."""
    try:
        return float(read_metadata(checkpoint).get("accuracy") or -1.0)
    except DataError:
        return -1.0


class SharedCheckpoints:
    """The checkpoints of a run whose workers share worker 0's directory; all workers get what it restores.

    Args:
      manager: reads and writes the checkpoints, on worker 0.
      variables: the run's variables by name, which all workers have.
    """

    def __init__(self, manager: CheckpointManager, workers: Workers, variables: Mapping[str, tf.Variable]):
        self._manager, self._workers, self._variables = manager, workers, variables

    @property
    def failed_saves(self) -> int:
        """Number of checkpoints that were due and could not be written."""
        return self._manager.failed_saves

    def should_save(self, step: int, evaluated: bool) -> bool:
        """Return whether this worker has to save after `step`: never, unless it is worker 0."""
        return self._workers.is_chief and self._manager.should_save(step, evaluated)

    def save(self, step: int, metadata: Mapping) -> bool:
        """Save, on worker 0 alone, without waiting for the others; return whether the step is saved."""
        return not self._workers.is_chief or self._manager.save(step, metadata)

    def save_for_all(self, step: int, metadata: Mapping) -> bool:
        """Save, and return on all workers whether the step is saved; they wait for worker 0."""
        return self._workers.broadcast_from_chief(lambda: self._manager.save(step, metadata))

    def describe_latest(self) -> str:
        """Return a description of the newest checkpoint."""
        return self._workers.broadcast_from_chief(self._manager.describe_latest)

    def restore_latest(self, find: Callable[[], tuple[Path, dict] | None]) -> dict | None:
        """Restore the checkpoint that `find` returns on worker 0; return its metadata, or None if there is none."""

        def restore() -> dict | None:
            self._manager.quarantine_damaged()
            found = find()
            return self._manager.restore(found[0]) if found else None

        return self._broadcast(restore)

    def roll_back(self, last_good_step: int, rollbacks: int) -> dict | None:
        """Restore the newest checkpoint up to `last_good_step`; see `CheckpointManager.roll_back`."""
        return self._broadcast(lambda: self._manager.roll_back(last_good_step, rollbacks))

    def _broadcast(self, restore: Callable[[], dict | None]) -> dict | None:
        metadata = self._workers.broadcast_from_chief(restore)
        if metadata:
            self._broadcast_state()
        return metadata

    def _broadcast_state(self) -> None:
        """Assign the chief's values to the variables of all workers."""
        if self._workers.size == 1:
            return
        values = self._workers.broadcast_from_chief(lambda: {name: v.numpy() for name, v in self._variables.items()})
        for name, value in {} if self._workers.is_chief else values.items():
            self._variables[name].assign(value)
