"""Variables of a checkpoint, in TensorFlow's format."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import METADATA, checkpoint_path, damaged, find_checkpoint, read_metadata
from cifar_towers.errors import UsageError

PREFIX = "state"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"

Variables = Mapping[str, tf.Variable]  # every variable of a run by its lasting name


def save_checkpoint(train_dir: Path, step: int, variables: Variables, metadata: Mapping[str, Any]) -> Path:
    """Write `checkpoints/step-<step>/` completely or not at all. Keep an existing one: a step has only one state.

    `tf.train.load_checkpoint` on the directory's `state` prefix reads the variables. The `accuracy` in the metadata, if
    any, decides which checkpoint is best.

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


def first_nonfinite(variables: Variables) -> str:
    """Return the name of a variable with a non-finite value; empty if there is none."""
    floats = ((name, v) for name, v in variables.items() if v.dtype.is_floating)
    return next((name for name, v in floats if not np.isfinite(v.numpy()).all()), "")


def restore_variables(checkpoint: Path, variables: Variables) -> None:
    """Assign a checkpoint's values to the run's variables: to every variable, with no value left over.

    Raises:
      UsageError: the checkpoint holds other variables, named in the message. DataError: the checkpoint is damaged.
    """
    values = read_variables(checkpoint)
    saved = {name: (value.shape, value.dtype) for name, value in values.items()}
    wanted = {name: (tuple(each.shape), each.dtype.as_numpy_dtype) for name, each in variables.items()}
    differing = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
    if differing:
        raise UsageError(
            f"{checkpoint} is of another model or recipe: {len(differing)} variables differ, among them "
            f"{', '.join(differing[:4])}; give another --train_dir, or --overwrite to start again in this one"
        )
    for name, variable in variables.items():
        variable.assign(values[name])


def initialize_variables(source: Path, variables: Variables, head: Sequence[str], classes: Sequence[str]) -> str:
    """Start a new run with the newest weights of another run; return the line to log.

    The weights are the moving averages of the other run if it keeps some. The new run's own averages start with the
    same values. Batch statistics are copied too. Integers, such as seeds, are not copied.

    Args:
      source: directory of the other run.
      head: names of the last layer's variables, as `head.kernel`. They stay as they are unless the other run has the
        same classes in the same order.

    Raises:
      UsageError: the other run has no checkpoint, or another model; the message names the first variable that differs.
      DataError: its checkpoints are damaged.
    """
    checkpoint = find_checkpoint(source)
    metadata, values = read_metadata(checkpoint), read_variables(checkpoint)
    is_averaged = any(name.startswith("ema.") for name in values)
    saved, wanted = (
        {name.removeprefix(prefix): each for name, each in of.items() if name.startswith(prefix)}
        for prefix, of in (("ema." if is_averaged else "model.", values), ("model.", variables))
    )
    new = [] if list(classes) == metadata["dataset_info"]["class_names"] else head
    for name in [*wanted, *saved]:
        there, here = (f"of shape {tuple(each[name].shape)}" if name in each else "absent" for each in (saved, wanted))
        if there != here and name not in new:
            raise UsageError(f"init_from={source} is of another model: {name} is {there} there, {here} here")
    for name, variable in variables.items():
        owner, _, path = name.partition(".")
        if owner in ("model", "ema", "lookahead") and variable.dtype.is_floating and path not in new:
            variable.assign(saved[path])
    line = f"starting with the {'averaged ' * is_averaged}weights of {source} at step {metadata['step']}"
    return f"{line}; new, as its classes are others: {', '.join(new)}" if new else line


def read_variables(checkpoint: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return values by lasting name, of these names or of all variables.

    Raises:
      UsageError: a name is not in the checkpoint. DataError: the checkpoint is damaged.
    """
    try:
        reader = tf.train.load_checkpoint(str(checkpoint / PREFIX))
        keys = {_name(key): key for key in reader.get_variable_to_shape_map() if _SUFFIX in key}
        wanted = keys if names is None else names
        values = {name: reader.get_tensor(keys[name]) for name in wanted if name in keys}
    except (tf.errors.OpError, OSError, ValueError, LookupError) as error:  # the last if a file is cut off
        raise damaged(checkpoint, error) from error
    if missing := [name for name in wanted if name not in keys]:
        raise UsageError(f"{checkpoint} has no variable {missing[0]}; it is of another model")
    return values


def _name(key: str) -> str:
    """Return the name of the variable with TensorFlow's key in a checkpoint: dots doubled, slashes as `.S`."""
    escaped = key.removeprefix("variables/").removesuffix(_SUFFIX)
    return re.sub(r"\.(\.|S)", lambda match: "." if match[1] == "." else "/", escaped)
