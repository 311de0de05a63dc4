"""Scoring a run's newest checkpoint, on any machine."""

import dataclasses
import json
from pathlib import Path

import tensorflow as tf

from cifar_towers.config import EvaluateConfig, TrainConfig
from cifar_towers.data import sources
from cifar_towers.errors import UsageError
from cifar_towers.evaluation import Score, make_evaluator
from cifar_towers.reporting import records
from cifar_towers.training import checkpoints, setup


def evaluate_checkpoint(config: EvaluateConfig) -> str:
    """What `evaluate.py` prints: a table, or with `--json` one object.

    Raises:
      UsageError: there is no such run, split or set of weights. DataError: the run's data cannot be had.
    """
    train_dir = Path(config.train_dir)
    checkpoint, trained = _open_run(train_dir)
    facts = checkpoints.read_facts(checkpoint)
    source = sources.find(facts["dataset"], config.data_dir)
    towers = setup.open_towers(config)  # before anything else that uses TensorFlow
    _, dataset = sources.load(source, trained.validation_examples)
    split = getattr(dataset, config.split)
    if not len(split.labels):
        raise UsageError(f"{train_dir} held out no validation examples; score --split=test")
    model = setup.make_model(trained, setup.choose_precision(config.precision, towers))
    kind = _choose_weights(config.weights, trained, train_dir)
    weights, statistics = (
        checkpoints.read_values(checkpoint, [f"{'ema' if kind == 'ema' else 'model'}.{_dotted(v)}" for v in variables])
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    evaluate = make_evaluator(model, towers, setup.make_augmentation(trained))
    score = evaluate(split, [tf.constant(w) for w in weights], [tf.constant(s) for s in statistics], config.tta)
    told = {"train_dir": str(train_dir), "step": facts["step"], "dataset": facts["dataset"], "split": config.split}
    told |= {"weights": kind, "tta": config.tta}
    return (_as_json if config.json else _as_table)(told, score[config.tta], dataset.class_names)


def _open_run(train_dir: Path) -> tuple[Path, TrainConfig]:
    checkpoint = checkpoints.newest(train_dir)
    if not checkpoint:
        raise UsageError(f"no checkpoint in {train_dir}; runs that have some stand in runs/ as a rule")
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    try:
        settings = records.read_json(train_dir / "config.json")
    except (OSError, ValueError) as error:
        raise UsageError(f"{train_dir / 'config.json'}, which says what was trained, cannot be read: {error}") from None
    return checkpoint, TrainConfig(**{name: value for name, value in settings.items() if name in known})


def _choose_weights(asked: str, trained: TrainConfig, train_dir: Path) -> str:
    if asked == "ema" and not trained.ema_decay:
        raise UsageError(f"{train_dir} kept no moving average of its weights; score --weights=raw")
    if asked == "auto":
        return "ema" if trained.ema_decay else "raw"
    return asked


def _dotted(variable) -> str:
    return variable.path.replace("/", ".")


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
    return json.dumps(told | numbers)


def _as_table(told: dict, score: Score, class_names) -> str:
    low, high = score.interval()
    width = max(map(len, class_names))
    lines = [
        f"{told['train_dir']} at step {told['step']}: {told['dataset']} {told['split']}, {told['weights']} weights, "
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
    return "\n".join(lines)
