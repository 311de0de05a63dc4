"""Checkpoints: written whole or not at all, found, verified and read.

A checkpoint is a directory `checkpoints/step-<step>/` with the variables in TensorFlow's format, metadata.json and a
manifest. Its variables do not depend on towers or devices. Only writing and reading variables imports TensorFlow.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cifar_towers import files
from cifar_towers.errors import DataError, UsageError, error_text, listed
from cifar_towers.files import CHECKPOINTS_DIR

if TYPE_CHECKING:
    import tensorflow as tf

log = logging.getLogger(__name__)

METADATA = "metadata.json"
PREFIX = "state"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
EARLIER_METADATA = "facts.json"  # what versions before 2026-11-25 wrote instead

Variables = Mapping[str, "tf.Variable"]  # every variable of a run by its name in checkpoints


def checkpoint_path(train_dir: Path, step: int) -> Path:
    return train_dir / CHECKPOINTS_DIR / f"step-{step:08d}"


def list_checkpoints(train_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first. A copy under another name, as `step-00000010.bak`, is none."""
    found = (train_dir / CHECKPOINTS_DIR).glob("step-*")
    return sorted(path for path in found if path.name.removeprefix("step-").isdigit())


def latest_checkpoint(train_dir: Path) -> Path | None:
    """Return the newest undamaged checkpoint, or None if none was ever written. Log newer damaged ones.

    Raises:
      DataError: there are checkpoints, and all are damaged.
    """
    while existing := list_checkpoints(train_dir):
        damages: dict[Path, str] = {}
        for checkpoint in reversed(existing):
            if not (damage := describe_damage(checkpoint)):
                for damaged_one in filter(Path.exists, damages):
                    log.warning("%s is damaged (%s); %s is taken", damaged_one, damages[damaged_one], checkpoint.name)
                return checkpoint
            damages[checkpoint] = damage
        if list_checkpoints(train_dir) == existing:  # otherwise the run is training and has replaced old ones
            break
    if existing or list((train_dir / CHECKPOINTS_DIR).glob(f"{files.DAMAGED}*")):
        raise DataError(
            f"every checkpoint in {train_dir / CHECKPOINTS_DIR} is damaged; put a good copy there, "
            "or give --overwrite to start again from step 0, or another --train_dir"
        )
    return None


def find_checkpoint(train_dir: Path, step: int = 0) -> Path:
    """Return the checkpoint of `step`, or if `step` is 0 the newest undamaged one.

    Raises:
      UsageError: there is none; the message names what there is instead. DataError: it is damaged, or all are.
    """
    if not step:
        if checkpoint := latest_checkpoint(train_dir):
            return checkpoint
        raise UsageError(_explain_missing(train_dir))
    checkpoint = checkpoint_path(train_dir, step)
    if not checkpoint.exists():
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in list_checkpoints(train_dir)) or "none"
        raise UsageError(f"{train_dir} has no checkpoint of step {step}; those it has are of: {steps}")
    if damage := describe_damage(checkpoint):
        raise DataError(f"{checkpoint} is damaged ({damage}); give another --step")
    return checkpoint


def _explain_missing(train_dir: Path) -> str:
    """Return why a directory has no checkpoint, and which directories beside it have some."""
    if (train_dir / files.CONFIG).exists():
        return f"no checkpoint in {train_dir}: its run has not saved any yet; train on, then repeat this command"
    reason = "it is not the directory of a run" if train_dir.is_dir() else "there is no such directory"
    others = sorted({path.parents[1].name for path in train_dir.parent.glob(f"*/{CHECKPOINTS_DIR}/step-*")})
    hint = f"runs beside it: {listed(others)}" if others else "give the directory of a run, as runs/speed94-seed0"
    return f"no checkpoint in {train_dir}: {reason}; {hint}"


def validate_checkpoint(checkpoint: Path) -> str:
    """Return how a checkpoint is damaged or misplaced, in words; an empty string if it is intact.

    Raises:
      UsageError: an earlier version of this project wrote the checkpoint. OSError: a file cannot be read now.
    """
    if damage := files.validate(checkpoint):
        return damage
    try:
        step = read_metadata(checkpoint)["step"]
    except DataError as error:
        return str(error)
    return "" if checkpoint_path(checkpoint.parents[1], step) == checkpoint else f"it is of step {step}"


def describe_damage(checkpoint: Path) -> str:
    """Return what `validate_checkpoint` returns, or why the checkpoint cannot be read now."""
    try:
        return validate_checkpoint(checkpoint)
    except OSError as error:
        return f"it cannot be read: {error_text(error)}"


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """Return the JSON object that was saved with a checkpoint.

    Raises:
      UsageError: an earlier version of this project wrote the checkpoint. DataError: the checkpoint is damaged.
    """
    path = checkpoint / METADATA
    if not path.exists() and (checkpoint / EARLIER_METADATA).exists():
        raise UsageError(
            f"{checkpoint} was written by an earlier version of cifar_towers and cannot be read; give another "
            "--train_dir, or --overwrite to start again in this one"
        )
    try:
        return files.read_json(path)
    except DataError as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> DataError:
    if not checkpoint.exists():
        return DataError(f"{checkpoint} is gone: its run is training and keeps newer ones; type the same again")
    return DataError(f"{checkpoint} is damaged ({error_text(error)}); the next start sets it aside")


# Variables ------------------------------------------------------------------------------------------------------------


def save_checkpoint(train_dir: Path, step: int, variables: Variables, metadata: Mapping[str, Any]) -> Path:
    """Write `checkpoints/step-<step>/` completely or not at all. If it exists, return it as it is.

    A run has only one state after each step, so no two runs may share a directory.

    `tf.train.load_checkpoint` on the directory's `state` prefix reads the variables. The `accuracy` in the metadata, if
    any, decides which checkpoint is best.

    Raises:
      OSError: it could not be written; what was there before is unchanged.
    """
    final = checkpoint_path(train_dir, step)
    if final.exists():
        return final

    import tensorflow as tf

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


def initialize_variables(source: Path, variables: Variables, head: Sequence[str], own: Mapping[str, Any]) -> str:
    """Start a new run with the newest weights of another run; return the line to log.

    The weights are the moving averages of the other run if it keeps some. The new run's own averages start with the
    same values. Batch statistics are copied too. Integers, such as seeds, are not copied.

    Args:
      head: names of the last layer's variables, as `head.kernel`. They stay as they are unless the other run has the
        same classes in the same order.
      own: the metadata of the new run's checkpoints.

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
    classes, validation = list(own["dataset_info"]["class_names"]), own.get("validation_sha256")
    new = [] if classes == metadata["dataset_info"]["class_names"] else head
    for name in [*wanted, *saved]:
        there, here = (f"of shape {tuple(each[name].shape)}" if name in each else "absent" for each in (saved, wanted))
        if there != here and name not in new:
            raise UsageError(f"init_from={source} is of another model: {name} is {there} there, {here} here")
    for name, variable in variables.items():
        owner, _, path = name.partition(".")
        if owner in ("model", "ema", "lookahead") and variable.dtype.is_floating and path not in new:
            variable.assign(saved[path])
    line = f"starting with the {'averaged ' * is_averaged}weights of {source} at step {metadata['step']}"
    if validation and own["dataset"] == metadata["dataset"] and validation != metadata.get("validation_sha256"):
        line += ", which were trained on validation images of this run: its validation accuracy will be too high"
    return f"{line}; new, as its classes are others: {', '.join(new)}" if new else line


def read_variables(checkpoint: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Return {name: value} of the variables in `names`, or of all variables.

    Raises:
      UsageError: a name is not in the checkpoint. DataError: the checkpoint is damaged.
    """
    import tensorflow as tf

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
