"""Saving a run's state and finding it again. Checkpoints know nothing of towers or devices."""

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar_towers.errors import DataError, UsageError, error_text
from cifar_towers.files import atomic_io

log = logging.getLogger(__name__)

DIRECTORY, PREFIX, FACTS = "checkpoints", "state", "facts.json"


def save(train_dir: Path, step: int, variables: Mapping[str, tf.Variable], facts: Mapping, keep: int) -> Path:
    """Writes `checkpoints/step-<step>/` whole or not at all; then removes all but the newest `keep` and the best.

    Args:
      variables: every variable of the run by its lasting name; `tf.train.load_checkpoint` on the directory's
        `state` prefix reads them.
      facts: what else a resumed run needs, as JSON; its `accuracy`, if it has one, says which checkpoint is best.

    Raises:
      OSError: it could not be written; what was there before is still there.
    """
    final = path_of(train_dir, step)
    if final.exists():  # saved before: a step has one state
        return final

    def write(directory: Path) -> None:
        try:
            tf.train.Checkpoint(**_trackable(variables)).write(str(directory / PREFIX))
        except tf.errors.OpError as error:  # what TensorFlow makes of a full disk
            told = re.sub(r"\{\{.*?\}\}", "", error.message)  # without the names of its nodes
            raise OSError(None, " ".join(told.split())) from error
        (directory / FACTS).write_text(json.dumps({**facts, "step": step}, indent=1))

    atomic_io.commit(final, write)
    _prune(train_dir, keep)
    return final


def path_of(train_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return train_dir / DIRECTORY / f"step-{step:08d}"


def saved(train_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((train_dir / DIRECTORY).glob("step-*"))


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, in words; empty if it is as it was written, and where."""
    wrong = atomic_io.damage(checkpoint)
    if wrong:
        return wrong
    try:
        step = read_metadata(checkpoint)["step"]
    except DataError as error:
        return str(error)
    return "" if path_of(checkpoint.parents[1], step) == checkpoint else f"it is of step {step}"


def newest(train_dir: Path) -> Path | None:
    """The newest checkpoint that is undamaged; None where none was ever made. Changes nothing, and says which newer
    ones it passes over.

    Raises:
      DataError: there are some, and all are damaged.
    """
    while there := saved(train_dir):
        told = []
        for checkpoint in reversed(there):
            wrong = damage(checkpoint)
            if not wrong:
                for line in told:
                    log.warning("%s; %s is taken", line, checkpoint.name)
                return checkpoint
            if checkpoint.exists():
                told.append(f"{checkpoint} is damaged ({wrong})")
        if saved(train_dir) == there:  # else the run goes on, and has removed old ones for new
            break
    if there or list((train_dir / DIRECTORY).glob(f"{atomic_io.DAMAGED}*")):
        raise DataError(
            f"every checkpoint in {train_dir / DIRECTORY} is damaged; put a good copy there, "
            "or give --overwrite to start again from step 0, or another --train_dir"
        )
    return None


def of_step(train_dir: Path, step: int) -> Path:
    """The checkpoint of a step.

    Raises:
      UsageError: there is none; the message names those that are there. DataError: it is damaged.
    """
    checkpoint = path_of(train_dir, step)
    if not checkpoint.exists():
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in saved(train_dir)) or "none"
        raise UsageError(f"{train_dir} has no checkpoint of step {step}; those it has are of: {steps}")
    wrong = damage(checkpoint)
    if wrong:
        raise DataError(f"{checkpoint} is damaged ({wrong}); give another --step")
    return checkpoint


def tidy(train_dir: Path) -> list[str]:
    """Removes what killed saves left, and sets damaged checkpoints aside; says of each of these what is wrong."""
    atomic_io.sweep(train_dir / DIRECTORY)
    told = []
    for checkpoint in saved(train_dir):
        wrong = damage(checkpoint)
        if wrong:
            told.append(f"{checkpoint} is damaged ({wrong}): set aside as {atomic_io.set_aside(checkpoint).name}")
    return told


def _prune(train_dir: Path, keep: int) -> None:
    """Removes the old ones but the best of all; what cannot be removed stays."""
    everything = saved(train_dir)
    best = max(everything, key=_accuracy)
    for checkpoint in everything[:-keep]:
        if checkpoint != best or _accuracy(best) < 0:
            with contextlib.suppress(OSError):
                atomic_io.remove(checkpoint)


def _accuracy(checkpoint: Path) -> float:
    """What was measured at its step; less than 0 if nothing was, or if it is damaged."""
    try:
        return float(read_metadata(checkpoint).get("accuracy") or -1.0)
    except DataError:
        return -1.0


def read_metadata(checkpoint: Path) -> dict:
    """The JSON that was saved with a checkpoint.

    Raises:
      DataError: it is damaged.
    """
    try:
        return json.loads((checkpoint / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error


def restore(checkpoint: Path, variables: Mapping[str, tf.Variable]) -> None:
    """Assigns a checkpoint's values to the run's variables: all of them, and nothing left over.

    Raises:
      UsageError: the checkpoint holds other variables, named in the message.
      DataError: it is damaged.
    """
    prefix = str(checkpoint / PREFIX)
    try:
        _refuse_other_variables(checkpoint, prefix, variables)
        tf.train.Checkpoint(**_trackable(variables)).read(prefix).assert_consumed()
    except UsageError:
        raise
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error


def _refuse_other_variables(checkpoint: Path, prefix: str, variables: Mapping[str, tf.Variable]) -> None:
    there = {name: shape for name, shape in tf.train.list_variables(prefix) if not name.startswith("_CHECKPOINT")}
    here = {_key(name): list(v.shape) for name, v in variables.items()}
    if there != here:
        odd = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
        names = ", ".join(_name(key) for key in odd[:4])
        raise UsageError(
            f"{checkpoint} is of another model or recipe: {len(odd)} variables differ, among them {names}; "
            "give another --train_dir, or --overwrite to start again in this one"
        )


def _damaged(checkpoint: Path, error: Exception) -> DataError:
    if not checkpoint.exists():
        return DataError(f"{checkpoint} is gone, as its run goes on and keeps newer ones; type the same again")
    return DataError(f"{checkpoint} is damaged ({error_text(error)}); the next start sets it aside")


def read(checkpoint: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """The values by the lasting names they were saved under: of these names, or all.

    Raises:
      UsageError: naming the first that is not there. DataError: the checkpoint is damaged.
    """
    try:
        reader = tf.train.load_checkpoint(str(checkpoint / PREFIX))
        there = {_name(key): key for key in reader.get_variable_to_shape_map() if _SUFFIX in key}
        names = there if names is None else names
        missing = next((name for name in names if name not in there), None)
        values = {} if missing else {name: reader.get_tensor(there[name]) for name in names}
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error
    if missing:
        raise UsageError(f"{checkpoint} has no variable {missing}; it is of another model")
    return values


_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def _trackable(variables: Mapping[str, tf.Variable]) -> dict:
    return {"variables": dict(variables)}


def _key(name: str) -> str:
    """What TensorFlow calls a variable of this name in a checkpoint: dots doubled, slashes as `.S`."""
    return f"variables/{name.replace('.', '..').replace('/', '.S')}{_SUFFIX}"


def _name(key: str) -> str:
    """The name of a variable that TensorFlow calls `key`."""
    escaped = key.removeprefix("variables/").removesuffix(_SUFFIX)
    return re.sub(r"\.(\.|S)", lambda match: "." if match[1] == "." else "/", escaped)
