"""Evaluation of a run's checkpoint, as a table or as JSON."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import devices, files
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split, split_validation
from cifar_towers.data.sources import Source
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.evaluation.score import NO_TEMPERATURE, Score, wilson_interval
from cifar_towers.inference.load_run import NOT_FINITE, TrainedRun, make_logits_fn, open_run
from cifar_towers.reporting.console import progress_bar
from cifar_towers.reporting.run_records import align_columns, format_number

TABULATED = ("accuracy", "loss", "ece")  # of each set of corrupted images
EXTRA = {"gaussian_blur", "saturate", "spatter", "speckle_noise"}  # corruptions that the published mean leaves out
NUM_PUBLISHED = 15  # corruptions in that mean; TFDS has other names for some


def evaluate_checkpoint(config: EvaluateConfig) -> str:
    """Evaluate a checkpoint and return the output of `evaluate.py`: a table, or one object with `--json`."""
    record = score_checkpoint(config)
    if config.json:
        return files.to_json(record)
    copies = record.get("copies_of_training_images")
    known = "" if copies is None else f": {copies} of {record['count']} images were trained on"
    changed = f" (another set than in training{known})" if record.get("changed_data") else ""
    lines = [
        f"{record['train_dir']} at step {record['step']}: {record['dataset']} {record['split']}{changed}, "
        f"{record['weights']} weights, TTA {record['tta']}, {record['precision']}"
    ]
    if isinstance(record["accuracy"], dict):
        lines.append(f"accuracy (%) on {record['count']:,} images by severity")
        columns = [*record["accuracy"]["mean"]]
        rows = [["corruption", *columns]]
        for name, row in record["accuracy"].items():
            rows.append([name, *(format_number(row.get(column), ".2f", 100) for column in columns)])
        return "\n".join([*map(printable, lines), "", align_columns(rows)])
    low, high = record["interval95"]
    temperatures, fitted_on, loss, ece = record["temperature_scaling"].values()
    of = "one half of the images" if len(temperatures) > 1 else fitted_on
    scaled = f"no temperature can be fitted on {of}: {NO_TEMPERATURE}"
    if loss is not None:
        values = " and ".join(f"{temperature:.4f}" for temperature in temperatures)
        scaled = f"with temperature {values}, fitted on {fitted_on}: NLL {loss:.4f}, ECE {ece:.4f}"
    lines += [
        f"accuracy {100 * record['accuracy']:.2f} % ({record['correct']:,} of {record['count']:,}; 95 % interval "
        f"{100 * low:.2f} to {100 * high:.2f} %), loss (NLL) {record['loss']:.4f}",
        f"calibration: ECE {record['ece']:.4f}; {scaled}",
    ]
    class_names, confusion = list(record["per_class"]), np.array(record["confusion"])
    rows = [["class", "accuracy", "examples", "most often taken for"]]
    for index, (name, accuracy) in enumerate(record["per_class"].items()):
        total, row = confusion[index].sum(), confusion[index]
        row[index] = 0
        taken_for = f"{class_names[row.argmax()]} ({row.max()})" if row.any() else "-"
        rows.append([printable(name), f"{100 * accuracy:.2f} %" if total else "-", f"{total:,}", printable(taken_for)])
    return "\n".join([*map(printable, lines), "", align_columns(rows, left=(0, 3))])


def score_checkpoint(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a checkpoint; return what was evaluated, and the score, as `--json` prints them.

    Raises:
      UsageError: there is no such run, split or set of weights. DataError: the run's data cannot be read, or
        differ from the data it was trained on; or logits are not finite.
    """
    run = open_run(Path(config.train_dir), config.model, config.step, config.tta)
    source = sources.find(config.dataset or run.metadata["dataset"], config.data_dir)
    weights = run.choose_weights(config.weights)
    towers = devices.setup_towers(config)  # before anything else that uses TensorFlow
    record = {"train_dir": str(run.directory), "step": run.metadata["step"], "dataset": source.name}
    precision = devices.choose_precision(config.precision, towers, run.metadata["precision"])
    record |= {"split": config.split, "weights": weights, "tta": config.tta, "precision": precision}
    first = slice(config.num_images or None)

    def read(name: str) -> Split:
        size, held_out = run.info.image_size, run.config.validation_examples
        if held_out and source.has_validation and name != "test" and source.name != run.metadata["dataset"]:
            left = split_validation(sources.load_split(source, "train", size), held_out)[0].digest
            held_out = held_out if left == run.metadata["train_sha256"] else 0  # 0: it is another set
        split = sources.load_split(source, name, size, held_out)
        return run.number_labels(split, source.name, may_differ=bool(config.dataset))

    def score(sets: Iterable[Split], number: int) -> Iterator[Score]:
        model, scored = run.load(weights, precision), 0
        with progress_bar("evaluating") as show:
            logits_of = make_logits_fn(run, model, towers, lambda done: show((scored + done) / number))
            for split in sets:  # read one at a time
                logits = logits_of(split.images, config.tta)
                if not np.isfinite(logits).all():
                    raise DataError(f"{run.directory} gives some images {NOT_FINITE}")
                yield Score(split.labels, logits)
                scored += 1

    if names := source.corruptions:
        if config.split != "test":
            raise UsageError(f"{source.name} has corrupted test images only; leave --split out")
        return record | _tabulate(names, score((read(name).take(first) for name in names), len(names)))
    whole = read(config.split)
    record["changed_data"] = _check_images(config, run, source, whole)
    split = whole.take(first)
    validation = run.own_split("validation", source) if config.split == "test" else None
    if validation and sources.count_copies(split, validation):
        validation = None  # a temperature that is fitted on an image is not reported on it
    train = run.own_split("train") if record["changed_data"] else None
    splits = [split, validation] if validation else [split]
    found, *held_out = score(splits, len(splits))
    return record | {
        "copies_of_training_images": sources.count_copies(split, train) if train else None,
        **found.record(*held_out),
        "correct": found.correct,
        "interval95": list(wilson_interval(found.accuracy, found.count)),
        "per_class": dict(zip(run.info.class_names, found.per_class().tolist(), strict=True)),
        "confusion": found.confusion.tolist(),
    }


def _tabulate(names: Sequence[str], scores: Iterable[Score]) -> dict[str, Any]:
    """Return the scores of sets, as fog_1, in tables with means: {"fog": {"1": value, ..., "mean": value}, ...}."""
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


def _check_images(config: EvaluateConfig, run: TrainedRun, source: Source, split: Split) -> bool:
    """Return whether the images of a split differ from those of the run.

    Raises:
      DataError, UsageError: the split is empty, or differs and the user did not name another data set or permit it.
    """
    if not len(split.labels):
        raise UsageError(f"{run.directory} held out no validation examples; give --split=test")
    is_changed = run.metadata.get(f"{config.split}_sha256") != split.digest
    is_refused = is_changed and not config.allow_changed_data
    if is_refused and source.name == run.metadata["dataset"]:  # also if it is named by --dataset
        raise DataError(
            f"{run.directory} was made with other {config.split} images than {source.name} has now; restore them, "
            "or give --allow_changed_data to evaluate on these"
        )
    if is_refused and not source.has_test:
        raise DataError(
            f"{source.name} has no test split and is not the data of {run.directory}; give it a test split, or score "
            "a fifth of its images with --allow_changed_data"
        )
    return is_changed
