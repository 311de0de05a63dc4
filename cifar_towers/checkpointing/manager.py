"""The checkpoints of a run: when to save, which to keep, what to restore, and how far to roll back."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import (
    Variables,
    checkpoint_path,
    describe_damage,
    first_nonfinite,
    initialize_variables,
    latest_checkpoint,
    list_checkpoints,
    read_metadata,
    restore_variables,
    save_checkpoint,
    validate_checkpoint,
)
from cifar_towers.errors import DataError, RunError, error_text
from cifar_towers.files import CHECKPOINTS_DIR
from cifar_towers.multi_worker.cluster_spec import ALONE, Workers

DEFAULT_INTERVAL_SECONDS = 30.0  # between checkpoints where no number of steps is asked for
MAX_TIME_FRACTION = 0.01  # of the run's time that saving may take there


@dataclasses.dataclass
class CheckpointManager:
    """The checkpoints of one run. Worker 0 reads and writes them, and all workers get what it restores."""

    train_dir: Path
    variables: Variables  # all of the run
    every_steps: int  # between checkpoints; 0: by the clock
    max_to_keep: int  # number of the newest to keep; the best is kept besides
    log: Callable[[str], None]  # called with lines for the user
    workers: Workers = ALONE

    def __post_init__(self) -> None:
        self.failed_saves = 0  # number of checkpoints that were due and could not be written
        self._saved_step: int | None = None
        self._rolled_back_to: int | None = None
        self._save_seconds, self._last_save = 0.0, time.monotonic()

    def should_save(self, step: int, evaluated: bool) -> bool:
        """Return whether this worker saves after `step`; only worker 0 does.

        If saving goes by the clock, an `evaluated` step is saved early, because the checkpoint then has an accuracy.
        """
        if not self.workers.is_chief:
            return False
        if self.every_steps:
            return step % self.every_steps == 0
        interval = max(self._save_seconds / MAX_TIME_FRACTION, 0.0 if evaluated else DEFAULT_INTERVAL_SECONDS)
        return time.monotonic() - self._last_save >= interval

    def save(self, step: int, metadata: Mapping[str, Any], wait: bool = False) -> bool:
        """Save the state after `step` unless it is non-finite; return whether it is saved, and log why not.

        Args:
          wait: all workers wait for worker 0 and return what it returns. Otherwise the others return True at once.
        """
        if wait:
            return self.workers.broadcast_from_chief(lambda: self._save(step, metadata))
        return not self.workers.is_chief or self._save(step, metadata)

    def _save(self, step: int, metadata: Mapping[str, Any]) -> bool:
        if step == self._saved_step:
            return True
        start = time.monotonic()
        try:
            if nonfinite := first_nonfinite(self.variables):
                raise OSError(f"{nonfinite} is not finite")
            save_checkpoint(self.train_dir, step, self.variables, {**metadata, "failed_saves": self.failed_saves})
            prune_checkpoints(self.train_dir, self.max_to_keep)
            self._saved_step = step
        except OSError as error:
            self.failed_saves += 1
            reason = error.strerror or error
            self.log(f"step {step} could not be saved ({reason}); {self._describe_latest()}")
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start
        return step == self._saved_step

    def describe_latest(self) -> str:
        """Return what is left of the run: the name of its newest checkpoint, if there is one."""
        return self.workers.broadcast_from_chief(self._describe_latest)

    def _describe_latest(self) -> str:
        checkpoints = list_checkpoints(self.train_dir)
        return f"{checkpoints[-1].name} is kept" if checkpoints else "no checkpoint was written"

    def restore_latest(self, check: Callable[[Path], None], overwrite: bool = False) -> dict[str, Any] | None:
        """Restore the newest undamaged checkpoint; return its metadata, or None for a new run.

        Damaged checkpoints are set aside first. Worker 0 calls `check`, which may refuse the checkpoint by an error. If
        worker 0 is to `overwrite` the run, no checkpoint is read.

        Raises:
          DataError: there are checkpoints, and all are damaged.
        """

        def restore() -> dict[str, Any] | None:
            if overwrite:
                return None
            undamaged = self.quarantine_damaged()
            checkpoint = undamaged[-1] if undamaged else latest_checkpoint(self.train_dir)  # all damaged: an error
            if not checkpoint:
                with contextlib.suppress(OSError):
                    (self.train_dir / files.ROLLBACKS).unlink()  # of checkpoints that are gone
                return None
            check(checkpoint)
            return self.restore(checkpoint)

        return self._on_all_workers(restore)

    def initialize(self, source: Path, head: Sequence[str], own: Mapping[str, Any]) -> str:
        """Start with the newest weights of another run; return the line to log. See `initialize_variables`."""
        return self._on_all_workers(lambda: initialize_variables(source, self.variables, head, own))

    def quarantine_damaged(self) -> list[Path]:
        """Remove what killed saves left; rename and log damaged checkpoints. Return the others, oldest first.

        Raises:
          RunError: the newest checkpoint cannot be read now, or something cannot be removed or renamed.
        """
        directory, damages, unreadable = self.train_dir / CHECKPOINTS_DIR, {}, {}
        for checkpoint in list_checkpoints(self.train_dir):
            try:
                damages[checkpoint] = validate_checkpoint(checkpoint)
            except OSError as error:
                unreadable[checkpoint] = error_text(error)
        undamaged = [checkpoint for checkpoint, damage in damages.items() if not damage]
        for checkpoint, reason in unreadable.items():
            if not undamaged or checkpoint > undamaged[-1]:
                raise RunError(f"{checkpoint} cannot be read ({reason}); try again, or move it away if this lasts")
            self.log(f"{checkpoint} cannot be read ({reason}); it is left as it is")
        try:
            files.sweep(directory)
            for checkpoint in filter(damages.get, damages):
                renamed = files.quarantine(checkpoint).name
                self.log(f"{checkpoint} is damaged ({damages[checkpoint]}): set aside as {renamed}")
        except OSError as error:
            place, reason = error.filename or directory, error_text(error)
            raise RunError(f"{place} cannot be put in order ({reason}); make it writable, then try again") from error
        return undamaged

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Restore this worker's state from a checkpoint and return its metadata."""
        restore_variables(checkpoint, self.variables)
        metadata = read_metadata(checkpoint)
        self._saved_step = metadata["step"]
        last = files.read_json_if_any(self.train_dir / files.ROLLBACKS)  # may be newer than the checkpoint
        self._rolled_back_to = last.get("step")
        self.failed_saves = max(self.failed_saves, metadata.get("failed_saves", 0))
        counts = ("rollbacks", "skipped_steps")
        counted = {name: max(metadata.get(name, 0), last.get(name, 0)) for name in counts}
        if self._rolled_back_to == metadata["step"]:
            counted["skipped_in_a_row"] = 0  # as after the rollback
        return metadata | counted

    def roll_back(self, last_good_step: int, rollbacks: int, skipped_steps: int = 0) -> dict[str, Any] | None:
        """Restore the newest undamaged checkpoint whose last good step is at most `last_good_step`; remove later ones.

        If the previous rollback restored it too, and no step was good since, restore the one before. `rollbacks`,
        which counts this one, `skipped_steps` and the restored step are written to a file at once, because the run may
        end before its next checkpoint.

        Returns:
          The metadata of the restored checkpoint, or None if there is none to restore.

        Raises:
          RunError: a later checkpoint cannot be removed, and would be mistaken for one of the run as it continues.
        """
        return self._on_all_workers(lambda: self._roll_back(last_good_step, rollbacks, skipped_steps))

    def _roll_back(self, last_good_step: int, rollbacks: int, skipped_steps: int) -> dict[str, Any] | None:
        undamaged = [read_metadata(path) for path in list_checkpoints(self.train_dir) if not describe_damage(path)]
        # a skipped step updated nothing, or with hard examples only the net or only its proxy
        steps = [each["step"] for each in undamaged if each["step"] - each.get("skipped_in_a_row", 0) <= last_good_step]
        if not steps:
            return None
        go_further = steps[-1] == last_good_step == self._rolled_back_to and len(steps) > 1
        step = steps[-2 if go_further else -1]
        path, checkpoint = self.train_dir / files.ROLLBACKS, checkpoint_path(self.train_dir, step)
        with files.BestEffortWrites(path):
            files.write_json(path, {"rollbacks": rollbacks, "skipped_steps": skipped_steps, "step": step})
        metadata = self.restore(checkpoint)
        self._rolled_back_to = step
        for path in (path for path in list_checkpoints(self.train_dir) if path > checkpoint):
            try:
                files.remove(path)
            except OSError as error:
                raise RunError(f"{path} cannot be removed to go back to step {step}: {error.strerror}") from error
        return metadata

    def _on_all_workers(self, restore: Callable[[], Any]) -> Any:
        """Call `restore` on worker 0, and return its result on all workers.

        Unless the result is None, all workers also get the variables of worker 0.
        """
        result = self.workers.broadcast_from_chief(restore)
        if result and self.workers.size > 1:
            values = self.workers.broadcast_from_chief(lambda: {name: v.numpy() for name, v in self.variables.items()})
            for name, value in {} if self.workers.is_chief else values.items():
                self.variables[name].assign(value)
        return result


def prune_checkpoints(train_dir: Path, max_to_keep: int) -> None:
    """Remove all checkpoints except the `max_to_keep` newest and the most accurate; ignore errors of removal."""
    checkpoints = list_checkpoints(train_dir)
    best = max(checkpoints, key=_accuracy)
    for checkpoint in checkpoints[:-max_to_keep]:
        if checkpoint != best or _accuracy(best) < 0:
            with contextlib.suppress(OSError):
                files.remove(checkpoint)


def _accuracy(checkpoint: Path) -> float:
    """Return the accuracy measured at a checkpoint's step; negative if none was, or if the checkpoint is damaged."""
    with contextlib.suppress(DataError):
        return float(read_metadata(checkpoint).get("accuracy") or -1.0)
    return -1.0
