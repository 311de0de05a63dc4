"""Classes of image files, predicted by a trained model."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cifar_towers.config.programs import PredictConfig
from cifar_towers.data import image_files
from cifar_towers.errors import UsageError, printable
from cifar_towers.evaluation.score import softmax
from cifar_towers.files import to_json
from cifar_towers.hardware import choose_precision
from cifar_towers.inference.load_run import TrainedRun, make_logits_fn, open_run
from cifar_towers.training.build import setup_towers

BATCH_SIZE = 256  # pictures that are read and classified at once
TOP_K = 3  # classes shown for each picture


def predict_images(config: PredictConfig) -> None:
    """Print a line for each picture, in the order given. The pictures of a folder are sorted by name.

    Raises:
      UsageError: there is no such run or set of weights, or a folder has no pictures. DataError: a picture cannot be
        read.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    paths = list(_list_pictures(config.pictures))
    width = max(len(_shown(path)) for path in paths)
    for path, probabilities in zip(paths, _predict_paths(config, run, paths), strict=True):
        top = np.argsort(-probabilities, kind="stable")[:TOP_K]
        likely = {run.info.class_names[index]: round(float(probabilities[index]), 6) for index in top}
        if config.json:
            print(to_json({"picture": os.fspath(path), "class": next(iter(likely)), "probabilities": likely}))
        else:
            classes = "  ".join(f"{name} {100 * value:.1f} %" for name, value in likely.items())
            print(f"{_shown(path):{width}}  {printable(classes)}")
        sys.stdout.flush()


def predict_probabilities(config: PredictConfig, images: np.ndarray | Iterable[Path | str] | Path | str) -> np.ndarray:
    """Return the probabilities [n, C] of uint8 images [n, S, S, 3], or of picture files or folders, or of one.

    Raises:
      UsageError: there is no such run, the array is no such images, or a folder has no pictures. DataError: a picture
        cannot be read.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    if not isinstance(images, np.ndarray):
        paths = _list_pictures([images] if isinstance(images, (str, Path)) else images)
        return np.stack(list(_predict_paths(config, run, list(paths))))
    size = run.info.image_size
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (size, size, 3):
        raise UsageError(f"images are {images.shape} {images.dtype}; give uint8 [n, {size}, {size}, 3], or paths")
    return _make_probabilities_fn(config, run)(images)


def _predict_paths(config: PredictConfig, run: TrainedRun, paths: Sequence[Path]) -> Iterator[np.ndarray]:
    """Yield the probabilities [C] of each picture."""
    classify = _make_probabilities_fn(config, run)
    for start in range(0, len(paths), BATCH_SIZE):
        images = image_files.read_all(paths[start : start + BATCH_SIZE], run.info.image_size)  # as in training
        yield from classify(images)


def _make_probabilities_fn(config: PredictConfig, run: TrainedRun) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function: uint8 images [n, S, S, 3] -> probabilities [n, C]."""
    towers = setup_towers(config)
    precision = choose_precision(config.precision, towers[0].device, run.metadata["facts"]["precision"])
    logits_of = make_logits_fn(run, run.load(run.choose_weights(config.weights), precision), towers)
    return lambda images: softmax(logits_of(images, config.tta))


def _list_pictures(paths: Iterable[Path | str]) -> Iterator[Path]:
    """Yield the files, and the pictures in the folders except hidden ones and those in subfolders."""
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        pictures = sorted(file for file in path.iterdir() if image_files.is_picture(file))
        if not pictures:
            raise UsageError(f"{_shown(path)} contains no pictures ({', '.join(image_files.SUFFIXES)})")
        yield from pictures


def _shown(path: Path) -> str:
    return printable(os.fspath(path))
