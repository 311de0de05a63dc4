"""A trained model in memory, and the classes that it gives to images."""

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import ComputeConfig, PredictConfig, TrainedRunConfig
from cifar_towers.data import image_files
from cifar_towers.data.dataset import DatasetInfo
from cifar_towers.errors import DataError, UsageError, listed, printable
from cifar_towers.evaluation.evaluator import Classifier
from cifar_towers.evaluation.score import softmax
from cifar_towers.files import to_json
from cifar_towers.hardware import choose_precision
from cifar_towers.models.keras_models import checkpoint_key, finish_restoring, variable_values
from cifar_towers.runs.checkpoint import find_checkpoint, read_checkpoint
from cifar_towers.runs.directory import assign, warn_of_edited_model
from cifar_towers.runs.run import load_run
from cifar_towers.training import build

BATCH_SIZE = 256  # pictures that are read and classified at once
TOP_K = 3  # classes shown for each picture


class TrainedModel:
    """The model of a run, rebuilt from its settings on towers, with the weights of one of its
    checkpoints.

    Nothing in a run's directory is executed. A model of the user's is made by the function that
    the user names.

    Attributes:
      run: the run.
      config: the settings of its training.
      metadata: what the checkpoint stores beside the weights: `step`, `dataset` and more.
      info: classes and image size of its data.
      weights: `raw` or `ema`.
      precision: `float32` unless the config has a precision.
      model: the Keras model.
      augmentation: the preprocessing of its images.

    Raises:
      UsageError: there is no such run, checkpoint or average of weights, or the run's own model is
        not named.
      DataError: the checkpoint is damaged.
    """

    def __init__(self, config: TrainedRunConfig):
        self.run = load_run(config.train_dir)
        checkpoint = find_checkpoint(self.run.directory, config.step)
        settings = TrainConfig(**self.run.config)
        if settings.user_model and not config.model:
            raise UsageError(
                f"{self.run.directory} trained your own model, whose code must be executed; if you "
                f"trust it, add --model={settings.model}, or the path where it is now"
            )
        if config.weights == "ema" and not settings.ema_decay:
            raise UsageError(
                f"{self.run.directory} has no moving average of its weights; give --weights=raw"
            )
        self.config = dataclasses.replace(settings, model=config.model or settings.model)
        self.weights = "ema" if settings.ema_decay and config.weights != "raw" else "raw"
        values, self.metadata = read_checkpoint(checkpoint)
        self.info = DatasetInfo.from_json(self.metadata["dataset_info"])
        self.augmentation = build.make_augmentation(self.config, self.info)
        towers = build.make_local_towers(config)  # before anything else that uses TensorFlow
        self.precision = "float32"
        if isinstance(config, ComputeConfig):
            trained_in = self.metadata["facts"]["precision"]
            self.precision = choose_precision(config.precision, towers[0].device, trained_in)
        self.model = build.make_model(self.config, self.precision, self.info)
        prefix = "ema." if self.weights == "ema" else "model."
        variables = {
            prefix + checkpoint_key(variable): variable
            for variable in [*self.model.trainable_variables, *self.model.non_trainable_variables]
        }
        of_model = {name: value for name, value in values.items() if name.startswith(prefix)}
        assign(variables, of_model, self.run.directory)
        finish_restoring(self.model)
        warn_of_edited_model(self.config, self.metadata, self.run.directory)
        self._classifier = Classifier(self.model, towers, self.augmentation)

    def logits(self, images: np.ndarray, tta: bool = False) -> np.ndarray:
        """Compute the logits [n, C] of uint8 images [n, S, S, 3], with `tta` the means over the
        views of test-time augmentation.

        Raises:
          DataError: a logit is not finite, so that the class would mean nothing.
        """
        weights, non_trainable = variable_values(self.model)
        found = self._classifier.logits(images, weights, non_trainable, tta)
        logits = found.tta if tta else found.plain
        if not np.isfinite(logits).all():
            raise DataError(f"{self.run.directory} has NaN or infinite logits for some images")
        return logits

    def probabilities(self, images: np.ndarray, tta: bool = False) -> np.ndarray:
        """Compute the probabilities [n, C] float64; see `logits`."""
        return softmax(self.logits(images, tta))


def predict_images(config: PredictConfig) -> None:
    """Print a line for each picture that can be read, in the order given. The pictures of a folder
    are sorted by name.

    Raises:
      UsageError: there is no such run or set of weights, or a folder has no pictures. DataError:
        pictures cannot be read; the others have been printed.
    """
    paths = list(_list_pictures(config.pictures))
    trained = TrainedModel(config)
    errors = []
    for start in range(0, len(paths), BATCH_SIZE):
        batch = paths[start : start + BATCH_SIZE]
        results = image_files.read_each(batch, trained.info.image_size)
        pictures = []
        for path, result in zip(batch, results, strict=True):
            if isinstance(result, DataError):
                errors.append(str(result))
            else:
                pictures.append((path, result))
        if not pictures:
            continue

        images = np.stack([image for _, image in pictures])
        probabilities = trained.probabilities(images, config.tta)
        for (path, _), of_picture in zip(pictures, probabilities, strict=True):
            _print_prediction(path, of_picture, trained.info.class_names, config.json)
    if errors:
        raise DataError(listed(errors, 10))


def _print_prediction(
    path: Path, probabilities: np.ndarray, class_names: Sequence[str], as_json: bool
) -> None:
    """Print the most likely classes of a picture."""
    top = np.argsort(-probabilities, kind="stable")[:TOP_K]
    likely = {class_names[index]: round(float(probabilities[index]), 6) for index in top}
    if as_json:
        best, *_ = likely
        record = {"picture": os.fspath(path), "class": best, "probabilities": likely}
        print(to_json(record))
    else:
        classes = "  ".join(f"{name} {100 * value:.1f} %" for name, value in likely.items())
        print(printable(f"{path}  {classes}"))
    sys.stdout.flush()


def predict_probabilities(
    config: ComputeConfig, images: np.ndarray | Iterable[Path | str] | Path | str
) -> np.ndarray:
    """Return the probabilities [n, C] of uint8 images [n, S, S, 3], or of picture files or folders,
    or of one.

    Raises:
      UsageError: there is no such run, the array is no such images, or a folder has no pictures.
      DataError: a picture cannot be read.
    """
    trained = TrainedModel(config)
    if not isinstance(images, np.ndarray):
        paths = list(_list_pictures([images] if isinstance(images, (str, Path)) else images))
        return np.stack(list(_predict_paths(trained, paths, config.tta)))
    size = trained.info.image_size
    if images.dtype != np.uint8 or images.shape[1:] != (size, size, 3):
        raise UsageError(
            f"images are {images.shape} {images.dtype}; give uint8 [n, {size}, {size}, 3], or paths"
        )
    return trained.probabilities(images, config.tta)


def _predict_paths(trained: TrainedModel, paths: list[Path], tta: bool) -> Iterator[np.ndarray]:
    """Yield the probabilities [C] of each picture, read as in training."""
    for start in range(0, len(paths), BATCH_SIZE):
        images = image_files.read_all(paths[start : start + BATCH_SIZE], trained.info.image_size)
        yield from trained.probabilities(images, tta)


def _list_pictures(paths: Iterable[Path | str]) -> Iterator[Path]:
    """Yield the files, and the pictures in the folders except hidden ones and those in
    subfolders.
    """
    for path in map(Path, paths):
        pictures = (
            sorted(filter(image_files.is_picture, path.iterdir())) if path.is_dir() else [path]
        )
        if not pictures:
            raise UsageError(f"{path} contains no pictures ({', '.join(image_files.SUFFIXES)})")
        yield from pictures
