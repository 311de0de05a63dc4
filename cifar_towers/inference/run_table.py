"""The runs below a directory: what they train, how far they are, what they reached."""

import dataclasses
import fcntl
import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import list_checkpoints
from cifar_towers.config import TrainConfig
from cifar_towers.errors import UsageError
from cifar_towers.reporting.run_records import RunRecord, as_number, as_text, read_run, shorten

SETTINGS = {field.name for field in dataclasses.fields(TrainConfig)}
RUNNING, DONE, STOPPED, DAMAGED, EMPTY = "running", "done", "stopped", "damaged", "no step yet"
NAME_WIDTH = 26


class RunSummary(NamedTuple):
    """A run in a line. Accuracies are fractions of the test set, or of the validation set before the end."""

    run: str  # its directory
    recipe: str
    seed: int | None
    towers: int | None
    state: str  # RUNNING, DONE, STOPPED, DAMAGED or EMPTY
    step: int
    accuracy: float | None  # without test-time augmentation
    tta_accuracy: float | None  # with the most of it
    images_per_sec: float | None
    minutes: float | None  # of training, compilation, evaluation and saving
    revision: str
    megabytes: float


def find_runs(root: Path, pattern: str = "*") -> list[RunSummary]:
    """The runs in and below `root` whose directory, or its name, matches the pattern (as a shell's), by name.

    Raises:
      UsageError: there is no such directory.
    """
    if not root.is_dir():
        raise UsageError(f"there is no directory {root}; give --runs_dir=..., or train first")
    found = sorted(path.parent for path in root.rglob(files.CONFIG) if is_run(path.parent))
    names = {directory: str(directory.relative_to(root)) for directory in found}
    matching = [d for d in found if any(fnmatch.fnmatch(name, pattern) for name in (names[d], d.name, str(d)))]
    return [summarize(directory) for directory in matching]


def is_run(directory: Path) -> bool:
    """Whether a directory's config.json is of a run."""
    settings = files.read_json_if_any(directory / files.CONFIG)
    return len(SETTINGS & settings.keys()) > len(SETTINGS) / 2


def summarize(directory: Path) -> RunSummary:
    """The line of one run."""
    record = _read(directory)
    scores = list(record.scores.values())
    best_known = [score for score in scores if score.get("split") == "test"] or scores
    plain = [as_number(score.get("accuracy")) for score in best_known if not score.get("tta")]
    augmented = [as_number(score.get("accuracy")) for score in best_known if score.get("tta")]
    seconds = record.result.get("seconds")
    rates = [rate for each in record.training if (rate := each.get("images_per_sec"))]
    return RunSummary(
        run=str(directory),
        recipe=record.title,
        seed=record.config.get("seed"),
        towers=len(record.towers) or None,
        state=_state(directory, record),
        step=record.step,
        accuracy=max(plain, default=None),
        tta_accuracy=max(augmented, default=None),
        images_per_sec=record.result.get("images_per_sec") or (rates[-1] if rates else None),
        minutes=sum(seconds.values()) / 60 if isinstance(seconds, dict) else None,
        revision=as_text(record.environment.get("git_revision", "unknown")),
        megabytes=files.size_in_bytes(directory) / 1e6,
    )


def _read(directory: Path) -> RunRecord:
    try:
        return read_run(directory, directory.name)
    except UsageError:  # no records yet, or none that can be read
        settings = files.read_json_if_any(directory / files.CONFIG)
        return RunRecord(directory.name, directory, settings, {}, {}, 0, [], [])


def _state(directory: Path, record: RunRecord) -> str:
    if is_being_written(directory):
        return RUNNING
    checkpoints = list_checkpoints(directory)
    if checkpoints and files.validate(checkpoints[-1]):
        return DAMAGED
    if record.finished:
        return DONE
    return STOPPED if checkpoints or record.step else EMPTY


def is_being_written(directory: Path) -> bool:
    """Whether a process has the lock of a run's directory."""
    try:
        with open(directory / files.LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def sort_runs(runs: Sequence[RunSummary], key: str) -> list[RunSummary]:
    """Ascending by a field, those without it first; as they are without a key."""
    return sorted(runs, key=lambda run: (getattr(run, key) is not None, getattr(run, key))) if key else [*runs]


def best_run(runs: Sequence[RunSummary], recipe: str) -> RunSummary:
    """The finished run of a recipe with the highest accuracy, with test-time augmentation where all have it.

    Raises:
      UsageError: no run of the recipe is finished.
    """
    done = [run for run in runs if run.recipe == recipe and run.state == DONE and run.accuracy is not None]
    if not done:
        known = ", ".join(sorted({run.recipe for run in runs if run.state == DONE})) or "none"
        raise UsageError(f"no run of {recipe} is finished; finished recipes: {known}")
    augmented = all(run.tta_accuracy is not None for run in done)
    return max(done, key=lambda run: run.tta_accuracy if augmented else run.accuracy)


def format_json(runs: Sequence[RunSummary]) -> str:
    """An object a line, for other programs."""
    return "\n".join(files.to_json(run._asdict()) for run in runs)


def format_table(runs: Sequence[RunSummary]) -> str:
    """The runs as text of at most 100 columns."""
    root = Path(os.path.commonpath([Path(run.run).parent for run in runs]))
    rows = [("run", "towers", "state", "accuracy", "TTA", "images/s", "minutes", "revision", "MB")]
    rows += [(_name(run, root), *_cells(run)) for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.ljust if column in (0, 2, 7) else str.rjust for column in range(len(widths))]
    lines = ("  ".join(pad(*cell) for pad, *cell in zip(align, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _name(run: RunSummary, root: Path) -> str:
    """The path below `root`; with recipe and seed where it does not say them."""
    path = Path(run.run)
    says_all = path.name == f"{run.recipe}-seed{run.seed}"
    name = str(path.relative_to(root))
    return shorten(name if says_all else f"{name} ({run.recipe}, seed {run.seed})", NAME_WIDTH)


def _cells(run: RunSummary) -> tuple[str, ...]:
    return (
        _number(run.towers, "d"),
        f"{run.state} at {run.step:,}" if run.state in (RUNNING, STOPPED) and run.step else run.state,
        _number(run.accuracy and 100 * run.accuracy, ".2f"),
        _number(run.tta_accuracy and 100 * run.tta_accuracy, ".2f"),
        _number(run.images_per_sec, ",.0f"),
        _number(run.minutes, ",.1f"),
        shorten(run.revision.replace("-dirty", "+"), 9),
        _number(run.megabytes, ",.0f"),
    )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None or value != value else format(value, spec)
