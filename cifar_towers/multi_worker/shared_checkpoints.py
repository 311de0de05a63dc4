"""The checkpoints of a run whose workers share worker 0's directory; with a single worker, the manager's methods."""

from collections.abc import Callable, Mapping
from pathlib import Path

import tensorflow as tf

from cifar_towers.multi_worker.agreement import broadcast_state
from cifar_towers.multi_worker.coordination import Coordinator


class SharedCheckpoints:
    """Worker 0 reads and writes checkpoints; all workers get what it restores.

    Args:
      manager: a `CheckpointManager`.
      variables: of the run, by name, which all workers have.
    """

    def __init__(self, manager, workers: Coordinator, variables: Mapping[str, tf.Variable]):
        self._manager, self._workers, self._variables = manager, workers, variables

    @property
    def failed_saves(self) -> int:
        """How many checkpoints could not be written when they were due."""
        return self._manager.failed_saves

    def should_save(self, step: int, evaluated: bool) -> bool:
        """Whether this worker has to save after `step`: never, unless it is worker 0."""
        return self._workers.is_chief and self._manager.should_save(step, evaluated)

    def save(self, step: int, metadata: Mapping) -> bool:
        """Saves, on worker 0 alone, without waiting for the others. Returns whether the step is saved."""
        return not self._workers.is_chief or self._manager.save(step, metadata)

    def save_for_all(self, step: int, metadata: Mapping) -> bool:
        """Saves, and returns on all workers whether the step is saved; they wait for worker 0."""
        return self._workers.broadcast_from_chief(lambda: self._manager.save(step, metadata))

    def describe_latest(self) -> str:
        """The newest checkpoint, in words."""
        return self._workers.broadcast_from_chief(self._manager.describe_latest)

    def restore_latest(self, find: Callable[[], tuple[Path, dict] | None]) -> dict | None:
        """Restores the checkpoint that `find` returns on worker 0; returns its metadata, or None if there is none."""

        def restore() -> dict | None:
            self._manager.quarantine_damaged()
            found = find()
            return self._manager.restore(found[0]) if found else None

        return self._broadcast(restore)

    def roll_back(self, last_good_step: int, rollbacks: int) -> dict | None:
        """See `CheckpointManager.roll_back`."""
        return self._broadcast(lambda: self._manager.roll_back(last_good_step, rollbacks))

    def _broadcast(self, restore: Callable[[], dict | None]) -> dict | None:
        metadata = self._workers.broadcast_from_chief(restore)
        if metadata:
            broadcast_state(self._workers, self._variables)
        return metadata
