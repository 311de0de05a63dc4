"""Classes of image files, predicted by a trained model."""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from cifar_towers import devices
from cifar_towers.config.programs import PredictConfig
from cifar_towers.data import image_files
from cifar_towers.data.dataset import chunks
from cifar_towers.errors import DataError, UsageError, listed, printable
from cifar_towers.evaluation.score import softmax
from cifar_towers.files import to_json
from cifar_towers.inference.load_run import NOT_FINITE, TrainedRun, make_logits_fn, open_run

BATCH_SIZE = 256
MAX_PIXELS = 5000 * 32 * 32  # of arrays that are resized at once
TOP_K = 3  # classes shown for each image


def predict_images(config: PredictConfig) -> None:
    """Print a line for each image, in the order given. The images of a folder are sorted by name.

    The error of an image is printed to standard error, and the other images are still predicted.

    Raises:
      UsageError: there is no such run or set of weights. DataError: raised at the end if images have no prediction.
    """
    run = open_run(Path(config.train_dir), config.model, config.step, config.tta)
    pictures = list(_list_images(config.pictures))
    classify = _make_probabilities_fn(config, run)
    batch_size = min(BATCH_SIZE, len(pictures))
    width = max(len(_shown(path)) for path, _ in pictures)
    images = np.zeros([batch_size, run.info.image_size, run.info.image_size, 3], np.float32)
    failed = []
    for start in range(0, len(pictures), batch_size):
        batch = pictures[start : start + batch_size]
        for index, (path, error) in enumerate(batch):
            if not error:
                try:
                    images[index] = image_files.read(path, run.info.image_size)
                except DataError as unreadable:
                    batch[index] = path, str(unreadable)
        probabilities = classify(images)  # one size: traced once
        for (path, reason), of_image in zip(batch, probabilities, strict=False):
            error = reason or ("" if np.isfinite(of_image).all() else f"{path} gets {NOT_FINITE}")
            answer: dict[str, Any] = {"error": error} if error else _top_classes(of_image, run.info.class_names)
            if error:
                failed.append(path)
                print(printable(error), file=sys.stderr)
            if config.json:
                print(to_json({"picture": os.fspath(path), **answer}))
            elif not error:
                classes = "  ".join(f"{name} {100 * value:.1f} %" for name, value in answer["probabilities"].items())
                print(f"{_shown(path):{width}}  {printable(classes)}")
        sys.stdout.flush()
    if failed:
        names = listed([*map(os.fspath, failed)])
        raise DataError(f"{len(failed)} of {len(pictures)} images have no prediction: {names}")


def predict_probabilities(config: PredictConfig, images: np.ndarray | Iterable[Path | str] | Path | str) -> np.ndarray:
    """Return the probabilities [n, C] of uint8 images [n, H, W, 3], or of image files or folders, or of one.

    Raises:
      UsageError: there is no such run, or the array is no such images. DataError: a file cannot be read, a folder
        has no images, or logits are not finite.
    """
    run = open_run(Path(config.train_dir), config.model, config.step, config.tta)
    classify, image_size = _make_probabilities_fn(config, run), run.info.image_size
    images = list(images) if isinstance(images, Iterator) else images  # an iterator as of Path.glob ends once read
    paths = images if isinstance(images, Iterable) and not isinstance(images, str) else [images]
    if not all(isinstance(path, (str, Path)) for path in paths):
        try:
            images = np.asarray(images)
        except ValueError as error:
            raise UsageError("images have several sizes; give uint8 [n, h, w, 3], or a list of paths") from error
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise UsageError(f"images are {images.shape} {images.dtype}; give uint8 [n, h, w, 3], or a list of paths")
        read = functools.partial(_resize_all, image_size=image_size)
    else:
        images, read = [], functools.partial(image_files.read_all, image_size=image_size)
        for path, reason in _list_images(paths):
            if reason:
                raise DataError(reason)
            images.append(path)
    parts = (images[start : start + BATCH_SIZE] for start in range(0, len(images), BATCH_SIZE))
    found = np.concatenate([np.zeros([0, len(run.info.class_names)]), *(classify(read(part)) for part in parts)])
    if not np.isfinite(found).all():
        raise DataError(f"{run.directory} gives some images {NOT_FINITE}")
    return found


def _resize_all(images: Any, image_size: int) -> np.ndarray:
    return np.concatenate([resize_square(tf.constant(some), image_size).numpy() for some in chunks(images, MAX_PIXELS)])


def _make_probabilities_fn(config: PredictConfig, run: TrainedRun) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function [n, S, S, 3] float32 levels -> probabilities [n, C], NaN where the logits are not finite."""
    towers = devices.setup_towers(config)
    precision = devices.choose_precision(config.precision, towers, run.metadata["precision"])
    logits_of = make_logits_fn(run, run.load(run.choose_weights(config.weights), precision), towers)

    def classify(levels: np.ndarray) -> np.ndarray:
        logits = logits_of(levels, config.tta)
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(logits).all(1, keepdims=True), softmax(logits), np.nan)

    return classify


def resize_square(images: Any, image_size: int) -> Any:
    """Resize the central square of images with an antialiasing triangle filter, by two products of matrices.

    The operations exist in every export format, and none has to know H and W before the graph runs.

    Args:
      images: [B, H, W, C] levels, as a tensor or a symbolic tensor of Keras.

    Returns:
      [B, image_size, image_size, C] float32 levels, not rounded. Images of that size are returned unchanged.
    """
    lines = images[:1, :1, :, :1], images[:1, :, :1, :1]
    columns, rows = (ops.ones_like(ops.cast(ops.reshape(line, (-1,)), "float32")) for line in lines)
    square = ops.minimum(ops.sum(rows), ops.sum(columns))
    planes = ops.cast(ops.transpose(images, (0, 3, 1, 2)), "float32")  # in this order, as floats take four bytes
    planes = ops.matmul(planes, _triangles(columns, square, image_size))
    planes = ops.matmul(ops.swapaxes(planes, 2, 3), _triangles(rows, square, image_size))
    return ops.reshape(ops.transpose(planes, (0, 3, 2, 1)), (-1, image_size, image_size, images.shape[-1]))


def _triangles(ones: Any, square: Any, image_size: int) -> Any:
    """Return the weights [n, image_size] of n input pixels, given as n ones, in each output pixel.

    Each column is a triangle about the center of its output pixel, of sum 1, cut off outside the central `square` input
    pixels. Its half-width is an output pixel, or an input pixel if that is larger.
    """
    inputs = ops.cumsum(ones) - 0.5 - ops.floor((ops.sum(ones) - square) / 2)  # centers, from the square's first edge
    outputs = np.arange(image_size, dtype=np.float32) + 0.5
    ratio = square / image_size  # input pixels in an output pixel
    distances = ops.absolute(ops.expand_dims(inputs, 1) - ratio * outputs[None])
    inside = ops.cast(ops.logical_and(inputs > 0, inputs < square), "float32")
    weights = ops.relu(1 - distances / ops.maximum(ratio, 1.0)) * ops.expand_dims(inside, 1)
    return weights / ops.sum(weights, axis=0, keepdims=True)


def _list_images(paths: Iterable[Path | str]) -> Iterator[tuple[Path, str]]:
    """Yield (path, error) of the given files and of the images in the given folders, without those in subfolders."""
    for path in map(Path, paths):
        if not os.path.isdir(path):
            yield path, ""
            continue
        images = sorted(filter(image_files.is_picture, path.iterdir()))
        if not images:
            yield path, f"{path} contains no images ({', '.join(image_files.SUFFIXES)})"
        yield from ((image, "") for image in images)


def _top_classes(probabilities: np.ndarray, class_names: Sequence[str]) -> dict[str, Any]:
    top = np.argsort(-probabilities, kind="stable")[:TOP_K]
    return {
        "class": class_names[top[0]],
        "probabilities": {class_names[index]: round(float(probabilities[index]), 6) for index in top},
    }


def _shown(path: Path) -> str:
    return printable(os.fspath(path))
