"""A checkpoint: one file of NumPy arrays, `step-<step>.npz`, written whole or not at all.

It holds every variable of a run by its name, and the metadata as JSON. `np.load` reads it. The
variables do not depend on towers or devices. No function here needs TensorFlow.
"""

import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import files
from cifar_towers.errors import DataError, UsageError, error_text

METADATA = "metadata"  # name of the entry with the metadata
# added to the name of a damaged checkpoint, so that nobody takes it for a good one
DAMAGED = ".damaged"
NAME = re.compile(r"step-\d+\.npz")


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step}.npz"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.stem.removeprefix("step-"))


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=step_of)


def write_checkpoint(
    path: Path, values: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> None:
    """Write a checkpoint. After a kill or a power loss at any moment, the whole file is there or
    none.

    Raises:
      OSError: it could not be written, for example on a full disk.
    """
    text = json.dumps({**metadata, "num_variables": len(values)})
    arrays: dict[str, Any] = {**values, METADATA: np.array(text)}
    files.write_whole(path, lambda file: np.savez(file, **arrays))


def read_checkpoint(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the variables of a checkpoint by name, and its metadata.

    Raises:
      DataError: the checkpoint is damaged. OSError: it cannot be read now, and may be undamaged.
    """
    content = path.read_bytes()
    try:
        # np.load checks a CRC only if it reads to its end
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            arrays = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
        values = {name: np.load(io.BytesIO(array)) for name, array in arrays.items()}
        metadata = json.loads(str(values.pop(METADATA)))
        number = metadata["num_variables"]
        step = metadata["step"]
        if number != len(values) or step != step_of(path):
            raise ValueError(f"{len(values)} of {number} variables, step {step}")
    except Exception as error:  # zipfile and NumPy raise many types of errors
        raise DataError(f"{path} is damaged ({error_text(error)})") from error
    return values, metadata


def find_checkpoint(directory: Path, step: int = 0) -> Path:
    """Return the checkpoint of `step`, or the newest one if `step` is 0.

    Raises:
      UsageError: there is none.
    """
    found = list_checkpoints(directory)
    if not found:
        raise UsageError(
            f"no checkpoint in {directory}; give the directory of a run, e.g. runs/speed94-seed0, "
            "or train it until it has saved a step"
        )
    if not step:
        return found[-1]
    path = checkpoint_path(directory, step)
    if path not in found:
        raise UsageError(
            f"{directory} has no checkpoint of step {step}; it has "
            f"{', '.join(each.name for each in found)}"
        )
    return path


def first_nonfinite(values: Mapping[str, np.ndarray]) -> str:
    """Return the name of an array with a non-finite value; empty if there is none."""
    for name, value in values.items():
        if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
            return name
    return ""
