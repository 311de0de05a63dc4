"""Evaluation of a run's checkpoint, as a table or as JSON."""

from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import devices, files
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.data.sources import Source
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.evaluation.evaluator import make_classify_fn, make_evaluate_fn
from cifar_towers.evaluation.score import NO_TEMPERATURE, scale_temperature
from cifar_towers.inference.load_run import TrainedRun, model_variables, open_run
from cifar_towers.reporting.console import progress_bar
from cifar_towers.reporting.run_records import align_columns


def evaluate_checkpoint(config: EvaluateConfig) -> str:
    """Evaluate a checkpoint and return the output of `evaluate.py`: a table, or one object with `--json`."""
    record = score_checkpoint(config)
    return files.to_json(record) if config.json else _as_table(record)


def score_checkpoint(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a checkpoint; return what was evaluated, and the score, as `--json` prints them.

    Raises:
      UsageError: there is no such run, split or set of weights. DataError: the run's data cannot be read, or
        differ from the data it was trained on.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    source = sources.find(config.dataset or run.metadata["dataset"], config.data_dir)
    weights = run.choose_weights(config.weights)
    towers = devices.setup_towers(config)  # before anything else that uses TensorFlow
    if config.split == "test":
        split = sources.load_test(source, run.info.image_size)
    else:
        _, dataset = sources.load(source, run.config.validation_examples, run.info.image_size)
        split = getattr(dataset, config.split)
    split = run.number_labels(split, source.name, may_differ=bool(config.dataset))
    is_changed = _check_images(config, run, source, split)
    validation = run.own_split("validation", source) if config.split == "test" else None
    train = run.own_split("train") if is_changed else None
    model = run.load(weights, devices.choose_precision(config.precision, towers))
    with progress_bar("evaluating") as show:
        evaluate = make_evaluate_fn(make_classify_fn(model, towers, run.augmentation, on_progress=show))
        splits = [split, validation] if validation else [split]
        score, *held_out = (evaluate(each, *model_variables(model), config.tta)[config.tta] for each in splits)
    return {
        "train_dir": str(run.directory),
        "step": run.metadata["step"],
        "dataset": source.name,
        "split": config.split,
        "changed_data": is_changed,
        "copies_of_training_images": sources.count_copies(split, train) if train else None,
        "weights": weights,
        "tta": config.tta,
        "count": score.count,
        "correct": score.correct,
        "accuracy": score.accuracy,
        "interval95": list(score.interval()),
        "loss": score.loss,
        "ece": score.ece,
        "reliability": score.reliability.tolist(),
        "temperature_scaling": scale_temperature(score, *held_out),
        "per_class": dict(zip(run.info.class_names, score.per_class().tolist(), strict=True)),
        "confusion": score.confusion.tolist(),
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
    if is_refused and not config.dataset:
        raise DataError(
            f"{run.directory} was made with other {config.split} images than {source.name} has now; restore them, "
            "or give --allow_changed_data to evaluate on these"
        )
    if is_refused and source.how_to_score_all and source.name != run.metadata["dataset"]:
        raise DataError(
            f"{source.name} has no test split and is not the data of {run.directory}; to score all of its images, "
            f"{source.how_to_score_all}; to score a fifth of them, give --allow_changed_data"
        )
    return is_changed


def _describe_scaling(record: dict[str, Any]) -> str:
    temperatures, fitted_on, loss, ece = record["temperature_scaling"].values()
    if loss is None:
        return f"no temperature fits, as {NO_TEMPERATURE}"
    values = " and ".join(f"{temperature:.4f}" for temperature in temperatures)
    return f"with temperature {values}, fitted on {fitted_on}: NLL {loss:.4f}, ECE {ece:.4f}"


def _as_table(record: dict[str, Any]) -> str:
    low, high = record["interval95"]
    copies = record["copies_of_training_images"]
    known = "" if copies is None else f": {copies} of {record['count']} images were trained on"
    changed = f" (another set than in training{known})" if record["changed_data"] else ""
    lines = [
        f"{record['train_dir']} at step {record['step']}: {record['dataset']} {record['split']}{changed}, "
        f"{record['weights']} weights, TTA {record['tta']}",
        f"accuracy {100 * record['accuracy']:.2f} % ({record['correct']:,} of {record['count']:,}; 95 % interval "
        f"{100 * low:.2f} to {100 * high:.2f} %), loss {record['loss']:.4f}",
        f"calibration: NLL {record['loss']:.4f} (the loss), ECE {record['ece']:.4f}; {_describe_scaling(record)}",
        "",
    ]
    class_names, confusion = list(record["per_class"]), np.array(record["confusion"])
    rows = [["class", "accuracy", "examples", "most often taken for"]]
    for index, (name, accuracy) in enumerate(record["per_class"].items()):
        total, row = confusion[index].sum(), confusion[index]
        row[index] = 0
        taken_for = f"{class_names[row.argmax()]} ({row.max()})" if row.any() else "-"
        rows.append([printable(name), f"{100 * accuracy:.2f} %" if total else "-", f"{total:,}", printable(taken_for)])
    return "\n".join([*map(printable, lines), align_columns(rows, left=(0, 3))])
