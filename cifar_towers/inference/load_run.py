"""What a run has trained, on any machine: its net rebuilt from its settings, with the weights of a checkpoint.

Nothing in a run's directory is executed, nor what a file in it names; a net of the user's own is made by the function
that the user names.
"""

import dataclasses
import shlex
from pathlib import Path
from typing import NamedTuple

import keras

from cifar_towers.checkpointing.checkpoint import (
    CHECKPOINTS_DIR,
    checkpoint_at_step,
    latest_checkpoint,
    read_metadata,
    read_variables,
)
from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import with_current_names
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.dataset import DatasetInfo
from cifar_towers.errors import UsageError
from cifar_towers.files import run_files
from cifar_towers.registry import check_dataset, split_user_model
from cifar_towers.training import build

MOST_NAMED = 8  # of the runs that a message offers


class TrainedRun(NamedTuple):
    """A run's checkpoint, and what was trained in it."""

    directory: Path
    checkpoint: Path
    config: TrainConfig
    facts: dict  # saved with the checkpoint: its `step`, its `dataset` and more
    info: DatasetInfo

    @property
    def augmentation(self) -> Augmentation:
        """What is done to an image before the net sees it."""
        return build.make_augmentation(self.config, self.info)

    def choose_weights(self, asked: str) -> str:
        """`raw` or `ema` for one of these or `auto`, the average where there is one.

        Raises:
          UsageError: the run kept no average.
        """
        if asked == "ema" and not self.config.ema_decay:
            raise UsageError(f"{self.directory} kept no moving average of its weights; give --weights=raw")
        if asked == "auto":
            return "ema" if self.config.ema_decay else "raw"
        return asked

    def load(self, weights: str, compute_dtype: str) -> keras.Model:
        """The net with its `raw` or `ema` weights, computing in a precision.

        Raises:
          UsageError: the function that made the net is not there any more, or makes another one.
          DataError: the checkpoint is damaged.
        """
        model = build.make_model(self.config, compute_dtype, self.info)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        prefix = "ema" if weights == "ema" else "model"
        names = [f"{prefix}.{variable.path.replace('/', '.')}" for variable in variables]
        for variable, value in zip(variables, read_variables(self.checkpoint, names).values(), strict=True):
            if variable.shape != value.shape:
                raise UsageError(
                    f"{self.checkpoint} has {variable.path} of shape {value.shape}, model={self.config.model} makes it "
                    f"of shape {tuple(variable.shape)} now; give the net back that was trained"
                )
            variable.assign(value)
        return model


def variables_of(model: keras.Model) -> tuple[list, list]:
    """(weights, statistics) of a net, as an evaluator takes them."""
    weights, statistics = model.trainable_variables, model.non_trainable_variables
    return [variable.value for variable in weights], [variable.value for variable in statistics]


def open_run(train_dir: Path, model: str = "", step: int = 0) -> TrainedRun:
    """A checkpoint of a run.

    Args:
      model: where the function stands that makes the run's net, if it is the user's own.
      step: which checkpoint; 0 for the newest that is undamaged.

    Raises:
      UsageError: there is no such run or checkpoint, or it has another net. DataError: it is damaged, or all are.
    """
    checkpoint = checkpoint_at_step(train_dir, step) if step else latest_checkpoint(train_dir)
    if not checkpoint:
        raise UsageError(_why_none(train_dir))
    of_devices = ("Towers", "Cluster")  # how it was trained, which is nothing to how it is used
    known = {field.name for field in dataclasses.fields(TrainConfig) if field.metadata["group"] not in of_devices}
    try:
        settings = with_current_names(run_files.read_json(train_dir / run_files.CONFIG))
        config = TrainConfig(**{name: value for name, value in settings.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{train_dir / run_files.CONFIG}, the settings of the run, cannot be read: {error}") from None
    facts = read_metadata(checkpoint)
    check_dataset(facts["dataset"])  # as strictly as one on the command line
    return TrainedRun(
        train_dir, checkpoint, _agreed(config, model, train_dir), facts, DatasetInfo.from_json(facts.get("traits", {}))
    )


def _why_none(train_dir: Path) -> str:
    """Why a directory has no checkpoint, and which ones beside it have some."""
    if (train_dir / run_files.CONFIG).exists():
        return f"no checkpoint in {train_dir}: its run has saved none yet; train on, and type the same again"
    told = "no run has been there" if train_dir.is_dir() else "it is not there"
    others = sorted({path.parents[1].name for path in train_dir.parent.glob(f"*/{CHECKPOINTS_DIR}/step-*")})
    named = ", ".join(others[:MOST_NAMED]) + ", ..." * (len(others) > MOST_NAMED)
    give = f"beside it these have some: {named}" if others else "give that of a run, as runs/speed94-seed0"
    return f"no checkpoint in {train_dir}: {told}; {give}"


def _agreed(config: TrainConfig, model: str, train_dir: Path) -> TrainConfig:
    """The settings with the `model` that the user gave, who agrees to running it, in place of the one in the file."""
    theirs = shlex.quote(config.model)
    if config.user_model and not split_user_model(model):
        raise UsageError(
            f"{train_dir} was trained with --model={theirs}, code that is run to make the net again; if you trust it, "
            f"give --model={theirs}, or the place where it is now"
        )
    if not config.user_model and model not in ("", config.model):
        raise UsageError(f"{train_dir} was trained with --model={theirs}, not {model}; leave --model")
    return dataclasses.replace(config, model=model or config.model)
