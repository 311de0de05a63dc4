"""A run's directory: whose it is, what is in it, whether the run in it is done, and clearing it."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import CHECKPOINTS_DIR, latest_checkpoint, read_metadata
from cifar_towers.config import TrainConfig
from cifar_towers.config.recipe import differing_settings, recipe_fields
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import DataError, UsageError
from cifar_towers.models.layers import has_batch_norm
from cifar_towers.registry import FOLDER

CHOSEN = ("variable_placement", "tower_shares", "micro_batches")  # settings that measuring or memory may choose
# Directories whose names others may use as well: a run's files in them are removed, they themselves only when empty.
SHARED = (CHECKPOINTS_DIR, "train/plugins", "train", "eval", "result", "tower_*")
CHECKPOINTS = tuple(f"{CHECKPOINTS_DIR}/{prefix}*" for prefix in ("step-", files.DAMAGED, files.TEMPORARY, files.TRASH))
WRITTEN = (
    *CHECKPOINTS,
    *(
        f"{name}/{written}"
        for name in ("train", "eval", "result", "tower_*")
        for written in (files.EVENT_FILES, files.TRUNCATED_EVENTS)
    ),
    "train/plugins/profile",
    "projector_*",
    files.LAUNCH,
    *reversed(files.FILES),  # config.json last: a run is known by it
)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Makes a run's directory and holds its lock, which ends with the process.

    Raises:
      UsageError: it cannot be made or written, or another process trains in it.
    """
    with contextlib.ExitStack() as stack:
        try:
            files.make(directory)
            locked = stack.enter_context(files.locked(directory / files.LOCK))
        except OSError as error:
            action = "written" if directory.is_dir() else "made"
            raise UsageError(f"train_dir={directory} cannot be {action}: {error.strerror}") from error
        if not locked:
            raise UsageError(f"another process trains in {directory}; end it, or give another --train_dir")
        yield


def check_ownership(directory: Path) -> None:
    """Makes sure that a run would not replace somebody else's files.

    Raises:
      UsageError: it has a config.json or result.json, no checkpoint, and no config.json of a run.
    """
    if any(next(directory.glob(name), None) for name in CHECKPOINTS):
        return
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    settings = files.read_json_if_any(directory / files.CONFIG)
    is_of_a_run = len(names & settings.keys()) > len(names) / 2
    in_the_way = [name for name in (files.CONFIG, files.RESULT) if _has_content(directory / name)]
    if in_the_way and not is_of_a_run:
        raise UsageError(f"{directory / in_the_way[0]} is of no run and would be replaced; give another --train_dir")


def find_resumable_checkpoint(config: TrainConfig, dataset: Dataset, model: keras.Model) -> tuple[Path, dict] | None:
    """The newest undamaged checkpoint of a run and its metadata, or None if there is none; `model` is the run's.

    Raises:
      UsageError: it was made with another recipe or data set; the message names what differs.
      DataError: there are checkpoints, and all are damaged; or the data set has other images than it was made with.
    """
    checkpoint = latest_checkpoint(config.directory)
    if not checkpoint:
        return None
    metadata = read_metadata(checkpoint)
    differing = differing_settings(config, metadata["recipe"], has_batch_norm(model))
    names = metadata["dataset"], dataset.name
    if names[0] != names[1] and not all(name.startswith(FOLDER) for name in names):  # a folder may have moved
        differing.append("dataset {} -> {}".format(*names))
    if differing:
        raise UsageError(
            f"{checkpoint} was made with other settings ({', '.join(differing)}); "
            "give those, another --train_dir, or --overwrite to start again in this one"
        )
    if changed := dataset.changed_splits(metadata):
        raise DataError(
            f"{checkpoint} was made with other {' and '.join(changed)} images than {dataset.name} has now; put those "
            "back, or give another --train_dir, or --overwrite to start again in this one"
        )
    return checkpoint, metadata


def completed_result(config: TrainConfig, step: int, last_step: int) -> dict | None:
    """The result of a run with nothing left to do: at its last step or its target, with all its files written."""
    required = (files.RESULT, files.CONFIG, files.ENVIRONMENT)
    result, *others = (files.read_json_if_any(config.directory / name) for name in required)
    if not (result and all(others)):
        return None
    at_end = step >= last_step or 0 < config.target_accuracy <= result["reached"]
    return result if result["step"] == step and at_end else None


def choose_directory(config: TrainConfig, banner: str, launch_id: str) -> TrainConfig:
    """The config with the directory the run writes, and without `overwrite` if this launch has cleared it already.

    Data with a `banner` are not real: they leave the directory of the real run free.
    """
    if banner and not config.train_dir:
        config = dataclasses.replace(config, train_dir=f"runs/{config.name}-synthetic-seed{config.seed}")
    if config.overwrite and was_cleared_by(config.directory, launch_id):
        config = dataclasses.replace(config, overwrite=False)
    return config


def prepare(config: TrainConfig, launch_id: str) -> None:
    """Makes sure that the directory is the run's to write, and clears it if the config says `overwrite`.

    Raises:
      UsageError: it holds somebody else's files, or cannot be cleared.
    """
    check_ownership(config.directory)
    if config.overwrite:
        clear(config.directory, launch_id)


def previous_choices(config: TrainConfig, num_towers: int) -> dict[str, Any]:
    """What was chosen of `CHOSEN` when the run was last trained on as many towers, if it was.

    Raises:
      DataError: there are checkpoints, and all are damaged.
    """
    if config.overwrite or not any(getattr(config, name) in ("", "auto", 0) for name in CHOSEN):
        return {}
    checkpoint = latest_checkpoint(config.directory)
    metadata = read_metadata(checkpoint) if checkpoint else {}
    return {name: metadata.get(name) for name in CHOSEN} if metadata.get("towers") == num_towers else {}


def run_metadata(
    requested: TrainConfig, config: TrainConfig, dataset: Dataset, precision: str, num_towers: int
) -> dict:
    """What every checkpoint of a run records of how it was made: as was requested, and with what was chosen."""
    return {
        "recipe": recipe_fields(requested),
        "dataset": dataset.name,
        "dataset_info": dataset.info._asdict(),
        **{f"{name}_sha256": digest for name, digest in dataset.digests().items()},
        "precision": precision,
        "towers": num_towers,
        "strategy": config.strategy,
        **{name: getattr(config, name) for name in CHOSEN},
        "variable_placement": config.variable_placement if config.strategy == "towers" else None,
    }


def clear(directory: Path, launch: str = "") -> None:
    """Removes what a run wrote, and nothing else. Leaves the name of a `launch`, for the processes it starts again.

    Raises:
      UsageError: something cannot be removed or written.
    """
    try:
        if any(next(directory.glob(name), None) for name in (files.CONFIG, *CHECKPOINTS)):
            for path in (path for name in WRITTEN for path in directory.glob(name)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            for path in (path for name in SHARED for path in directory.glob(name)):
                with contextlib.suppress(OSError):
                    path.rmdir()
        if launch:
            (directory / files.LAUNCH).write_text(launch)
    except OSError as error:
        raise UsageError(f"{directory} cannot be cleared: {error.strerror}; give another --train_dir") from error


def was_cleared_by(directory: Path, launch: str) -> bool:
    """Whether the directory was last cleared by this launch; an empty name is no launch."""
    try:
        return bool(launch) and (directory / files.LAUNCH).read_text() == launch
    except OSError:
        return False


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
