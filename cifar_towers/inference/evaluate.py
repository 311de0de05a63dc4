"""Evaluation of a run's checkpoint, as a table or as JSON."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import files
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.evaluation.score import Score, wilson_interval
from cifar_towers.hardware import choose_precision
from cifar_towers.inference.load_run import make_logits_fn, open_run
from cifar_towers.reporting.console import progress_bar
from cifar_towers.reporting.run_records import align_columns, format_number
from cifar_towers.training.build import setup_towers

TABULATED = ("accuracy", "loss", "ece")  # of each set of corrupted images
EXTRA = {"gaussian_blur", "saturate", "spatter", "speckle_noise"}  # corruptions that the published mean leaves out
NUM_PUBLISHED = 15  # corruptions in that mean; TFDS has other names for some


def evaluate_checkpoint(config: EvaluateConfig) -> str:
    """Evaluate a checkpoint and return the output of the program: a table, or one object with `--json`."""
    record = score_checkpoint(config)
    if config.json:
        return files.to_json(record)
    changed = " (another set than in training)" if record.get("changed_data") else ""
    lines = [
        f"{record['train_dir']} at step {record['step']}: {record['dataset']} {record['split']}{changed}, "
        f"{record['weights']} weights, TTA {record['tta']}, {record['precision']}"
    ]
    if "per_class" in record:
        low, high = record["interval95"]
        lines.append(
            f"accuracy {100 * record['accuracy']:.2f} % ({record['correct']:,} of {record['count']:,}; 95 % interval "
            f"{100 * low:.2f} to {100 * high:.2f} %), loss (NLL) {record['loss']:.4f}, ECE {record['ece']:.4f}"
        )
        rows = _class_rows(record)
    else:
        lines.append(f"accuracy (%) on {record['count']:,} images by severity")
        columns = [*record["accuracy"]["mean"]]
        rows = [["corruption", *columns]]
        for name, row in record["accuracy"].items():
            rows.append([name, *(format_number(row.get(column), ".2f", 100) for column in columns)])
    return "\n".join([*map(printable, lines), "", align_columns(rows, left=(0, 3) if "per_class" in record else (0,))])


def score_checkpoint(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a checkpoint; return what was evaluated, and the score, as `--json` prints them.

    Raises:
      UsageError: there is no such run, split or set of weights. DataError: the run's data cannot be read, or
        differ from the data it was trained on; or logits are not finite.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    source = sources.find(config.dataset or run.metadata["dataset"], config.data_dir)
    weights = run.choose_weights(config.weights)
    towers = setup_towers(config)  # before anything else that uses TensorFlow
    precision = choose_precision(config.precision, towers[0].device, run.metadata["facts"]["precision"])
    record = {"train_dir": str(run.directory), "step": run.metadata["step"], "dataset": source.name}
    record |= {"split": config.split, "weights": weights, "tta": config.tta, "precision": precision}
    first = slice(config.num_images or None)

    def read(name: str) -> Split:
        split = sources.load_split(source, name, run.info.image_size, run.config.validation_examples)
        return run.number_labels(split)

    def score(splits: Iterable[Split], number: int = 1) -> Iterator[Score]:
        model, scored = run.load(weights, precision), 0
        with progress_bar("evaluating") as show:
            logits_of = make_logits_fn(run, model, towers, lambda done: show((scored + done) / number))
            for split in splits:  # read one at a time
                yield Score(split.labels, logits_of(split.images, config.tta))
                scored += 1

    if names := source.corruptions:
        if config.split != "test":
            raise UsageError(f"{source.name} has corrupted test images only; leave --split out")
        return record | _tabulate(names, score((read(name).take(first) for name in names), len(names)))
    whole = read(config.split)
    if not len(whole.labels):
        raise UsageError(f"{source.name} has no {config.split} examples; give another --split")
    record["changed_data"] = run.metadata.get(f"{config.split}_sha256") != whole.digest
    if record["changed_data"] and source.name == run.metadata["dataset"] and not config.allow_changed_data:
        raise DataError(
            f"{run.directory} was made with other {config.split} images than {source.name} has now; restore them, "
            "or give --allow_changed_data to evaluate on these"
        )
    (found,) = score([whole.take(first)])
    return record | {
        **found.record(),
        "correct": found.correct,
        "interval95": list(wilson_interval(found.accuracy, found.count)),
        "per_class": dict(zip(run.info.class_names, found.per_class().tolist(), strict=True)),
        "confusion": found.confusion.tolist(),
    }


def _class_rows(record: dict[str, Any]) -> list[list[str]]:
    """Return the table of classes, with the wrong class that most images of each class are taken for."""
    class_names, rows = list(record["per_class"]), [["class", "accuracy", "examples", "most often taken for"]]
    for index, (name, accuracy) in enumerate(record["per_class"].items()):
        row = np.array(record["confusion"][index])
        total, row[index] = row.sum(), 0
        taken_for = f"{class_names[row.argmax()]} ({row.max()})" if row.any() else "-"
        rows.append([printable(name), f"{100 * accuracy:.2f} %" if total else "-", f"{total:,}", printable(taken_for)])
    return rows


def _tabulate(names: Sequence[str], scores: Iterable[Score]) -> dict[str, Any]:
    """Return the scores of sets, e.g. fog_1, in tables with means: {"fog": {"1": value, ..., "mean": value}, ...}."""
    tables: dict[str, dict[str, dict[str, list[float]]]] = {key: {} for key in TABULATED}
    has_published_mean = len({name.rsplit("_", 1)[0] for name in names} - EXTRA) == NUM_PUBLISHED
    for name, score in zip(names, scores, strict=True):
        corruption, severity = name.rsplit("_", 1)
        means = ["mean", "mean without extra"] if has_published_mean and corruption not in EXTRA else ["mean"]
        for key, row, column in itertools.product(TABULATED, [corruption, *means], [severity, "mean"]):
            tables[key].setdefault(row, {}).setdefault(column, []).append(getattr(score, key))
    rows = sorted(tables["accuracy"], key=lambda row: (row.startswith("mean"), row))
    return {"count": score.count} | {
        key: {row: {column: float(np.mean(table[row][column])) for column in sorted(table[row])} for row in rows}
        for key, table in tables.items()
    }
