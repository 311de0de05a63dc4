"""A trace of training steps for TensorBoard's tab PROFILE."""

import logging
from pathlib import Path

import tensorflow as tf

log = logging.getLogger(__name__)


class StepProfiler:
    """A trace of the steps from `first` up to `last` of a run, counted from 0, in `train_dir/train`."""

    def __init__(self, train_dir: Path, first: int, last: int):
        self._logdir, self._first, self.last = train_dir / "train", first, last
        self._is_running = False

    def before(self, step: int) -> None:
        """Start the trace if the step after `step` is the first one to profile. Call before each step."""
        if step == self._first:
            self._try(tf.profiler.experimental.start, str(self._logdir))
            self._is_running = True

    def after(self, step: int) -> None:
        """Write the trace if `step` is the last one to profile. Call after each step."""
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Write the trace of the steps so far, if one is running."""
        if self._is_running:
            self._is_running = False
            self._try(tf.profiler.experimental.stop)

    def _try(self, action, *arguments) -> None:
        """Start or stop the profiler; a profile that fails is one warning, and the training continues."""
        try:
            action(*arguments)
        except (OSError, tf.errors.OpError) as error:
            self._is_running = False
            log.warning(f"no profile in {self._logdir}: {error}")
