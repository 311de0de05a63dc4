"""A trained run: its model, rebuilt from its settings, with the weights of one of its checkpoints.

Nothing in a run's directory is executed. A model of the user's own is made by the function that the user names.
"""

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import keras
import numpy as np

from cifar_towers import files
from cifar_towers.checkpointing.checkpoint import find_checkpoint, read_metadata, read_variables
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.dataset import DatasetInfo, Split
from cifar_towers.errors import DataError, RunError, UsageError, error_text, listed
from cifar_towers.evaluation.evaluator import make_classify_fn
from cifar_towers.towers import Tower
from cifar_towers.towers.keras_parallel import variable_values
from cifar_towers.training import build
from cifar_towers.user_code import split_function

NOT_FINITE = "logits that are not finite; if the precision is not float32, give --precision=float32"  # end of a message
DEVICE_GROUPS = ("Towers", "Cluster")  # settings of how a run was trained, which its use does not depend on


class TrainedRun(NamedTuple):
    """A run's settings and one of its checkpoints."""

    directory: Path
    checkpoint: Path
    config: TrainConfig
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

    def number_labels(self, split: Split, dataset: str, may_differ: bool) -> Split:
        """Return a split of a data set with labels that are numbers of the run's classes.

        If the split `may_differ`, it may have some of these classes only, in any order.

        Raises:
          DataError: the split has other classes.
        """
        known, classes = ([normalize("NFC", name) for name in info.class_names] for info in (self.info, split.info))
        unknown = [name for name in classes if name not in known]
        if unknown or (classes != known and not may_differ):
            advice = "restore the data, or give a data set with classes of the run only by --dataset"
            has = f"{dataset} now has {listed(unknown or classes)}"
            raise DataError(f"{self.directory} was trained on {listed(known)}, and {has}; {advice}")
        numbers = np.array([known.index(name) for name in classes])
        return dataclasses.replace(split, labels=numbers[split.labels])

    def own_split(self, name: str, *others: sources.Source) -> Split | None:
        """Return a split that the run was made with, from its data set or from others; None if no source has it."""
        dataset, digest = self.metadata["dataset"], self.metadata.get(f"{name}_sha256")
        own = [None] if sources.is_local(dataset) else []
        for source in (*own, *others) if digest else ():
            with contextlib.suppress(RunError):
                source, held_out = source or sources.find(dataset), self.config.validation_examples
                split = sources.load_split(source, name, self.info.image_size, held_out)
                if split.digest == digest:
                    return split
        return None

    def load(self, weights: str, precision: str) -> keras.Model:
        """Make the model, with its `raw` or `ema` weights.

        Raises:
          UsageError: the function that made the model is missing or makes another model. DataError: the checkpoint is
            damaged.
        """
        model = build.make_model(self.config, precision, self.info)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        prefix = "ema" if weights == "ema" else "model"
        names = [f"{prefix}.{variable.path.replace('/', '.')}" for variable in variables]
        for variable, value in zip(variables, read_variables(self.checkpoint, names).values(), strict=True):
            if variable.shape != value.shape:
                raise UsageError(
                    f"{self.checkpoint} has {variable.path} of shape {value.shape}, and model={self.config.model} now "
                    f"makes it of shape {tuple(variable.shape)}; restore the model that was trained"
                )
            variable.assign(value)
        return model


def open_run(train_dir: Path, model: str = "", step: int = 0, tta: int = 0) -> TrainedRun:
    """Open the checkpoint of a step, or the newest undamaged one, of a run with the user's own `model` if it has one.

    Warn if the run is not finished, or was continued since.

    Raises:
      UsageError: there is no such run or checkpoint, it has another model, or was trained without the mirrored images
        of `tta`. DataError: the settings or the checkpoint, or all checkpoints, are damaged.
    """
    checkpoint = find_checkpoint(train_dir, step)
    config = _read_config(train_dir / files.CONFIG)
    _check_model(config, model, train_dir)
    if tta and config.flip == "none" and not config.augment:  # a function of the user's may mirror
        mirrors = f"tta={tta} averages over mirrored images"
        raise UsageError(f"{mirrors}, and {train_dir} was trained without them, by flip=none; give --tta=0")
    config = dataclasses.replace(config, model=model or config.model)
    metadata = read_metadata(checkpoint)
    step, last_step, finished_step = metadata["step"], metadata.get("last_step", 0), -1
    with contextlib.suppress(DataError):  # of a damaged result
        finished_step = files.read_json_if_any(train_dir / files.RESULT).get("step", -1)
    if finished_step < step < last_step:
        logging.getLogger(__name__).warning(f"{train_dir} is not finished: step {step} of {last_step}")
    return TrainedRun(train_dir, checkpoint, config, metadata, DatasetInfo.from_json(metadata["dataset_info"]))


def make_logits_fn(
    run: TrainedRun, model: keras.Model, towers: Sequence[Tower], on_progress: Callable[[float], None] | None = None
) -> Callable[..., np.ndarray]:
    """Return a function (levels [n, S, S, 3], level of TTA, by default 0) -> logits [n, C]."""
    classify = make_classify_fn(model, towers, run.augmentation, on_progress=on_progress)
    weights, non_trainable = variable_values(model)
    return lambda images, tta=0: classify(images, weights, non_trainable, tta)[1]


def _read_config(path: Path) -> TrainConfig:
    fields = dataclasses.fields(TrainConfig)
    names = {field.name for field in fields if field.metadata["group"] not in DEVICE_GROUPS}
    settings = files.read_json(path)
    try:
        return TrainConfig(**{name: value for name, value in settings.items() if name in names})
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} does not hold the settings of a run: {error_text(error)}") from None


def _check_model(config: TrainConfig, model: str, train_dir: Path) -> None:
    """Raise unless the user names the function of a model of the user's own, and thereby agrees to executing it."""
    trained = shlex.quote(config.model)
    if config.user_model and not split_function(model):
        raise UsageError(
            f"{train_dir} was trained with --model={trained}, code that must be executed to make the model; if you "
            f"trust it, give --model={trained}, or the path where it is now"
        )
    if not config.user_model and model not in ("", config.model):
        raise UsageError(f"{train_dir} was trained with --model={trained}, not {model}; leave --model out")
