"""A trained run: its model, rebuilt from its settings, with the weights of one of its checkpoints.

Nothing in a run's directory is executed. A model of the user's own is made by the function that the user names.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import find_checkpoint, read_checkpoint
from cifar_towers.config import TrainConfig
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.dataset import DatasetInfo, Split
from cifar_towers.errors import DataError, UsageError, listed
from cifar_towers.evaluation.evaluator import make_classify_fn
from cifar_towers.towers import Tower
from cifar_towers.towers.keras_parallel import variable_values
from cifar_towers.training import build


class TrainedRun(NamedTuple):
    """A run's settings and one of its checkpoints."""

    directory: Path
    config: TrainConfig
    values: dict[str, np.ndarray]  # all variables of the checkpoint by name
    metadata: dict[str, Any]  # saved with the checkpoint: `step`, `dataset` and more
    info: DatasetInfo

    @property
    def augmentation(self) -> Augmentation:
        """The preprocessing of the model's images."""
        return build.make_augmentation(self.config, self.info)

    def choose_weights(self, weights: str) -> str:
        """Return `raw` or `ema`: `auto` is `ema` if the run has a moving average of its weights, otherwise `raw`.

        Raises:
          UsageError: `ema` was asked for and the run has no moving average.
        """
        if weights == "ema" and not self.config.ema_decay:
            raise UsageError(f"{self.directory} has no moving average of its weights; give --weights=raw")
        if weights == "auto":
            return "ema" if self.config.ema_decay else "raw"
        return weights

    def number_labels(self, split: Split) -> Split:
        """Return a split with labels that are numbers of the run's classes. It may have some of these, in any order.

        Raises:
          DataError: the split has other classes.
        """
        known, classes = self.info.class_names, split.info.class_names
        if unknown := [name for name in classes if name not in known]:
            raise DataError(f"{self.directory} was trained on {listed(known)}, and the data have {listed(unknown)}")
        numbers = np.array([known.index(name) for name in classes])
        return dataclasses.replace(split, labels=numbers[split.labels])

    def load(self, weights: str, precision: str) -> keras.Model:
        """Make the model, with its `raw` or `ema` weights.

        Raises:
          UsageError: the function that made the model now makes another model.
        """
        model = build.make_model(self.config, precision, self.info)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        prefix = "ema" if weights == "ema" else "model"
        for variable in variables:
            name = f"{prefix}.{variable.path.replace('/', '.')}"
            value = self.values.get(name)
            if value is None or value.shape != tuple(variable.shape):
                raise UsageError(
                    f"{self.directory} has no {name} of shape {tuple(variable.shape)}; give its own --model"
                )
            variable.assign(value)
        return model


def open_run(train_dir: Path, model: str = "", step: int = 0) -> TrainedRun:
    """Open the checkpoint of a step, or the newest one, of a run with the user's own `model` if it has one.

    Raises:
      UsageError: there is no such run or checkpoint, or the run has another model. DataError: the checkpoint is
        damaged, or another version of this project wrote the run.
    """
    checkpoint = find_checkpoint(train_dir, step)
    try:
        config = TrainConfig(**files.read_json(train_dir / files.CONFIG))
    except TypeError as error:
        raise DataError(f"{train_dir} was written by another version of cifar_towers ({error}); train again") from None
    if config.user_model and not model:
        raise UsageError(
            f"{train_dir} has a model of your own, code that must be executed; if you trust it, give "
            f"--model={config.model}, or the path where it is now"
        )
    if not config.user_model and model not in ("", config.model):
        raise UsageError(f"{train_dir} was trained with --model={config.model}; leave --model out")
    config = dataclasses.replace(config, model=model or config.model)
    values, metadata = read_checkpoint(checkpoint)
    return TrainedRun(train_dir, config, values, metadata, DatasetInfo.from_json(metadata["dataset_info"]))


def make_logits_fn(
    run: TrainedRun, model: keras.Model, towers: Sequence[Tower], on_progress: Callable[[float], None] | None = None
) -> Callable[..., np.ndarray]:
    """Return a function (uint8 images [n, S, S, 3], level of TTA, by default 0) -> logits [n, C].

    The function raises a DataError if a logit is not finite: the class would be a number that means nothing.
    """
    classify = make_classify_fn(model, towers, run.augmentation, on_progress=on_progress)
    weights, non_trainable = variable_values(model)

    def logits_of(images: np.ndarray, tta: int = 0) -> np.ndarray:
        logits = classify(images, weights, non_trainable, tta)[1]
        if not np.isfinite(logits).all():
            raise DataError(f"{run.directory} gives some images logits that are not finite")
        return logits

    return logits_of
