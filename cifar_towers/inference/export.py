"""Export of a trained model for use elsewhere, checked against the checkpoint."""

import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from cifar_towers import files
from cifar_towers.data import image_files, sources
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, RunError, UsageError, error_line
from cifar_towers.evaluation.evaluator import make_classify_fn
from cifar_towers.evaluation.score import softmax
from cifar_towers.inference.export_formats import FORMATS, Format, ServingModule
from cifar_towers.inference.load_run import TrainedRun, model_variables, open_run
from cifar_towers.inference.settings import ExportConfig
from cifar_towers.models.stock_layers import to_stock_layers
from cifar_towers.towers import Tower
from cifar_towers.training import devices

PROBABILITY_ATOL = 1e-4  # largest difference between probabilities that rounding explains
BATCH_SIZE = 250  # images of the check
OTHER_SIZES = ((0.75, 1.0), (1.5, 2.0), (3.0, 2.5), (12.0, 15.0))  # of the check: height and width in sides of an image
NUM_RESIZED = 20  # test images that are checked in each of these sizes


class Sample(NamedTuple):
    """Images of one size that an export is checked on."""

    images: np.ndarray  # [n, H, W, 3] uint8
    expected: np.ndarray  # [n, C] probabilities of the checkpoint


def export_model(config: ExportConfig) -> bool:
    """Write the model, run what was written on test images in several sizes, and return whether it agrees with the
    checkpoint.

    If it agrees, it replaces an earlier export; if not, it is kept beside it under another name.

    Raises:
      UsageError: there is no such run, or a package is missing. DataError: there are no data to check on. RunError: it
        cannot be written.
    """
    file_format = FORMATS[config.format]
    _check_packages(config.format, file_format.packages)
    run = open_run(Path(config.train_dir), config.model, config.step)
    path = Path(config.out) if config.out else run.directory / "export" / file_format.name
    _check_path(path, file_format)
    source = _find_source(config, run) if config.check else None
    towers = devices.setup_towers(config)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its ten bits are too few to compare with
    weights = run.choose_weights(config.weights)
    model = run.load(weights, "float32")
    split = _load_test_images(source, run, config.check) if source else None
    samples = _make_samples(split.images, model, towers, run) if split else []
    module = ServingModule(to_stock_layers(model), run.augmentation, run.info.image_size, run.info.class_names)
    own_layers = _own_layers(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary_beside(path) as temporary, keras.saving.custom_object_scope(own_layers):
            file_format.write(module, temporary)
            problem = _check(file_format, temporary, samples, split.labels) if split else ""
            written = _path_of_failed(path) if problem else path
            files.replace(temporary, written)
    except Exception as error:  # converters raise errors of all kinds
        raise RunError(f"{path} cannot be written ({error_line(error)}); give another place by --out") from error
    origin = f"{run.directory} at step {run.metadata['step']}, {weights} weights"
    size = files.size_in_bytes(written) / 1e6
    print(f"{written}: {origin}, {size:.1f} MB{'' if split else ', not checked'}")
    if problem:
        earlier = f"; {path} is the earlier export" if path.exists() else ""
        print(f"{written} {problem}: do not use it{earlier}", file=sys.stderr)
        if config.format == "keras" and own_layers:
            print("Keras needs get_config and **kwargs in layers of your own; saved_model does not", file=sys.stderr)
    return not problem


def _check_packages(name: str, packages: tuple[str, ...]) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise UsageError(
                f"format={name} needs {package.replace('_', '-')}, which is not installed; to install it: "
                f"{sys.executable} -m pip install -e '.[export]'"
            ) from None


def _check_path(path: Path, file_format: Format) -> None:
    """Raise unless `path` is free, or what is there is an earlier export."""
    suffix = Path(file_format.name).suffix
    if file_format.is_directory and path.name in ("", ".."):
        raise UsageError(f"--out={path} may hold other files; write --out={path / file_format.name}")
    if path.suffix != suffix and not file_format.is_directory:
        better = path / file_format.name if path.is_dir() else path.with_suffix(suffix)
        raise UsageError(f"--out={path} does not end in {suffix}; write --out={better}")
    earlier = (path / tf.saved_model.SAVED_MODEL_FILENAME_PB).exists() if file_format.is_directory else path.is_file()
    empty = file_format.is_directory and path.is_dir() and not any(path.iterdir())
    if path.exists() and not (earlier or empty):
        raise UsageError(f"{path} exists and is no {file_format.name}; give another --out, or remove it")


def _find_source(config: ExportConfig, run: TrainedRun) -> sources.Source:
    try:
        return sources.find(config.dataset or run.metadata["dataset"], config.data_dir)
    except DataError as error:
        raise DataError(f"the export is checked on test images, and {error}; --check=0 skips the check") from None


def _load_test_images(source: sources.Source, run: TrainedRun, count: int) -> Split:
    _, dataset = sources.load(source, run.config.validation_examples, run.info.image_size)
    return dataset.test.take(slice(count))


def _make_samples(images: np.ndarray, model: keras.Model, towers: list[Tower], run: TrainedRun) -> list[Sample]:
    """The images, and some of them in each of `OTHER_SIZES`; what is expected of these is as by `predict.py`."""
    classify, side = make_classify_fn(model, towers, run.augmentation), run.info.image_size
    sizes = [(round(width * side), round(height * side)) for height, width in OTHER_SIZES]
    resized = [np.stack([Image.fromarray(image).resize(size) for image in images[:NUM_RESIZED]]) for size in sizes]
    return [
        Sample(each, softmax(classify(image_files.resize_all(each, side), *model_variables(model))[0]))
        for each in (images, *resized)
    ]


def _own_layers(model: keras.Model) -> dict[str, type]:
    """Classes of layers that are not Keras's, by name: reading the `keras` format needs them."""
    classes = {type(layer) for layer in model._flatten_layers(include_self=False)}
    return {layer.__name__: layer for layer in classes if not layer.__module__.startswith("keras.")}


def _check(file_format: Format, path: Path, samples: Sequence[Sample], labels: np.ndarray) -> str:
    """Print how an export's probabilities differ from the expected ones; the problem, or an empty string.

    The first sample has these labels.
    """
    try:
        run = file_format.open(path)
        exported = [_run_in_batches(run, sample.images) for sample in samples]
    except Exception as error:  # interpreters raise errors of all kinds
        return f"cannot be run here ({error_line(error)})"
    differences = [_largest_difference(*pair) for pair in zip(exported, (s.expected for s in samples), strict=True)]
    accuracy, expected = (100 * float((p.argmax(1) == labels).mean()) for p in (exported[0], samples[0].expected))
    print(
        f"checked on {len(labels):,} test images: accuracy {accuracy:.2f} %, the checkpoint's {expected:.2f} %; "
        f"largest difference of a probability {differences[0]:.1e}, in other sizes {max(differences[1:]):.1e}"
    )
    if max(differences) <= PROBABILITY_ATOL:
        return ""
    return f"differs by more than the {PROBABILITY_ATOL:.0e} that rounding explains"


def _run_in_batches(run: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> np.ndarray:
    starts = range(0, len(images), BATCH_SIZE)
    return np.concatenate([run(images[start : start + BATCH_SIZE]) for start in starts])


def _largest_difference(exported: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(expected - exported).max()) if np.isfinite(exported).all() else np.inf


def _path_of_failed(path: Path) -> Path:
    paths = (path.with_name(f"failed-{number}-{path.name}") for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
