"""Variables of a checkpoint, in TensorFlow's format."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import METADATA, checkpoint_path, damaged
from cifar_towers.errors import UsageError

PREFIX = "state"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"

Variables = Mapping[str, tf.Variable]  # every variable of a run by its lasting name


def save_checkpoint(train_dir: Path, step: int, variables: Variables, metadata: Mapping[str, Any]) -> Path:
    """Write `checkpoints/step-<step>/`, whole or not at all. One that exists is kept, as a step has one state.

    Args:
      variables: `tf.train.load_checkpoint` on the directory's `state` prefix reads them.
      metadata: what else a resumed run needs, as JSON; its `accuracy`, if any, decides which checkpoint is best.

    Raises:
      OSError: it could not be written; what was there before is unchanged.
    """
    final = checkpoint_path(train_dir, step)
    if final.exists():
        return final

    def write(directory: Path) -> None:
        try:
            tf.train.Checkpoint(variables=dict(variables)).write(str(directory / PREFIX))
        except tf.errors.OpError as error:  # what TensorFlow makes of a full disk
            message = re.sub(r"\{\{.*?\}\}", "", error.message)  # without the names of its nodes
            raise OSError(None, " ".join(message.split())) from error
        (directory / METADATA).write_text(json.dumps({**metadata, "step": step}, indent=1))

    files.commit(final, write)
    return final


def restore_variables(checkpoint: Path, variables: Variables) -> None:
    """Assign a checkpoint's values to the run's variables: to every variable, with no value left over.

    Raises:
      UsageError: the checkpoint holds other variables, named in the message. DataError: the checkpoint is damaged.
    """
    prefix = str(checkpoint / PREFIX)
    try:
        saved = {name: shape for name, shape in tf.train.list_variables(prefix) if not name.startswith("_CHECKPOINT")}
        wanted = {_key(name): list(variable.shape) for name, variable in variables.items()}
        differing = sorted(key for key in {*saved, *wanted} if saved.get(key) != wanted.get(key))
        if not differing:
            tf.train.Checkpoint(variables=dict(variables)).read(prefix).assert_consumed()
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise damaged(checkpoint, error) from error
    if differing:
        names = ", ".join(map(_name, differing[:4]))
        raise UsageError(
            f"{checkpoint} is of another model or recipe: {len(differing)} variables differ, among them {names}; "
            "give another --train_dir, or --overwrite to start again in this one"
        )


def read_variables(checkpoint: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return values by lasting name, of these names or of all variables.

    Raises:
      UsageError: a name is not in the checkpoint. DataError: the checkpoint is damaged.
    """
    try:
        reader = tf.train.load_checkpoint(str(checkpoint / PREFIX))
        keys = {_name(key): key for key in reader.get_variable_to_shape_map() if _SUFFIX in key}
        names = list(keys) if names is None else names
        missing = next((name for name in names if name not in keys), None)
        values = {} if missing else {name: reader.get_tensor(keys[name]) for name in names}
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise damaged(checkpoint, error) from error
    if missing:
        raise UsageError(f"{checkpoint} has no variable {missing}; it is of another model")
    return values


def _key(name: str) -> str:
    """Return TensorFlow's key of a variable in a checkpoint: dots doubled, slashes as `.S`."""
    return f"variables/{name.replace('.', '..').replace('/', '.S')}{_SUFFIX}"


def _name(key: str) -> str:
    """Return the name of the variable with TensorFlow's key."""
    escaped = key.removeprefix("variables/").removesuffix(_SUFFIX)
    return re.sub(r"\.(\.|S)", lambda match: "." if match[1] == "." else "/", escaped)
