"""Evaluation of a run's checkpoint, as a table or as JSON."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from cifar_towers import files
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, UsageError, listed, printable
from cifar_towers.evaluation.score import Score, describe_tta, wilson_interval
from cifar_towers.inference.predict import TrainedModel
from cifar_towers.reporting.records import align_columns

TABULATED = ("accuracy", "loss", "ece")  # of each set of corrupted images
EXTRA = {
    "gaussian_blur",
    "saturate",
    "spatter",
    "speckle_noise",
}  # corruptions that the published mean leaves out
NUM_PUBLISHED = 15  # corruptions in that mean; TFDS has other names for some


def evaluate_checkpoint(config: EvaluateConfig) -> str:
    """Evaluate a checkpoint and return the output of the program: a table, or one object with
    `--json`.
    """
    record = score_checkpoint(config)
    if config.json:
        return files.to_json(record)
    changed = " (another set than in training)" if record.get("changed_data") else ""
    lines = [
        f"{record['train_dir']} at step {record['step']}: {record['dataset']} "
        f"{record['split']}{changed}, {record['weights']} weights, {describe_tta(record['tta'])}, "
        f"{record['precision']}"
    ]
    if "per_class" in record:
        low, high = record["interval95"]
        lines.append(
            f"accuracy {100 * record['accuracy']:.2f} % ({record['correct']:,} of "
            f"{record['count']:,}; 95 % interval {100 * low:.2f} to {100 * high:.2f} %), loss "
            f"(NLL) {record['loss']:.4f}, ECE {record['ece']:.4f}"
        )
        rows = _class_rows(record)
    else:
        lines.append(f"accuracy (%) on {record['count']:,} images by severity")
        rows = [["corruption", *record["accuracy"]["mean"]]]
        for name, row in record["accuracy"].items():
            rows.append([name, *(f"{100 * accuracy:.2f}" for accuracy in row.values())])
    return "\n".join(
        [
            *map(printable, lines),
            "",
            align_columns(rows, left=(0, 3) if "per_class" in record else (0,)),
        ]
    )


def score_checkpoint(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a checkpoint; return what was evaluated, and the score, as `--json` prints them.

    Raises:
      UsageError: there is no such run, split or set of weights. DataError: the run's data cannot be
        read, or differ from the data it was trained on; or logits are not finite.
    """
    trained = TrainedModel(config)
    trained_on = trained.metadata["dataset"]
    source = sources.find(config.dataset or trained_on, config.data_dir)
    record = {
        "train_dir": str(trained.run.directory),
        "step": trained.metadata["step"],
        "dataset": source.name,
    }
    record |= {
        "split": config.split,
        "weights": trained.weights,
        "tta": config.tta,
        "precision": trained.precision,
    }

    def read(name: str) -> Split:
        split = sources.load_split(
            source, name, trained.info.image_size, trained.config.validation_examples
        )
        return _number_labels(split, trained)

    def score(split: Split) -> Score:
        split = split.take(slice(config.num_images or None))
        return Score(split.labels, trained.logits(split.images, config.tta))

    if source.corruptions:
        if config.split != "test":
            raise UsageError(f"{source.name} has corrupted test images only; leave --split out")
        console = Console(stderr=True)
        names = track(
            source.corruptions,
            "evaluating",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        return record | _tabulate({name: score(read(name)) for name in names})
    split = read(config.split)
    if not len(split.labels):
        raise UsageError(f"{source.name} has no {config.split} examples; give another --split")
    record["changed_data"] = trained.metadata.get(f"{config.split}_sha256") != split.digest
    if record["changed_data"] and source.name == trained_on and not config.allow_changed_data:
        raise DataError(
            f"{trained.run.directory} was made with other {config.split} images than "
            f"{source.name} has now; restore them, or give --allow_changed_data to evaluate on "
            "these"
        )
    found = score(split)
    return record | {
        **found.record(),
        "correct": found.correct,
        "interval95": list(wilson_interval(found.accuracy, found.count)),
        "per_class": dict(zip(trained.info.class_names, found.per_class().tolist(), strict=True)),
        "confusion": found.confusion.tolist(),
    }


def _number_labels(split: Split, trained: TrainedModel) -> Split:
    """Return a split with labels that are numbers of the run's classes. It may have some of these,
    in any order.

    Raises:
      DataError: the split has other classes.
    """
    known, classes = trained.info.class_names, split.info.class_names
    if unknown := [name for name in classes if name not in known]:
        raise DataError(
            f"{trained.run.directory} was trained on {listed(known)}, and the data have "
            f"{listed(unknown)}"
        )
    numbers = np.array([known.index(name) for name in classes])
    return dataclasses.replace(split, labels=numbers[split.labels])


def _class_rows(record: dict[str, Any]) -> list[list[str]]:
    """Return the table of classes, with the wrong class that most images of each class are taken
    for.
    """
    class_names, rows = (
        list(record["per_class"]),
        [["class", "accuracy", "examples", "most often taken for"]],
    )
    for index, (name, accuracy) in enumerate(record["per_class"].items()):
        row = np.array(record["confusion"][index])
        total, row[index] = row.sum(), 0
        taken_for = f"{class_names[row.argmax()]} ({row.max()})" if row.any() else "-"
        rows.append(
            [
                printable(name),
                f"{100 * accuracy:.2f} %" if total else "-",
                f"{total:,}",
                printable(taken_for),
            ]
        )
    return rows


def _tabulate(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return the scores of sets, e.g. fog_1, in tables with means: {"fog": {"1": value, ...,
    "mean": value}, ...}.
    """
    corruptions, severities = (
        sorted({name.rsplit("_", 1)[part] for name in scores}) for part in (0, 1)
    )
    rows = {name: [name] for name in corruptions} | {"mean": corruptions}
    if len(published := [name for name in corruptions if name not in EXTRA]) == NUM_PUBLISHED:
        rows["mean without extra"] = published
    columns = {severity: [severity] for severity in severities} | {"mean": severities}

    def mean(key: str, row: str, column: str) -> float:
        return float(
            np.mean([getattr(scores[f"{c}_{s}"], key) for c in rows[row] for s in columns[column]])
        )

    tables = {
        key: {row: {column: mean(key, row, column) for column in columns} for row in rows}
        for key in TABULATED
    }
    return {"count": next(iter(scores.values())).count} | tables
