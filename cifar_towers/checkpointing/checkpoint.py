"""One checkpoint: a directory `checkpoints/step-<step>/` with TensorFlow's files, facts.json and a manifest.

Checkpoints know nothing of towers or devices.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar_towers import files
from cifar_towers.errors import DataError, UsageError, error_text
from cifar_towers.files import CHECKPOINTS_DIR, list_checkpoints

log = logging.getLogger(__name__)

PREFIX, METADATA = "state", "facts.json"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def save_checkpoint(train_dir: Path, step: int, variables: Mapping[str, tf.Variable], metadata: Mapping) -> Path:
    """Writes `checkpoints/step-<step>/`, whole or not at all; one that exists is kept, as a step has one state.

    Args:
      variables: every variable of the run by its lasting name; `tf.train.load_checkpoint` on the directory's
        `state` prefix reads them.
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


def restore_variables(checkpoint: Path, variables: Mapping[str, tf.Variable]) -> None:
    """Assigns a checkpoint's values to the run's variables: every variable, and nothing in it left over.

    Raises:
      UsageError: the checkpoint holds other variables, named in the message.
      DataError: it is damaged.
    """
    prefix = str(checkpoint / PREFIX)
    try:
        _check_variables_match(checkpoint, prefix, variables)
        tf.train.Checkpoint(variables=dict(variables)).read(prefix).assert_consumed()
    except UsageError:
        raise
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error


def read_variables(checkpoint: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Values by lasting name: of these names, or all.

    Raises:
      UsageError: a name is not in the checkpoint. DataError: the checkpoint is damaged.
    """
    try:
        reader = tf.train.load_checkpoint(str(checkpoint / PREFIX))
        keys = {_name(key): key for key in reader.get_variable_to_shape_map() if _SUFFIX in key}
        names = keys if names is None else names
        missing = next((name for name in names if name not in keys), None)
        values = {} if missing else {name: reader.get_tensor(keys[name]) for name in names}
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error
    if missing:
        raise UsageError(f"{checkpoint} has no variable {missing}; it is of another model")
    return values


def read_metadata(checkpoint: Path) -> dict:
    """The JSON saved with a checkpoint.

    Raises:
      DataError: it is damaged.
    """
    try:
        return json.loads((checkpoint / METADATA).read_text())
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, error) from error


def checkpoint_path(train_dir: Path, step: int) -> Path:
    """Directory of the checkpoint of a step."""
    return train_dir / CHECKPOINTS_DIR / f"step-{step:08d}"


def validate_checkpoint(checkpoint: Path) -> str:
    """What is damaged in a checkpoint, in words; empty if it is as it was written, where it was written."""
    if damage := files.validate(checkpoint):
        return damage
    try:
        step = read_metadata(checkpoint)["step"]
    except DataError as error:
        return str(error)
    return "" if checkpoint_path(checkpoint.parents[1], step) == checkpoint else f"it is of step {step}"


def latest_checkpoint(train_dir: Path) -> Path | None:
    """The newest undamaged checkpoint, or None if none was ever written. Changes nothing; logs newer damaged ones.

    Raises:
      DataError: there are checkpoints, and all are damaged.
    """
    while existing := list_checkpoints(train_dir):
        damaged = []
        for checkpoint in reversed(existing):
            damage = validate_checkpoint(checkpoint)
            if not damage:
                for message in damaged:
                    log.warning("%s; %s is taken", message, checkpoint.name)
                return checkpoint
            if checkpoint.exists():
                damaged.append(f"{checkpoint} is damaged ({damage})")
        if list_checkpoints(train_dir) == existing:  # else the run is still training and has replaced old ones
            break
    if existing or list((train_dir / CHECKPOINTS_DIR).glob(f"{files.DAMAGED}*")):
        raise DataError(
            f"every checkpoint in {train_dir / CHECKPOINTS_DIR} is damaged; put a good copy there, "
            "or give --overwrite to start again from step 0, or another --train_dir"
        )
    return None


def checkpoint_at_step(train_dir: Path, step: int) -> Path:
    """The checkpoint of a step.

    Raises:
      UsageError: there is none; the message names those there are. DataError: it is damaged.
    """
    checkpoint = checkpoint_path(train_dir, step)
    if not checkpoint.exists():
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in list_checkpoints(train_dir)) or "none"
        raise UsageError(f"{train_dir} has no checkpoint of step {step}; those it has are of: {steps}")
    if damage := validate_checkpoint(checkpoint):
        raise DataError(f"{checkpoint} is damaged ({damage}); give another --step")
    return checkpoint


def _check_variables_match(checkpoint: Path, prefix: str, variables: Mapping[str, tf.Variable]) -> None:
    saved = {name: shape for name, shape in tf.train.list_variables(prefix) if not name.startswith("_CHECKPOINT")}
    wanted = {_key(name): list(v.shape) for name, v in variables.items()}
    differing = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
    if differing:
        names = ", ".join(_name(key) for key in differing[:4])
        raise UsageError(
            f"{checkpoint} is of another model or recipe: {len(differing)} variables differ, among them {names}; "
            "give another --train_dir, or --overwrite to start again in this one"
        )


def _damaged(checkpoint: Path, error: Exception) -> DataError:
    if not checkpoint.exists():
        return DataError(f"{checkpoint} is gone: its run is training and keeps newer ones; type the same again")
    return DataError(f"{checkpoint} is damaged ({error_text(error)}); the next start sets it aside")


def _key(name: str) -> str:
    """TensorFlow's key of a variable in a checkpoint: dots doubled, slashes as `.S`."""
    return f"variables/{name.replace('.', '..').replace('/', '.S')}{_SUFFIX}"


def _name(key: str) -> str:
    """The variable name behind TensorFlow's key."""
    escaped = key.removeprefix("variables/").removesuffix(_SUFFIX)
    return re.sub(r"\.(\.|S)", lambda match: "." if match[1] == "." else "/", escaped)
