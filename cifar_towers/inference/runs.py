"""The runs below a directory: what they train, how far they are, and what they reached.

No function here needs TensorFlow.
"""

import fnmatch
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar_towers import files
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.evaluation.score import reported_score, score_name
from cifar_towers.reporting.run_records import RunRecord, align_columns, format_number, format_rate, read_run

log = logging.getLogger(__name__)

RUNNING, DONE, STOPPED = "running", "done", "stopped"
NOTE = """accuracy: averaged weights if a run keeps an average, otherwise raw ones; TTA: the highest level scored
min: of all its processes, with start, compilation and evaluation
val: on the validation images, not on the test images"""


def find_runs(root: Path, *patterns: str) -> list[RunRecord]:
    """Read the runs in and below `root`, sorted by directory. A damaged run is left out, and a line says so.

    Args:
      patterns: patterns of the shell, for a run's path below `root`, its name, or its whole path; default: all runs.

    Raises:
      UsageError: there is no such directory.
    """
    if not root.is_dir():
        raise UsageError(f"there is no directory {root}; give --runs_dir=..., or train first")
    found = []
    for directory in sorted(path.parent for path in root.rglob(files.CONFIG)):
        names = (str(directory.relative_to(root)), directory.name, str(directory))
        if any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns or ("*",)):
            try:
                found.append(read_run(directory, str(directory.relative_to(root))))
            except (UsageError, DataError) as error:
                log.warning(f"{printable(str(directory))} is left out: {error}")
    return [run for run in found if "train_dir" in run.config]


def describe(run: RunRecord) -> dict[str, Any]:
    """Return a run's values by the names of `config.programs.RUN_FIELDS`. Accuracies are fractions."""
    reported = run.reported_score or {}
    plain = run.scores.get(score_name({**reported, "tta": 0}), {}) if reported else {}
    rates = [rate for record in run.training if (rate := record.get("images_per_sec"))]
    seconds = [number for phase, number in run.result.get("seconds", {}).items() if phase != "not_running"]
    is_running = files.is_locked(run.directory / files.LOCK)
    return {
        "run": str(run.directory),
        "recipe": run.title,
        "data": run.result.get("dataset") or run.config.get("dataset"),
        "seed": run.config.get("seed"),
        "towers": len(run.towers) or None,
        "state": RUNNING if is_running else DONE if run.finished else STOPPED,
        "step": run.step,
        "split": reported.get("split"),
        "weights": reported.get("weights"),
        "accuracy": plain.get("accuracy"),
        "tta_accuracy": reported["accuracy"] if reported.get("tta") else None,
        "images_per_sec": run.result.get("images_per_sec") or (rates[-1] if rates else None),
        "minutes": sum(seconds) / 60 if run.finished else None,
        "revision": run.environment.get("git_revision"),
    }


def sort_runs(runs: Sequence[RunRecord], key: str) -> list[RunRecord]:
    """Sort by a field, ascending, with the runs that lack it first. Without a key the order stays."""
    if not key:
        return [*runs]
    rows = [(value is not None, value, run) for run in runs for value in [describe(run)[key]]]
    return [run for *_, run in sorted(rows, key=lambda row: row[:2] if row[0] else row[:1])]


def best_run(runs: Sequence[RunRecord], recipe: str) -> RunRecord:
    """Return the finished run of a recipe with the highest accuracy: on validation images if every run has it.

    Otherwise the runs are ranked by test accuracy. They are compared with TTA if every run was scored with it.

    Raises:
      UsageError: no run of the recipe is finished, or the finished ones were scored on different images.
    """
    done = [run for run in runs if run.title == recipe and describe(run)["state"] == DONE and run.scores]
    if not done:
        raise UsageError(f"no run of {recipe} is finished")
    digests = {str(run.environment.get("data_sha256", {}).get("test")) for run in done}
    if len(digests) > 1:
        raise UsageError(f"finished runs of {recipe} have different test images; give a pattern of names too")
    for split, with_tta in itertools.product(("validation", "test"), (True, False)):
        accuracies = [_accuracy(run, split, with_tta) for run in done]
        if None not in accuracies:
            break
    return max(zip(accuracies, done, strict=True), key=lambda pair: pair[0] or 0)[1]


def _accuracy(run: RunRecord, split: str, with_tta: bool) -> float | None:
    """Return the accuracy on a split, with or without TTA, of the weights that a run reports; None without one."""
    scores = [score for score in run.scores.values() if score["split"] == split and bool(score["tta"]) == with_tta]
    return (reported_score(scores) or {}).get("accuracy")


def format_json(runs: Sequence[RunRecord]) -> str:
    """Return one JSON object per line, for other programs."""
    return "\n".join(files.to_json(describe(run)) for run in runs)


def format_table(runs: Sequence[RunRecord]) -> str:
    """Return a table with a line per run, and a note about its columns."""
    rows = [_cells(run) for run in runs]
    table = align_columns([list(rows[0]), *(list(row.values()) for row in rows)], left=(0, 1, 2, 4, 9))
    return f"{table}\n\n{NOTE}"


def _cells(run: RunRecord) -> dict[str, str]:
    values = describe(run)
    return {
        "run": printable(run.name),
        "recipe": printable(values["recipe"]),
        "data": printable(str(values["data"])),
        "towers": format_number(values["towers"], "d"),
        "state": values["state"] if run.finished else f"{values['state']} at {run.step:,}",
        "accuracy": format_number(values["accuracy"], ".2f", 100) + " val" * (values["split"] == "validation"),
        "TTA": format_number(values["tta_accuracy"], ".2f", 100),
        "images/s": format_rate(values["images_per_sec"]),
        "min": format_number(values["minutes"], ",.1f"),
        "revision": (values["revision"] or "-")[:9],
    }
