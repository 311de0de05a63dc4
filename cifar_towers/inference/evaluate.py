"""Scoring a run's checkpoint, on any machine."""

from pathlib import Path

from cifar_towers.cli.tool_configs import EvaluateConfig
from cifar_towers.data import sources
from cifar_towers.errors import DataError, UsageError, printable
from cifar_towers.evaluation.evaluator import make_evaluate_fn
from cifar_towers.evaluation.score import Score
from cifar_towers.files import run_files
from cifar_towers.inference import load_run
from cifar_towers.training import devices


def evaluate_checkpoint(config: EvaluateConfig) -> str:
    """What `evaluate.py` prints: a table, or with `--json` one object.

    Raises:
      UsageError: there is no such run, split or set of weights. DataError: the run's data cannot be had, or has other
        classes by now, or other images and it was not said that these shall be scored.
    """
    run = load_run.open_run(Path(config.train_dir), config.model, config.step)
    source = sources.find(config.dataset or run.facts["dataset"], config.data_dir)
    towers = devices.setup_towers(config)  # before anything else that uses TensorFlow
    _, dataset = sources.load(source, run.config.validation_examples, run.info.side)
    if "traits" in run.facts and dataset.info.class_names != run.info.class_names:
        raise DataError(
            f"{run.directory} was trained on {', '.join(run.info.class_names)}, and {dataset.name} has "
            f"{', '.join(dataset.info.class_names)} now; give it the data it knows"
        )
    split = getattr(dataset, config.split)
    if not len(split.labels):
        raise UsageError(f"{run.directory} held out no validation examples; score --split=test")
    changed = config.split in dataset.changed_splits(run.facts)
    if changed and not config.changed_data:
        raise DataError(
            f"{run.directory} was made with other {config.split} images than {dataset.name} has now; put those back, "
            "or give --changed_data to score these"
        )
    kind = run.choose_weights(config.weights)
    model = run.load(kind, devices.choose_precision(config.precision, towers))
    evaluate = make_evaluate_fn(model, towers, run.augmentation)
    score = evaluate(split, *load_run.variables_of(model), config.tta)
    told = {"train_dir": str(run.directory), "step": run.facts["step"], "dataset": dataset.name}
    told |= {"split": config.split, "changed_data": changed, "weights": kind, "tta": config.tta}
    return (_as_json if config.json else _as_table)(told, score[config.tta], dataset.info.class_names)


def _as_json(told: dict, score: Score, class_names) -> str:
    low, high = score.interval()
    numbers = {
        "count": score.count,
        "correct": score.correct,
        "accuracy": score.accuracy,
        "interval95": [low, high],
        "loss": score.loss,
        "per_class": dict(zip(class_names, score.per_class().tolist(), strict=True)),
        "confusion": score.confusion.tolist(),
    }
    return run_files.to_json(told | numbers)


def _as_table(told: dict, score: Score, class_names) -> str:
    low, high = score.interval()
    width = max(map(len, class_names))
    lines = [
        f"{told['train_dir']} at step {told['step']}: {told['dataset']} {told['split']}"
        f"{' (other images than it was made with)' * told['changed_data']}, {told['weights']} weights, "
        f"TTA {told['tta']}",
        f"accuracy {100 * score.accuracy:.2f} % ({score.correct:,} of {score.count:,}; 95 % interval {100 * low:.2f} "
        f"to {100 * high:.2f} %), loss {score.loss:.4f}",
        "",
        f"{'class':{width}}  accuracy  examples  most often taken for",
    ]
    for index, name in enumerate(class_names):
        row = score.confusion[index].copy()
        accuracy, total = score.per_class()[index], row.sum()
        row[index] = 0
        rival = f"{class_names[row.argmax()]} ({row.max()})" if row.any() else "-"
        lines.append(f"{name:{width}}  {100 * accuracy:6.2f} %  {total:8,}  {rival}")
    return "\n".join(map(printable, lines))
