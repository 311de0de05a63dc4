"""The directory of a run while it is trained: opened once under its lock, resumed, saved to,
cleared.

No function here needs TensorFlow.
"""

import contextlib
import logging
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import code_digests, is_model_unchanged, recipe_fields
from cifar_towers.errors import DataError, DivergedError, UsageError, error_text, listed
from cifar_towers.runs.checkpoint import (
    DAMAGED,
    checkpoint_path,
    first_nonfinite,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)

log = logging.getLogger(__name__)

DEFAULT_INTERVAL_SECONDS = 30.0  # between checkpoints where no number of steps is asked for
# for a run that diverged
ADVICE = (
    "lower the learning rates (--learning_rate and, if the recipe sets them, --bias_learning_rate "
    "and --head_learning_rate)"
)
CODE_OF = "code of "  # how the facts about code of the user's are called
MAX_TIME_FRACTION = 0.01  # of the run's time that saving may take there

# a checkpoint's variables by name, and its metadata
Saved = tuple[dict[str, np.ndarray], dict[str, Any]]


class RunDirectory:
    """A run's directory, locked by this process.

    Attributes:
      path: the directory, absolute: code of the user's may change the current directory.
      saved: the newest checkpoint; None in a new run.
      failed_saves: number of checkpoints that were due and could not be written.
    """

    def __init__(self, config: TrainConfig, saved: Saved | None = None):
        self.path = config.directory.absolute()
        self._config = config
        self.saved = saved
        self.failed_saves = saved[1]["failed_saves"] if saved else 0
        self._saved_step = saved[1]["step"] if saved else None
        self._save_seconds = 0.0
        self._last_save = time.monotonic()

    def stored_result(self) -> dict[str, Any] | None:
        """Return the result of a run at its last step or its target; otherwise None."""
        result = files.read_json(self.path / files.RESULT)
        if not self.saved or not result:
            return None
        _, metadata = self.saved
        at_end = metadata["step"] >= self._config.run_length(metadata["steps_per_epoch"]).last
        at_target = 0 < self._config.target_accuracy <= (result["reached"] or 0)
        return result if result["step"] == metadata["step"] and (at_end or at_target) else None

    def clear(self) -> None:
        """With `overwrite`, remove what the run wrote before, and nothing else."""
        if self._config.overwrite:
            files.remove_run(self.path)

    def should_save(self, step: int, evaluated: bool) -> bool:
        """Return whether a checkpoint is due after `step`.

        If saving goes by the clock, an `evaluated` step is saved early, because evaluating it again
        takes long.
        """
        if self._config.checkpoint_every_steps:
            return step % self._config.checkpoint_every_steps == 0
        seconds = time.monotonic() - self._last_save
        is_cheap = self._save_seconds <= MAX_TIME_FRACTION * seconds
        return is_cheap and (evaluated or seconds >= DEFAULT_INTERVAL_SECONDS)

    def save(
        self, step: int, values: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
    ) -> bool:
        """Save the state after `step`; return whether it is saved, and log why not.

        Then remove the oldest checkpoints, except `keep_checkpoints`.

        Raises:
          DivergedError: a value is not finite.
        """
        if step == self._saved_step:
            return True
        nonfinite = first_nonfinite(values)
        if nonfinite:
            raise DivergedError(
                f"{nonfinite} is not finite after step {step}; {self.describe_divergence()}"
            )
        start = time.monotonic()
        try:
            write_checkpoint(checkpoint_path(self.path, step), values, {**metadata, "step": step})
            self._saved_step = step
        except OSError as error:
            self.failed_saves += 1
            log.error(
                f"step {step} could not be saved ({error_text(error)}); {self.describe_latest()}"
            )
        else:
            self._remove_old()
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start
        return step == self._saved_step

    def _remove_old(self) -> None:
        """Remove the oldest checkpoints; log an error, as the newest is saved nevertheless."""
        for path in list_checkpoints(self.path)[: -self._config.keep_checkpoints]:
            try:
                path.unlink()
            except OSError as error:
                log.warning(f"{path.name} could not be removed ({error_text(error)})")

    def describe_latest(self) -> str:
        """Return what is left of the run: the name of its newest checkpoint, if there is one."""
        checkpoints = list_checkpoints(self.path)
        return f"{checkpoints[-1].name} is kept" if checkpoints else "no checkpoint was written"

    def describe_divergence(self) -> str:
        """Return what is left of a run that diverged, and what to do."""
        has_checkpoints = bool(list_checkpoints(self.path))
        place = ", in another --train_dir or with --overwrite" if has_checkpoints else ""
        return f"{self.describe_latest()}; {ADVICE}{place}"


@contextlib.contextmanager
def open_run(config: TrainConfig) -> Iterator[RunDirectory]:
    """Make and lock the directory of a run, and read the checkpoint to resume from. The lock ends
    with the process.

    With `overwrite` nothing is read, and `clear` removes the old run once the new one cannot be
    refused any more.

    Raises:
      UsageError: the directory cannot be made; another process trains in it; it holds something
        else than a run; or its run has another recipe. The message names what differs.
      DataError: there are checkpoints, and all are damaged.
    """
    path = config.directory.absolute()
    with contextlib.ExitStack() as stack:
        try:
            files.make(path)
            is_locked = stack.enter_context(files.locked(path / files.LOCK))
        except OSError as error:
            raise UsageError(f"train_dir={path} cannot be written: {error_text(error)}") from error
        if not is_locked:
            raise UsageError(
                f"another process is training in {path}; stop it, or give another --train_dir"
            )
        _check_is_run(path, config.overwrite)
        run = RunDirectory(config, None if config.overwrite else _read_newest(path))
        if run.saved:
            _check_recipe(config, run.saved[1])
        try:
            yield run
        finally:
            if [each.name for each in path.iterdir()] == [files.LOCK]:  # nothing was written
                (path / files.LOCK).unlink()
                with contextlib.suppress(OSError):  # a volume of a container cannot be removed
                    path.rmdir()


def _check_is_run(path: Path, overwrite: bool) -> None:
    """Refuse a directory in which a new run would replace something, or mix with it."""
    names = {each.name for each in path.iterdir() if not each.name.startswith(".")}
    others = sorted(name for name in names if not files.belongs_to_run(name))
    has_checkpoints = any(name.startswith("step-") for name in names)
    if others and not (files.METRICS in names or has_checkpoints):
        raise UsageError(
            f"train_dir={path} contains {others[0]}, which is no file of a run; give another "
            "--train_dir"
        )
    if files.RESULT in names and not has_checkpoints and not overwrite:
        raise UsageError(
            f"{path} holds the result of a run, and no checkpoint to resume from; give another "
            "--train_dir, or --overwrite to start again in this one"
        )


def _read_newest(path: Path) -> Saved | None:
    """Return variables and metadata of the newest undamaged checkpoint; rename newer damaged ones.

    Raises:
      DataError: there are checkpoints, and all are damaged.
    """
    for checkpoint in reversed(list_checkpoints(path)):
        try:
            return read_checkpoint(checkpoint)
        except DataError as error:
            renamed = checkpoint.with_name(checkpoint.name + DAMAGED)
            checkpoint.rename(renamed)
            log.warning(f"{error}; renamed to {renamed.name}")
    if any(each.name.endswith(DAMAGED) for each in path.iterdir()):
        raise DataError(
            f"every checkpoint in {path} is damaged; put a good copy there, or give another "
            "--train_dir, or --overwrite to start again from step 0"
        )
    return None


def _check_recipe(config: TrainConfig, metadata: Mapping[str, Any]) -> None:
    """Raise UsageError if a run was trained with other settings than those of the config."""
    saved = metadata["recipe"]
    current = recipe_fields(config)
    differing = describe_differences(saved, current)
    if differing:
        path = config.directory
        raise UsageError(
            f"{path} was trained with other settings ({', '.join(differing)}); give those, or "
            f"another --train_dir, with {shlex.quote(f'--init_from={path}')} to start there with "
            "these weights, or --overwrite to start again in this one"
        )


def code_facts(config: TrainConfig) -> dict[str, str]:
    """Return what a checkpoint stores of the code of the user's functions."""
    return {f"{CODE_OF}{name}": digest for name, digest in code_digests(config).items()}


def saved_code(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of `code_facts` in a checkpoint's metadata."""
    facts = metadata["facts"].items()
    return {name.removeprefix(CODE_OF): value for name, value in facts if name.startswith(CODE_OF)}


def warn_of_edited_model(config: TrainConfig, metadata: Mapping[str, Any], directory: Path) -> None:
    """Log a warning if the code of the user's model is not that of the run in a directory, whose
    checkpoint has this metadata.
    """
    if not is_model_unchanged(config, saved_code(metadata)):
        log.warning(f"the code of model={config.model} has changed since {directory} was trained")


def describe_changed_facts(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return `name old -> new` for each fact about a run that has changed.

    A file of the user's counts if both processes have imported it. If only one has, another file
    was edited, or other code of that process has imported it.
    """
    missing = saved.keys() ^ current.keys()
    left_out = {name for name in missing if name.startswith(CODE_OF)}
    return describe_differences(
        {name: value for name, value in saved.items() if name not in left_out},
        {name: value for name, value in current.items() if name not in left_out},
    )


def assign(variables: Mapping[str, Any], values: Mapping[str, np.ndarray], directory: Path) -> None:
    """Assign the values of a checkpoint to variables of TensorFlow or Keras, by name.

    Raises:
      UsageError: the run in `directory`, which has the checkpoint, is of another model.
    """
    saved = {name: (value.shape, value.dtype.name) for name, value in values.items()}
    wanted = {
        name: (tuple(v.shape), getattr(v.dtype, "name", v.dtype)) for name, v in variables.items()
    }
    differing = describe_differences(saved, wanted)
    if differing:
        raise UsageError(
            f"{directory} was trained with another model: {listed(differing, 2)}; give another "
            "--train_dir"
        )
    for name, variable in variables.items():
        variable.assign(values[name])


def describe_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return `name old -> new` for each value that differs between two dictionaries."""
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    return [f"{name} {_short(saved.get(name))} -> {_short(current.get(name))}" for name in names]


def _short(value: Any) -> str:
    text = str(value)
    return text[:8] if len(text) == 64 else text  # a SHA-256
