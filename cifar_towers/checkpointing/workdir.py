"""A run's directory: what is in it, whose it is, and whether the run in it is done."""

import contextlib
import dataclasses
import shutil
from pathlib import Path

from cifar_towers.checkpointing import checkpoint as checkpoints
from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import with_current_names
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import DataError, UsageError
from cifar_towers.files import atomic_io, run_files
from cifar_towers.registry import FOLDER

LAUNCH = ".launch"  # the file that holds the name of the launch that cleared it

# What may change between one start of a run and the next; all else is its recipe.
NOT_RECIPE = {"recipe", "train_dir", "overwrite", "seeds", "max_steps", "target_accuracy", "dataset", "data_dir"}
NOT_RECIPE |= {"max_nonfinite_steps", "rollback_on_divergence"}
NOT_RECIPE_GROUPS = {"Towers", "Cluster", "Reporting"}
# What a run writes, file by file in directories whose names others may use as well, which go when nothing is left.
SHARED = (checkpoints.DIRECTORY, "train/plugins", "train", "eval", "result", "tower_*")
CHECKPOINTS = tuple(
    f"{checkpoints.DIRECTORY}/{name}*" for name in ("step-", atomic_io.DAMAGED, atomic_io.TEMPORARY, atomic_io.TRASH)
)
WRITTEN = (
    *CHECKPOINTS,
    *(
        f"{name}/{written}"
        for name in ("train", "eval", "result", "tower_*")
        for written in (run_files.EVENT_FILES, run_files.TRUNCATED_EVENTS)
    ),
    "train/plugins/profile",
    "projector_*",
    LAUNCH,
    *reversed(run_files.FILES),  # config.json is the last: a run is known by it
)


def check_ownership(directory: Path) -> None:
    """Holds a directory against being somebody else's, whose files a run's would replace.

    Raises:
      UsageError: it has a config.json or result.json, no checkpoint, and no config.json of a run.
    """
    if any(next(directory.glob(name), None) for name in CHECKPOINTS):
        return
    ours = {field.name for field in dataclasses.fields(TrainConfig)}
    of_a_run = len(ours & run_files.read_json_if_any(directory / run_files.CONFIG).keys()) > len(ours) / 2
    found = [name for name in (run_files.CONFIG, run_files.RESULT) if _has_content(directory / name)]
    if found and not of_a_run:
        raise UsageError(f"{directory / found[0]} is of no run and would be replaced; give another --train_dir")


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def newest(directory: Path, config: TrainConfig, dataset: Dataset) -> tuple[Path, dict] | None:
    """The newest undamaged checkpoint and its facts, if there is one.

    Raises:
      UsageError: it was made with another recipe or data set; the message names what differs.
      DataError: there are checkpoints, and all are damaged; or the data set has other images than it was made with.
    """
    checkpoint = checkpoints.newest(directory)
    if not checkpoint:
        return None
    facts = checkpoints.read_metadata(checkpoint)
    mine = recipe_fields(config) | {"dataset": dataset.name}
    theirs = recipe_fields(TrainConfig())  # a setting may be newer than the checkpoint
    theirs |= with_current_names(facts["recipe"]) | {"dataset": facts["dataset"]}
    if all(of["dataset"].startswith(FOLDER) for of in (mine, theirs)):  # it may have moved; what is in it is held below
        mine["dataset"] = theirs["dataset"]
    common = [name for name in mine if name in theirs]
    differing = [f"{name} {theirs[name]} -> {mine[name]}" for name in common if theirs[name] != mine[name]]
    if differing:
        raise UsageError(
            f"{checkpoint} was made with other settings ({', '.join(differing)}); "
            "give those, another --train_dir, or --overwrite to start again in this one"
        )
    changed = dataset.changed_splits(facts)
    if changed:
        raise DataError(
            f"{checkpoint} was made with other {' and '.join(changed)} images than {dataset.name} has now; put those "
            "back, or give another --train_dir, or --overwrite to start again in this one"
        )
    return checkpoint, facts


def finished(directory: Path, config: TrainConfig, step: int, last_step: int) -> dict | None:
    """The result of a run that has nothing left to do: at its last step, or at the target it was asked for, with all
    on record that others need to use it."""
    needed = (run_files.RESULT, run_files.CONFIG, run_files.ENVIRONMENT)
    result, *others = (run_files.read_json_if_any(directory / name) for name in needed)
    if not (result and all(others)):  # the checkpoint tells the rest
        return None
    at_end = step >= last_step or 0 < config.target_accuracy <= result["reached"]
    return result if result["step"] == step and at_end else None


def recipe_fields(config: TrainConfig) -> dict:
    """The settings that decide what is trained. max_steps is one where something follows the length."""
    follows = (
        "%" in config.learning_rate_schedule + config.image_size_schedule
        or config.optimizer == "muon"
        or config.lookahead
    )
    left_out = NOT_RECIPE - ({"max_steps"} if config.epochs == 0 and follows else set())
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in left_out and field.metadata["group"] not in NOT_RECIPE_GROUPS
    }


def run_metadata(config: TrainConfig, dataset: Dataset, precision: str, towers: int) -> dict:
    """What every checkpoint of a run keeps of how it was made."""
    return {
        "recipe": recipe_fields(config),
        "dataset": dataset.name,
        "traits": dataset.info.to_json(),
        **{f"{name}_sha256": digest for name, digest in dataset.digests().items()},
        "precision": precision,
        "towers": towers,
        "strategy": config.strategy,
        "variable_placement": config.variable_placement if config.strategy == "towers" else None,
    }


def clear(directory: Path, launch: str = "") -> None:
    """Removes what a run wrote, and nothing else; nothing at all where no run has been. Leaves the name of a `launch`,
    for what this starts again.

    Raises:
      OSError: something cannot be removed or written.
    """
    if any(next(directory.glob(name), None) for name in (run_files.CONFIG, *CHECKPOINTS)):
        for path in (path for name in WRITTEN for path in directory.glob(name)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in (path for name in SHARED for path in directory.glob(name)):
            with contextlib.suppress(OSError):
                path.rmdir()
    if launch:
        (directory / LAUNCH).write_text(launch)


def was_cleared_by(directory: Path, launch: str) -> bool:
    """Whether it is this launch that it was last cleared by; there may be none."""
    try:
        return bool(launch) and (directory / LAUNCH).read_text() == launch
    except OSError:
        return False
