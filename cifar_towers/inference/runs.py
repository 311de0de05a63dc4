"""The runs below a directory: what they train, how far they are, what they reached; and deleting runs.

No function here needs TensorFlow.
"""

import contextlib
import fnmatch
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cifar_towers import files
from cifar_towers.checkpointing import workdir
from cifar_towers.checkpointing.checkpoint import list_checkpoints, read_metadata
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.evaluation.score import reported_score, score_name
from cifar_towers.registry import split_path
from cifar_towers.reporting.phase_timer import PhaseTimer
from cifar_towers.reporting.run_records import (
    RunRecord,
    align_columns,
    compare_groups,
    format_number,
    format_rate,
    group_by_recipe,
    read_run,
    read_times,
    share_test_images,
    shorten,
)

log = logging.getLogger(__name__)

RUNNING, DONE, STOPPED, DAMAGED, EMPTY = "running", "done", "stopped", "damaged", "no step yet"
NAME_WIDTH, DATA_WIDTH, REVISION_WIDTH = 30, 12, 9
MAX_PAIRS = 6  # of groups whose difference is printed
NOTE = """accuracy: averaged weights if a run keeps an average, otherwise raw ones; TTA: the highest level scored
min: of all its processes, with start, compilation, evaluation and lost steps
val: on the validation images, not on the test images
goodput: percentage of all time since the first start that went into the steps kept"""


class RunSummary(NamedTuple):
    """A run in a line. The fields before `seconds` are `config.programs.RUN_FIELDS`."""

    run: str  # its directory
    recipe: str
    data: str  # name of the data set
    seed: int | None
    towers: int | None
    state: str  # RUNNING, DONE, STOPPED, DAMAGED or EMPTY
    step: int
    scored_step: int  # step of the accuracies
    split: str | None  # split of the accuracies: `test`, or `validation` before the end of a run that has one
    weights: str | None  # weights of the accuracies: `ema` or `raw`
    accuracy: float | None  # a fraction, without test-time augmentation
    tta_accuracy: float | None  # at the highest level that was scored
    images_per_sec: float | None
    minutes: float | None  # of all processes of the run
    goodput: float | None  # fraction of the time since the first start that went into the steps kept
    revision: str
    megabytes: float
    seconds: dict[str, float]  # since the first start, by phase
    record: RunRecord


def find_runs(root: Path, pattern: str = "*", verify: bool = False) -> list[RunSummary]:
    """Summarize the runs in and below `root`, sorted by directory.

    Args:
      pattern: a pattern of the shell, for a run's path below `root`, its name, or its whole path.
      verify: compare the contents of the last checkpoints with their SHA-256, which takes seconds, and not only sizes.

    Raises:
      UsageError: there is no such directory.
    """
    if not root.is_dir():
        raise UsageError(f"there is no directory {root}; give --runs_dir=..., or train first")
    found = []
    for directory in sorted(path.parent for path in files.files_below(root) if path.name == files.CONFIG):
        names = (str(directory.relative_to(root)), directory.name, str(directory))
        if any(fnmatch.fnmatch(name, pattern) for name in names) and workdir.is_run(directory):
            found.append(summarize(directory, verify))
    return found


def summarize(directory: Path, verify: bool = False) -> RunSummary:
    """Summarize one run. A run with a damaged file is shown with what can be read."""
    config: dict[str, Any] = {}
    record = RunRecord(directory.name, directory, config, {}, {}, 0, [], [])
    is_damaged = True
    with contextlib.suppress(UsageError, DataError):
        config.update(files.read_json(directory / files.CONFIG))
        record = read_run(directory, directory.name)
        is_damaged = False
    reported = record.reported_score or {}
    plain = record.scores.get(score_name({**reported, "tta": 0}), {}) if reported else {}
    times = _times(record)
    requested, guess = record.config.get("dataset") or "-", "synthetic" if record.banner else "cifar10"
    rates = [rate for each in record.training if (rate := each.get("images_per_sec"))]
    return RunSummary(
        run=str(directory),
        recipe=record.title,
        data=record.result.get("dataset") or (requested if requested != "auto" else guess),
        seed=record.config.get("seed"),
        towers=len(record.towers) or None,
        state=_state(record, is_damaged, verify),
        step=record.step,
        scored_step=record.scored_step,
        split=reported.get("split"),
        weights=reported.get("weights"),
        accuracy=plain.get("accuracy"),
        tta_accuracy=reported["accuracy"] if reported.get("tta") else None,
        images_per_sec=record.result.get("images_per_sec") or (rates[-1] if rates else None),
        minutes=sum(s for p, s in times["seconds"].items() if p != "not_running") / 60 if record.finished else None,
        goodput=times.get("goodput"),
        revision=record.environment.get("git_revision") or "unknown",
        megabytes=files.size_in_bytes(directory) / 1e6,
        seconds=times["seconds"],
        record=record,
    )


def _state(record: RunRecord, is_damaged: bool, verify: bool) -> str:
    if files.is_locked(record.directory / files.LOCK):
        return RUNNING
    checkpoints = list_checkpoints(record.directory)
    try:
        if is_damaged or (checkpoints and files.validate(checkpoints[-1], hashes=verify)):
            return DAMAGED
    except OSError:  # it cannot be read now
        return DAMAGED
    if record.finished:
        return DONE
    return STOPPED if checkpoints or record.step else EMPTY


def _times(record: RunRecord) -> Mapping[str, Any]:
    """Return where a run's time went: of a run that was stopped, as if its last checkpoint were resumed now."""
    if record.finished:
        return record.result
    timer, newest = PhaseTimer(), read_times(record.directory)
    is_running = files.is_locked(record.directory / files.LOCK)
    saved = newest if is_running else {}
    for checkpoint in [] if is_running else list_checkpoints(record.directory):
        with contextlib.suppress(UsageError, DataError):  # an earlier version's, or a damaged one
            saved = read_metadata(checkpoint)
    timer.resume(saved, newest)
    return timer.summary()


def sort_runs(runs: Sequence[RunSummary], key: str) -> list[RunSummary]:
    """Sort by a field, ascending, with the runs that lack it first. Without a key the order stays."""
    return sorted(runs, key=lambda run: (getattr(run, key) is not None, getattr(run, key))) if key else [*runs]


def best_run(runs: Sequence[RunSummary], recipe: str, data: str = "") -> RunSummary:
    """Return the finished run of a recipe with the highest accuracy, with TTA if all its runs were scored with it.

    The accuracy is that on the validation images if all these runs have some. Otherwise it is that on the test images,
    and a line says so.

    Args:
      data: the recipe's own data set. If no run is on it, runs on one other data set are ranked, and a line says so.

    Raises:
      UsageError: no run of the recipe is finished, or the finished ones have different test images.
    """
    done = [run for run in runs if run.recipe == recipe and run.state == DONE and run.accuracy is not None]
    if not done:
        known = ", ".join(sorted({run.recipe for run in runs if run.state == DONE})) or "none"
        raise UsageError(f"no run of {recipe} is finished; finished recipes: {known}")
    names = sorted({run.data for run in done})
    if data in names:
        done, names = [run for run in done if run.data == data], [data]
    if len(names) > 1 or not share_test_images([run.record for run in done]):
        raise UsageError(
            f"finished runs of {recipe} are on several data sets, or on one whose test images changed, so their "
            f"accuracies do not compare: {', '.join(names)}; give a pattern of names too"
        )
    if data and data not in names:
        log.info(f"no run of {recipe} on {data} is finished; ranked those on {names[0]}")
    for split, with_tta in itertools.product(("validation", "test"), (True, False)):
        ranked = [(value, run) for run in done if (value := _accuracy(run, split, with_tta)) is not None]
        if len(ranked) == len(done):
            break
    if split == "test" and len(done) > 1:
        log.info("chosen by its test accuracy, which is therefore too high; train runs with --validation_examples")
    return max(ranked, key=lambda pair: pair[0])[1]


def _accuracy(run: RunSummary, split: str, with_tta: bool) -> float | None:
    """Return the accuracy on a split, with or without TTA, of the weights that a run reports; None without one."""
    scores = [s for s in run.record.scores.values() if s["split"] == split and bool(s["tta"]) == with_tta]
    return (reported_score(scores) or {}).get("accuracy")


def format_json(runs: Sequence[RunSummary]) -> str:
    """Return one JSON object per line, for other programs."""
    return "\n".join(files.to_json(dict(zip(run._fields[:-1], run, strict=False))) for run in runs)


def format_table(runs: Sequence[RunSummary], root: Path) -> str:
    """Return the runs below `root` as a table, usually of at most 120 columns, and how groups of seeds differ."""
    rows = [_cells(run, root) for run in runs]
    table = align_columns([list(rows[0]), *(list(row.values()) for row in rows)], left=(0, 1, 3, 9))
    return "\n".join([table, "", NOTE, *_describe_differences(runs)])


def _describe_differences(runs: Sequence[RunSummary]) -> list[str]:
    """Return a line for every two groups of finished runs on the same data that differ in more than their seed."""
    pairs = []
    for data in sorted({run.data for run in runs}):
        groups = group_by_recipe([run.record for run in runs if run.data == data and run.state == DONE])
        pairs += compare_groups(groups)
    if len(pairs) > MAX_PAIRS:
        return ["", "to see the difference of two groups of seeds, give a pattern of names for both"]
    return ["", *pairs] if pairs else []


def _name(run: RunSummary, root: Path) -> str:
    """Return the path below `root`, and recipe and seed if the path does not say them and there is room."""
    name = printable(str(Path(run.run).relative_to(root)))
    if len(name) > NAME_WIDTH:
        return f"…{name[1 - NAME_WIDTH :]}"  # the end tells seeds apart
    if Path(name).name != f"{run.recipe}-seed{run.seed}":
        name += f" ({run.recipe}, seed {run.seed})"
    return shorten(name, NAME_WIDTH)


def _cells(run: RunSummary, root: Path) -> dict[str, str]:
    prefix, path = split_path(run.data)
    at_earlier_step = f" at {run.scored_step:,}" if 0 < run.scored_step < run.step else ""
    return {
        "run": _name(run, root),
        "data": shorten(prefix + Path(path).name if prefix else run.data, DATA_WIDTH),
        "towers": format_number(run.towers, "d"),
        "state": f"{run.state} at {run.step:,}" if run.state in (RUNNING, STOPPED) and run.step else run.state,
        "accuracy": format_number(run.accuracy, ".2f", 100) + " val" * (run.split == "validation") + at_earlier_step,
        "TTA": format_number(run.tta_accuracy, ".2f", 100),
        "images/s": format_rate(run.images_per_sec),
        "min": format_number(run.minutes, ",.1f"),
        "goodput": format_number(run.goodput, ".1f", 100),
        "revision": shorten(run.revision.replace("-dirty", "+"), REVISION_WIDTH),
        "MB": format_number(run.megabytes, ",.0f"),
    }


def delete_runs(directories: Sequence[Path], confirm: Callable[[str], bool]) -> str:
    """Delete these runs if `confirm` says yes to the question, and return what was done.

    What the runs wrote is deleted, and a directory only if nothing else is left in it.

    Raises:
      UsageError: one of them is no run, or a process writes it; then none is deleted.
    """
    for directory in directories:
        if not workdir.is_run(directory):
            raise UsageError(f"{directory} is no run, so nothing was deleted; give directories of runs")
        if files.is_locked(directory / files.LOCK):
            raise UsageError(f"{directory} is being written, so nothing was deleted; end its training first")
    size = sum(map(files.size_in_bytes, directories))
    names = ", ".join(map(str, directories))
    if not confirm(f"delete {names}, {size / 1e6:,.0f} MB? [y/N] "):
        return "nothing was deleted"
    for directory in directories:
        with workdir.exclusive(directory):
            workdir.clear(directory)
            (directory / files.LOCK).unlink()
        with contextlib.suppress(OSError):  # somebody else's files are in it
            directory.rmdir()
    return f"deleted {names}"
