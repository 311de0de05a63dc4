"""Evaluation of a run's checkpoint, and its text."""

import dataclasses
from typing import Any

import numpy as np

from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, UsageError, listed, printable
from cifar_towers.evaluation.score import Score, describe_tta, wilson_interval
from cifar_towers.inference.predict import TrainedModel
from cifar_towers.reporting.records import align_columns


def evaluate_checkpoint(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a checkpoint; return what was evaluated, and the score.

    Raises:
      UsageError: there is no such run, split or set of weights. DataError: the run's data cannot be
        read, or differ from the data it was trained on; or logits are not finite.
    """
    trained = TrainedModel(config)
    trained_on = trained.metadata["dataset"]
    source = sources.find(config.dataset or trained_on, config.data_dir)
    split = sources.load_split(
        source, config.split, trained.info.image_size, trained.config.validation_examples
    )
    split = _number_labels(split, trained)
    if not len(split.labels):
        raise UsageError(f"{source.name} has no {config.split} examples; give another --split")

    changed_data = trained.metadata.get(f"{config.split}_sha256") != split.digest
    if changed_data and source.name == trained_on and not config.allow_changed_data:
        raise DataError(
            f"{trained.run.directory} was made with other {config.split} images than "
            f"{source.name} has now; restore them, or give --allow_changed_data to evaluate on "
            "these"
        )

    split = split.take(slice(config.num_images or None))
    score = Score(split.labels, trained.logits(split.images, config.tta))
    return {
        "train_dir": str(trained.run.directory),
        "step": trained.metadata["step"],
        "dataset": source.name,
        "split": config.split,
        "weights": trained.weights,
        "tta": config.tta,
        "precision": trained.precision,
        "changed_data": changed_data,
        **score.record(),
        "correct": score.correct,
        "interval95": list(wilson_interval(score.accuracy, score.count)),
        "per_class": dict(zip(trained.info.class_names, score.per_class().tolist(), strict=True)),
        "confusion": score.confusion.tolist(),
    }


def _number_labels(split: Split, trained: TrainedModel) -> Split:
    """Return a split with labels that are numbers of the run's classes. It may have some of these,
    in any order.

    Raises:
      DataError: the split has other classes.
    """
    known = trained.info.class_names
    classes = split.info.class_names
    unknown = [name for name in classes if name not in known]
    if unknown:
        raise DataError(
            f"{trained.run.directory} was trained on {listed(known)}, and the data have "
            f"{listed(unknown)}"
        )
    numbers = np.array([known.index(name) for name in classes])
    return dataclasses.replace(split, labels=numbers[split.labels])


def format_evaluation(record: dict[str, Any]) -> str:
    """Return what `evaluate_checkpoint` returned as lines and a table of the classes."""
    changed = " (other data than in training)" if record["changed_data"] else ""
    lines = [
        f"{record['train_dir']} at step {record['step']}: {record['dataset']} "
        f"{record['split']}{changed}, {record['weights']} weights, {describe_tta(record['tta'])}, "
        f"{record['precision']}"
    ]
    low, high = record["interval95"]
    lines.append(
        f"accuracy {100 * record['accuracy']:.2f} % ({record['correct']:,} of "
        f"{record['count']:,}; 95 % interval {100 * low:.2f} to {100 * high:.2f} %), loss "
        f"(NLL) {record['loss']:.4f}, ECE {record['ece']:.4f}"
    )
    table = align_columns(_class_rows(record), left=(0, 3))
    return "\n".join([*map(printable, lines), "", table])


def _class_rows(record: dict[str, Any]) -> list[list[str]]:
    """Return the table of classes, with the wrong class that most images of each class are taken
    for.
    """
    class_names = list(record["per_class"])
    rows = [["class", "accuracy", "examples", "most often taken for"]]
    for index, (name, accuracy) in enumerate(record["per_class"].items()):
        row = np.array(record["confusion"][index])
        total = row.sum()
        percent = f"{100 * accuracy:.2f} %" if total else "-"

        row[index] = 0
        taken_for = f"{class_names[row.argmax()]} ({row.max()})" if row.any() else "-"
        rows.append([printable(name), percent, f"{total:,}", printable(taken_for)])
    return rows
