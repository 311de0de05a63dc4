"""Evaluation of a run's checkpoint, as a table or as JSON."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar_towers import devices, files
from cifar_towers.config.programs import EvaluateConfig
from cifar_towers.data import corruptions, sources
from cifar_towers.data.dataset import Split
from cifar_towers.data.sources import Source
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.evaluation.evaluator import make_classify_fn, make_evaluate_fn
from cifar_towers.evaluation.score import NO_TEMPERATURE, Score, scale_temperature
from cifar_towers.inference.load_run import TrainedRun, model_variables, open_run
from cifar_towers.reporting.console import progress_bar
from cifar_towers.reporting.run_records import align_columns
from cifar_towers.towers import Tower

TABULATED = ("accuracy", "loss", "ece")  # of each set of corrupted images
EXTRA = ("gaussian_blur", "saturate", "spatter", "speckle_noise")  # corruptions that the published mean leaves out


def evaluate_checkpoint(config: EvaluateConfig) -> str:
    """Evaluate a checkpoint and return the output of `evaluate.py`: a table, or one object with `--json`."""
    record = score_checkpoint(config)
    table = _as_table if "confusion" in record else _corruption_table
    return files.to_json(record) if config.json else table(record)


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
    origin = {"train_dir": str(run.directory), "step": run.metadata["step"], "dataset": source.name}
    record = {**origin, "split": config.split, "weights": weights, "tta": config.tta}
    if source.corruptions or config.corruptions:
        return record | _score_corruptions(config, run, source, weights, towers)
    split = _read_split(config, run, source, config.split)
    is_changed = _check_images(config, run, source, split)
    validation = run.own_split("validation", source) if config.split == "test" else None
    train = run.own_split("train") if is_changed else None
    split = split.take(slice(config.num_images or None))
    model = run.load(weights, devices.choose_precision(config.precision, towers))
    with progress_bar("evaluating") as show:
        evaluate = make_evaluate_fn(make_classify_fn(model, towers, run.augmentation, on_progress=show))
        splits = [split, validation] if validation else [split]
        score, *held_out = (evaluate(each, *model_variables(model), config.tta)[config.tta] for each in splits)
    return record | {
        "changed_data": is_changed,
        "copies_of_training_images": sources.count_copies(split, train) if train else None,
        "count": score.count,
        "correct": score.correct,
        "accuracy": score.accuracy,
        "interval95": list(score.interval()),
        "loss": score.loss,
        "ece": score.ece,
        "reliability": score.reliability.tolist(),
        "temperature_scaling": scale_temperature(score, *held_out),
        **({} if split.votes is None else {"people": _compare_to_people(score, split.votes)}),
        "per_class": dict(zip(run.info.class_names, score.per_class().tolist(), strict=True)),
        "confusion": score.confusion.tolist(),
    }


def _read_split(config: EvaluateConfig, run: TrainedRun, source: Source, name: str) -> Split:
    if name in ("train", "validation"):
        _, dataset = sources.load(source, run.config.validation_examples, run.info.image_size)
        split = getattr(dataset, name)
    else:
        split = sources.load_test(source, run.info.image_size, name)
    return run.number_labels(split, source.name, may_differ=bool(config.dataset))


def _score_corruptions(
    config: EvaluateConfig, run: TrainedRun, source: Source, weights: str, towers: Sequence[Tower]
) -> dict[str, Any]:
    """Return the scores of sets of corrupted images, of which one at a time is in memory, as tables with means."""
    names, own = source.corruptions, None
    if names and (config.corruptions or config.split != "test"):
        raise UsageError(f"{source.name} has corrupted test images only; leave --corruptions and --split out")
    if not names:
        names, own = corruptions.match(config.corruptions), _read_split(config, run, source, config.split)
        _check_images(config, run, source, own)
    model = run.load(weights, devices.choose_precision(config.precision, towers))
    scores: dict[str, dict[str, float]] = {}
    with progress_bar("evaluating") as show:
        classify = make_classify_fn(
            model, towers, run.augmentation, on_progress=lambda done: show((len(scores) + done) / len(names))
        )
        for name in names:
            split = (own or _read_split(config, run, source, name)).take(slice(config.num_images or None))
            if own:
                split = dataclasses.replace(split, images=corruptions.corrupt(split.images, name))
            score = make_evaluate_fn(classify)(split, *model_variables(model), config.tta)[config.tta]
            scores[name] = {key: getattr(score, key) for key in TABULATED}
    images = "computed here, not the published files" if own else "of the data set"
    return {"corruptions": images, "count": score.count, **{key: _tabulate(scores, key) for key in TABULATED}}


def _tabulate(scores: Mapping[str, dict[str, float]], key: str) -> dict[str, dict[str, float]]:
    """Return a value of the scores of sets, as fog_1, and its means: {"fog": {"1": value, ..., "mean": value}, ...}."""
    table: dict[str, dict[str, list[float]]] = {}
    for name, score in scores.items():
        corruption, severity = name.rsplit("_", 1)
        means = ["mean"] if corruption in EXTRA else ["mean", "mean without extra"]
        for row, column in itertools.product([corruption, *means], [severity, "mean"]):
            table.setdefault(row, {}).setdefault(column, []).append(score[key])
    rows = sorted(table, key=lambda row: (row.startswith("mean"), row))
    return {row: {column: float(np.mean(table[row][column])) for column in sorted(table[row])} for row in rows}


def _compare_to_people(score: Score, votes: np.ndarray) -> dict[str, float]:
    """Compare predictions to people's votes [n, C]: to the class with most votes, and by cross entropies (nats)."""
    labels = (votes + 1e-6 * np.eye(votes.shape[1])[score.labels]).argmax(1)  # a tie is decided by the data set's label
    smallest = np.finfo(np.float32).tiny
    return {
        "accuracy": float((score.logits.argmax(1) == labels).mean()),
        "loss": float(-(votes * np.log(score.probabilities.clip(smallest))).sum(1).mean()),
        "entropy": float(-(votes * np.log(votes.clip(smallest))).sum(1).mean()),
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
    ]
    if people := record.get("people"):
        accuracy, loss = f"{100 * people['accuracy']:.2f} % for the class with most votes", f"{people['loss']:.4f}"
        lines.append(f"people's votes: accuracy {accuracy}, cross entropy {loss}, at least {people['entropy']:.4f}")
    class_names, confusion = list(record["per_class"]), np.array(record["confusion"])
    rows = [["class", "accuracy", "examples", "most often taken for"]]
    for index, (name, accuracy) in enumerate(record["per_class"].items()):
        total, row = confusion[index].sum(), confusion[index]
        row[index] = 0
        taken_for = f"{class_names[row.argmax()]} ({row.max()})" if row.any() else "-"
        rows.append([printable(name), f"{100 * accuracy:.2f} %" if total else "-", f"{total:,}", printable(taken_for)])
    return "\n".join([*map(printable, lines), "", align_columns(rows, left=(0, 3))])


def _corruption_table(record: dict[str, Any]) -> str:
    title = (
        f"{record['train_dir']} at step {record['step']}: {record['dataset']} {record['split']}, "
        f"{record['weights']} weights, TTA {record['tta']}"
    )
    what = f"accuracy (%) on {record['count']:,} images by severity; corruptions {record['corruptions']}"
    columns = [*record["accuracy"]["mean"]]
    rows = [["corruption", *columns]]
    for name, row in record["accuracy"].items():
        rows.append([name, *(f"{100 * row[column]:.2f}" if column in row else "-" for column in columns)])
    return "\n".join([printable(title), what, "", align_columns(rows)])
