"""A run's directory: whose it is, what is in it, whether its run can be resumed or is done, and clearing it.

No function here needs TensorFlow.
"""

import contextlib
import dataclasses
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import find_checkpoint, list_checkpoints, read_metadata
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import differing_settings, recipe_fields
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import DataError, UsageError, count, error_text
from cifar_towers.files import CHECKPOINTS_DIR
from cifar_towers.registry import split_path
from cifar_towers.user_code import find_source, split_function

CHOSEN = ("variable_placement", "tower_shares", "micro_batches")  # settings that `training.tuning` may choose
IN_USE = "another process trains in {}; end it, or give another --train_dir"
CHECKPOINTS = tuple(f"{CHECKPOINTS_DIR}/{prefix}*" for prefix in ("step-", files.DAMAGED, files.TEMPORARY))
EVENTS = ("train", "eval", "result", "tower_*", files.PROJECTOR)  # directories that TensorBoard reads
# Others may use these names of directories too: only a run's files in them are removed, and empty directories.
SHARED = (CHECKPOINTS_DIR, "train/plugins", *EVENTS)
WRITTEN = (
    *CHECKPOINTS,
    *(f"{name}/{written}" for name in EVENTS for written in (files.EVENT_FILES, f"{files.TEMPORARY}*")),
    *(f"{files.PROJECTOR}/{name}" for name in files.PROJECTOR_FILES),
    "train/plugins/profile",
    files.LAUNCH,
    *(f"{files.TEMPORARY}{name}" for name in files.FILES),  # of writes that were killed
    *reversed(files.FILES),  # config.json last: a run is known by it
)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Make a run's directory and hold its lock, which ends with the process.

    Raises:
      UsageError: the directory cannot be made or written, or another process trains in it.
    """
    with contextlib.ExitStack() as stack:
        try:
            files.make(directory)
            locked = stack.enter_context(files.locked(directory / files.LOCK))
        except OSError as error:
            action = "written" if directory.is_dir() else "made"
            raise UsageError(f"train_dir={directory} cannot be {action}: {error.strerror}") from error
        if not locked:
            raise UsageError(IN_USE.format(directory))
        yield


def is_run(directory: Path) -> bool:
    """Return whether a directory holds a run: a config.json with most of a run's settings.

    A damaged config.json counts if there are checkpoints or records beside it.
    """
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    try:
        return len(names & files.read_json_if_any(directory / files.CONFIG).keys()) > len(names) / 2
    except DataError:
        return (directory / files.METRICS).exists() or bool(list_checkpoints(directory))


# Before a run ---------------------------------------------------------------------------------------------------------


def choose_directory(config: TrainConfig, banner: str, launch_id: str) -> TrainConfig:
    """Return the config with the directory that the run writes.

    A `banner` means that synthetic data replace CIFAR-10. The default directory then has `synthetic` in its name.
    `overwrite` is switched off if this launch has cleared the directory before. A resumed run keeps its directory,
    and its `init_from` unless the config names another one.

    Raises:
      UsageError: `init_from` is that directory.
    """
    if banner and not config.train_dir:
        config = dataclasses.replace(config, train_dir=f"runs/{config.name}-synthetic-seed{config.seed}")
    with contextlib.suppress(OSError):  # no launch has cleared it
        if config.overwrite and launch_id and (config.directory / files.LAUNCH).read_text() == launch_id:
            config = dataclasses.replace(config, overwrite=False)
    metadata = {} if config.overwrite else _newest_metadata(config.directory)
    given, saved = Path(config.init_from), metadata.get("recipe", {}).get("init_from", "")
    if config.init_from and given.resolve() == config.directory.resolve():
        raise UsageError(f"init_from={given} is the directory of this run itself; give another --train_dir")
    if saved and (not config.init_from or given == Path(saved)):
        config = dataclasses.replace(config, init_from=saved, train_dir=str(config.directory))
    return config


def _newest_metadata(directory: Path) -> dict[str, Any]:
    """Return the metadata of the newest checkpoint whose metadata can be read; empty without one.

    They state the settings of the run also if the variables beside them are damaged.
    """
    for checkpoint in reversed(list_checkpoints(directory)):
        with contextlib.suppress(DataError, UsageError):  # a damaged one, or of an earlier version
            return read_metadata(checkpoint)
    return {}


def check_settings(config: TrainConfig, launch_id: str = "") -> None:
    """Refuse a directory in use, or with a run of other settings, before TensorFlow is imported and data are loaded.

    `exclusive`, `check_is_own` and `check_resumable` repeat these checks later, when the model and the data are known.

    Raises:
      UsageError: another process trains in the directory; or `check_is_own` refuses it; or the newest checkpoint was
        made with other settings, or by an earlier version of this project; or a new run's `init_from` has none.
        DataError: all checkpoints of `init_from` are damaged.
    """
    if not launch_id and files.is_locked(config.directory / files.LOCK):  # a launch's last process may still be ending
        raise UsageError(IN_USE.format(config.directory))
    check_is_own(config)
    checkpoints = [] if config.overwrite else list_checkpoints(config.directory)
    if checkpoints:
        with contextlib.suppress(DataError):  # a damaged one is set aside later
            _check_recipe(checkpoints[-1], read_metadata(checkpoints[-1]), config, has_batch_norm=False)
    elif config.init_from:
        find_checkpoint(Path(config.init_from))


def check_is_own(config: TrainConfig) -> None:
    """Refuse a directory whose config.json or result.json a new run would replace.

    Raises:
      UsageError: the files belong to no run; or, without `overwrite`, to a finished run whose checkpoints are gone.
    """
    directory = config.directory
    if list_checkpoints(directory) or _find(directory, (f"{CHECKPOINTS_DIR}/{files.DAMAGED}*",)):
        return
    if not is_run(directory):
        for path in (directory / files.CONFIG, directory / files.RESULT):
            if path.is_file() and path.stat().st_size:
                raise UsageError(f"{path} is of no run and would be replaced; give another --train_dir")
    elif (directory / files.RESULT).exists() and not config.overwrite:
        raise UsageError(
            f"{directory} holds the result of a run, and no checkpoint to resume from; put its {CHECKPOINTS_DIR}/ "
            f"back, or delete it by runs.py --delete {directory}, or give another --train_dir"
        )


def clear(directory: Path, launch: str = "") -> None:
    """Remove what a run wrote, and nothing else. Then write the id `launch`: its restarted processes resume.

    Raises:
      UsageError: something cannot be removed or written.
    """
    try:
        if _find(directory, (files.CONFIG, *CHECKPOINTS)):
            for path in _find(directory, WRITTEN):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            for path in _find(directory, SHARED):
                with contextlib.suppress(OSError):
                    path.rmdir()
        if launch:
            (directory / files.LAUNCH).write_text(launch)
    except OSError as error:
        raise UsageError(f"{directory} cannot be cleared: {error_text(error)}; give another --train_dir") from error


def _find(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in directory.glob(pattern)]


# Resuming a run -------------------------------------------------------------------------------------------------------


def previous_choices(config: TrainConfig, num_towers: int) -> dict[str, Any]:
    """Return the `CHOSEN` settings of the newest checkpoint if it was made with as many towers; otherwise none."""
    metadata = {} if config.overwrite else _newest_metadata(config.directory)
    is_comparable = metadata.get("towers") == num_towers
    return {name: metadata[name] for name in CHOSEN if is_comparable and metadata.get(name)}


def check_resumable(config: TrainConfig, dataset: Dataset, has_batch_norm: bool, checkpoint: Path) -> None:
    """Refuse to resume a run from a checkpoint of another one.

    Raises:
      UsageError: the checkpoint was made with another recipe or data set; the message names what differs.
      DataError: the data set now has other images.
    """
    metadata = read_metadata(checkpoint)
    _check_recipe(checkpoint, metadata, config, has_batch_norm, dataset.name)
    if changed := dataset.changed_splits(metadata):
        had, has = "validation_sha256" in metadata, "validation" in dataset.digests()
        validation = "" if had == has else f" ({'no' if had else 'new'} validation images)"
        raise DataError(
            f"{checkpoint} was made with other {' and '.join(changed)} images than {dataset.name} has now{validation}; "
            "put the images back as they were, or give another --train_dir, or --overwrite to start again in this one"
        )


def _check_recipe(
    checkpoint: Path, metadata: dict[str, Any], config: TrainConfig, has_batch_norm: bool, dataset: str = ""
) -> None:
    """Raise if a checkpoint was made with other settings, or on another data set if the name of one is given.

    Neither the value chosen for `auto` nor another path to the same code counts as another setting.
    """
    saved, code = dict(metadata["recipe"]), own_code(config)
    for name, auto in {"precision": "auto", "micro_batches": 0}.items():
        if saved.get(name) == auto and getattr(config, name) == metadata.get(name):
            saved[name] = metadata[name]
    for setting, digest in metadata.get("own_code", {}).items():
        before, now = split_function(saved[setting]), split_function(getattr(config, setting))
        if before and now and before[1] == now[1] and code.get(setting) == digest:
            saved[setting] = getattr(config, setting)
    differing = differing_settings(config, saved, has_batch_norm)
    names = metadata["dataset"], dataset or metadata["dataset"]
    if names[0] != names[1] and not all(split_path(name)[0] for name in names):  # files may have moved
        differing.append("dataset {} -> {}".format(*names))
    if differing:
        raise UsageError(
            f"{checkpoint} was made with other settings ({', '.join(differing)}); "
            f"give those, another --train_dir, {shlex.quote(f'--init_from={config.directory}')} for a new run that "
            "starts with these weights, or --overwrite to start again in this one"
        )


def completed_result(config: TrainConfig, step: int, last_step: int) -> dict[str, Any] | None:
    """Return the result of a run that is at its last step or its target; otherwise None.

    A result without config.json and environment.json beside it does not count.
    """
    result = files.read_json_if_any(config.directory / files.RESULT)
    if not result or not all((config.directory / name).exists() for name in (files.CONFIG, files.ENVIRONMENT)):
        return None
    at_end = step >= last_step or 0 < config.target_accuracy <= result["reached"]
    return result if result["step"] == step and at_end else None


def run_metadata(
    requested: TrainConfig, config: TrainConfig, dataset: Dataset, precision: str, num_towers: int, threads: int
) -> dict[str, Any]:
    """Return the metadata that all checkpoints of a run share: requested recipe, data, devices, chosen settings.

    Args:
      threads: in one operation; 0: as TensorFlow chooses.
    """
    return {
        "recipe": recipe_fields(requested),
        "own_code": own_code(requested),
        "dataset": dataset.name,
        "dataset_info": dataset.info._asdict(),
        **{f"{name}_sha256": digest for name, digest in dataset.digests().items()},
        "precision": precision,
        "towers": num_towers,
        "threads": threads,
        "strategy": config.strategy,
        "parallelism": config.parallelism,
        **{name: getattr(config, name) for name in CHOSEN},
        "variable_placement": config.variable_placement if config.strategy == "towers" else None,
    }


def own_code(config: TrainConfig) -> dict[str, str]:
    """Return the SHA-256 of the files of the user's functions that decide what is trained, by setting."""
    paths = {setting: find_source(setting, getattr(config, setting)) for setting in ("model", "augment", "loss")}
    return {setting: files.sha256(path) for setting, path in paths.items() if path}


def describe_changed_code(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return a line about files of `own_code` that have changed since a checkpoint was saved; empty if none has."""
    before, now = saved.get("own_code", {}), current["own_code"]  # earlier versions of this project saved none
    changed = [f"{each}={current['recipe'][each]}" for each in now if before.get(each, now[each]) != now[each]]
    line = f"{', '.join(changed)}: the file has changed since step {saved['step']}, so what is trained may change"
    return f"{line}; restore the file to keep it the same for the whole run" if changed else ""


def describe_changed_threads(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return a line if a resumed run has another number of threads on as many towers; otherwise empty."""
    before, now = (each.get("threads", 0) for each in (saved, current))
    if saved["towers"] != current["towers"] or not before or not now or before == now:
        return ""
    rounding = f"operations have {count(now, 'thread')} instead of {before}, which rounds differently"
    return f"{rounding}; give --intra_op_threads={before} for the bits of an uninterrupted run"


def describe_changes(saved: Mapping[str, Any], current: Mapping[str, Any], has_batch_norm: bool) -> str:
    """Return a line about settings of a resumed run that change what is trained; empty if there are none.

    Args:
      saved, current: as `run_metadata` returns them.
      has_batch_norm: whether the model has batch normalization.
    """
    changes, settings = [], []
    if saved["precision"] != current["precision"]:
        changes.append(f"it computes in {current['precision']} instead of {saved['precision']}")
        settings.append("precision")
    if has_batch_norm and current["recipe"]["batch_statistics"] != "synchronized":
        saved_parts, parts = (each["towers"] * each["micro_batches"] for each in (saved, current))
        saved_shares, shares = saved["tower_shares"], current["tower_shares"]
        if saved_parts != parts:
            changes.append(f"batch norm sees 1/{parts} of a batch at a time instead of 1/{saved_parts}")
            names = ("parallelism", "towers", "micro_batches")
            settings += [name for name in names if saved.get(name, current[name]) != current[name]]
        elif saved_shares != shares:
            equal = "all equal"
            changes.append(f"batch norm sees tower shares {shares or equal} instead of {saved_shares or equal}")
            settings.append("tower_shares")
    if not changes:
        return ""
    flags = " ".join(f"--{'num_gpus' if name == 'towers' else name}={saved[name]}" for name in settings)
    advice = f"give {flags} to keep it the same for the whole run"
    return f"{' and '.join(changes)}, which changes what is trained; {advice}"
