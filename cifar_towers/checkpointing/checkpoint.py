"""Checkpoints as directories: which is the newest undamaged one, and what is written about it.

A checkpoint is a directory `checkpoints/step-<step>/` with the variables in TensorFlow's format, metadata.json and a
manifest. It knows nothing of towers or devices. Only `variables` needs TensorFlow.
"""

import logging
from pathlib import Path
from typing import Any

from cifar_towers import files
from cifar_towers.errors import DataError, UsageError, error_text
from cifar_towers.files import CHECKPOINTS_DIR

log = logging.getLogger(__name__)

METADATA = "metadata.json"
MAX_LISTED = 8  # runs in one error message
EARLIER_METADATA = "facts.json"  # what versions before 2026-11-25 wrote instead


def checkpoint_path(train_dir: Path, step: int) -> Path:
    return train_dir / CHECKPOINTS_DIR / f"step-{step:08d}"


def list_checkpoints(train_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((train_dir / CHECKPOINTS_DIR).glob("step-*"))


def latest_checkpoint(train_dir: Path) -> Path | None:
    """Return the newest undamaged checkpoint, or None if none was ever written. Log newer damaged ones.

    Raises:
      DataError: there are checkpoints, and all are damaged.
    """
    while existing := list_checkpoints(train_dir):
        damages: dict[Path, str] = {}
        for checkpoint in reversed(existing):
            if not (damage := validate_checkpoint(checkpoint)):
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
    """Return the checkpoint of a step, or without one the newest undamaged checkpoint.

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
    if damage := validate_checkpoint(checkpoint):
        raise DataError(f"{checkpoint} is damaged ({damage}); give another --step")
    return checkpoint


def _explain_missing(train_dir: Path) -> str:
    """Return why a directory has no checkpoint, and which directories beside it have some."""
    if (train_dir / files.CONFIG).exists():
        return f"no checkpoint in {train_dir}: its run has not saved any yet; train on, then repeat this command"
    reason = "it is not the directory of a run" if train_dir.is_dir() else "there is no such directory"
    others = sorted({path.parents[1].name for path in train_dir.parent.glob(f"*/{CHECKPOINTS_DIR}/step-*")})
    listed = ", ".join(others[:MAX_LISTED]) + ", ..." * (len(others) > MAX_LISTED)
    hint = f"runs beside it: {listed}" if others else "give the directory of a run, as runs/speed94-seed0"
    return f"no checkpoint in {train_dir}: {reason}; {hint}"


def validate_checkpoint(checkpoint: Path) -> str:
    """Return the damage of a checkpoint in words; an empty string if it is as it was written, where it was written.

    Raises:
      UsageError: an earlier version of this project wrote the checkpoint.
    """
    if damage := files.validate(checkpoint):
        return damage
    try:
        step = read_metadata(checkpoint)["step"]
    except DataError as error:
        return str(error)
    return "" if checkpoint_path(checkpoint.parents[1], step) == checkpoint else f"it is of step {step}"


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
