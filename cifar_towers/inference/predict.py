"""Prediction of the classes of image files."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_towers.data import image_files
from cifar_towers.errors import DataError, printable
from cifar_towers.evaluation.evaluator import make_classify_fn
from cifar_towers.evaluation.score import softmax
from cifar_towers.inference.load_run import model_variables, open_run
from cifar_towers.inference.settings import PredictConfig
from cifar_towers.training import devices

BATCH_SIZE = 256
TOP_K = 3  # classes shown for each image


class ImageFile(NamedTuple):
    """A file or folder to predict, and why it cannot be read if it cannot."""

    path: Path
    error: str = ""


def predict_images(config: PredictConfig) -> None:
    """Print a line for each image, in the order given; those of a folder are sorted by name.

    Errors of single images are printed to standard error, and the others are still predicted.

    Raises:
      UsageError: there is no such run or set of weights. DataError: at the end, if some images could not be read.
    """
    run = open_run(Path(config.train_dir), config.model, config.step)
    files = list(_expand(config.pictures))
    towers = devices.setup_towers(config)
    model = run.load(run.choose_weights(config.weights), devices.choose_precision(config.precision, towers))
    classify = make_classify_fn(model, towers, run.augmentation)
    batch_size, width, failed = min(BATCH_SIZE, len(files)), max(len(_shown(file.path)) for file in files), []
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        # one thread, as each may take hundreds of megabytes
        levels, errors = image_files.read_all([file.path for file in batch], run.info.image_size, num_threads=1)
        levels = np.pad(levels, [(0, batch_size - len(batch)), (0, 0), (0, 0), (0, 0)])  # to trace for one size only
        probabilities = softmax(classify(levels, *model_variables(model), config.tta)[1])
        for index, (path, error) in enumerate(batch):
            error = error or errors.get(index)
            top = None if error else _top_classes(probabilities[index], run.info.class_names)
            if error:
                failed.append(path)
                print(f"{_shown(path)} {error}", file=sys.stderr)
            if config.json:
                print(files.to_json({"picture": os.fspath(path), **(top or {"error": error})}))
            elif top:
                classes = "  ".join(f"{name} {100 * value:.1f} %" for name, value in top["probabilities"].items())
                print(f"{_shown(path):{width}}  {printable(classes)}")
        sys.stdout.flush()
    if failed:
        raise DataError(f"{len(failed)} of {len(files)} images could not be read: {', '.join(map(os.fspath, failed))}")


def _expand(paths: Sequence[str]) -> Iterator[ImageFile]:
    """The given files, and the images in given folders but not in their subfolders."""
    for path in map(Path, paths):
        if not os.path.isdir(path):
            yield ImageFile(path)
            continue
        try:
            entries = sorted(path.iterdir())
        except OSError as error:
            yield ImageFile(path, f"cannot be read: {error.strerror}")
            continue
        images = list(filter(image_files.is_picture, entries))
        others = [e for e in entries if not (image_files.is_picture(e) or e.name.startswith(".") or e.is_dir())]
        if images and others:
            print(f"{_shown(path)}: {image_files.describe_ignored(len(others))}", file=sys.stderr)
        if not images:
            inside = "only folders; name them instead" if any(map(os.path.isdir, entries)) else "no images"
            yield ImageFile(path, f"contains {inside} (images are {', '.join(image_files.SUFFIXES)})")
        yield from map(ImageFile, images)


def _top_classes(probabilities: np.ndarray, class_names: Sequence[str]) -> dict:
    top = np.argsort(-probabilities, kind="stable")[:TOP_K]
    return {
        "class": class_names[top[0]],
        "probabilities": {class_names[index]: round(float(probabilities[index]), 6) for index in top},
    }


def _shown(path: Path) -> str:
    return printable(os.fspath(path))
