"""Saving a run's state and finding it again. Checkpoints know nothing of towers or devices."""

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar_towers.errors import DataError, UsageError

DIRECTORY, PREFIX = "checkpoints", "state"


def save(train_dir: Path, step: int, variables: Mapping[str, tf.Variable], facts: Mapping, keep: int) -> Path:
    """Writes `checkpoints/step-<step>/` whole or not at all, then removes all but the newest `keep`.

    Args:
      variables: every variable of the run by its lasting name; `tf.train.load_checkpoint` on the directory's
        `state` prefix reads them.
      facts: what else a resumed run needs, as JSON.
    """
    parent = train_dir / DIRECTORY
    final = parent / f"step-{step:08d}"
    if final.exists():  # saved before: a step has one state
        return final
    temporary = parent / f".tmp-{step}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir(parents=True)
    tf.train.Checkpoint(**_trackable(variables)).write(str(temporary / PREFIX))
    (temporary / "facts.json").write_text(json.dumps({**facts, "step": step}, indent=1))
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    os.rename(temporary, final)
    _sync(parent)
    for old in saved(train_dir)[:-keep]:
        shutil.rmtree(old)
    return final


def sweep(train_dir: Path) -> None:
    """Removes what a killed save left behind."""
    for leftover in (train_dir / DIRECTORY).glob(".tmp-*"):
        shutil.rmtree(leftover)


def saved(train_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((train_dir / DIRECTORY).glob("step-*"))


def read_facts(checkpoint: Path) -> dict:
    """The JSON that was saved with a checkpoint.

    Raises:
      DataError: it is damaged.
    """
    try:
        return json.loads((checkpoint / "facts.json").read_text())
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
        names = ", ".join(name.removeprefix("variables/").removesuffix(_SUFFIX) for name in odd[:4])
        raise UsageError(
            f"{checkpoint} is of another model or recipe: {len(odd)} variables differ, among them {names}; "
            "give another --train_dir, or --fresh to start again in this one"
        )


def _damaged(checkpoint: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(f"{checkpoint} is damaged ({reason}); move it away to go on from the one before it")


def read_values(checkpoint: Path, names: Sequence[str]) -> list[np.ndarray]:
    """The values that were saved under these lasting names.

    Raises:
      UsageError: naming the first that is not there. DataError: the checkpoint is damaged.
    """
    try:
        reader = tf.train.load_checkpoint(str(checkpoint / PREFIX))
        missing = next((name for name in names if not reader.has_tensor(_key(name))), None)
        values = [] if missing else [reader.get_tensor(_key(name)) for name in names]
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
