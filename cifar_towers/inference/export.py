"""A trained net as a file for use elsewhere, held against the checkpoint it came from."""

import contextlib
import importlib
import itertools
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.cli.tool_configs import ExportConfig
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.errors import DataError, RunError, UsageError, error_text
from cifar_towers.evaluation.evaluator import make_classify_fn
from cifar_towers.evaluation.score import softmax
from cifar_towers.inference import load_run
from cifar_towers.inference.export_formats import FORMATS, Format, ServingModule
from cifar_towers.models.stock_layers import plain
from cifar_towers.towers import Tower
from cifar_towers.training import devices

PROBABILITY_ATOL = 1e-4  # largest difference of a probability that rounding explains
AT_ONCE = 250  # images of the check


def export(config: ExportConfig) -> bool:
    """Writes the net, runs what was written, and says where it is and how far it is from the checkpoint; whether it
    agrees. If so it replaces what was there before; if not, both are kept.

    Raises:
      UsageError: there is no such run, or a package is missing. DataError: there is no data to check on.
    """
    kind = FORMATS[config.format]
    _require(config.format, kind.needs)
    run = load_run.open_run(Path(config.train_dir), config.model, config.step)
    place = Path(config.out) if config.out else run.directory / "export" / kind.name
    _refuse_to_replace(place, kind)
    source = _source(config, run) if config.check else None
    towers = devices.setup_towers(config)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # a GPU's ten bits are not what is held against
    weights = run.choose_weights(config.weights)
    net = run.load(weights, "float32")
    some = _test_images(source, run, config.check) if source else None
    own = _probabilities(net, towers, run, some) if some else None
    deployed = ServingModule(plain(net), run.augmentation, run.info.side, run.info.class_names)
    new = place.with_name(f".new-{place.name}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove(new)
        kind.write(deployed, new)
        with keras.saving.custom_object_scope(_own_layers(net)):
            wrong = _check(kind, new, own, some) if some else ""
        stands = _keep_aside(new, place) if wrong else _put(new, place)
    except Exception as error:  # converters have errors of all kinds
        raise RunError(f"{place} cannot be written ({_told(error)}); --out= names another place") from error
    finally:
        with contextlib.suppress(OSError):  # as where nothing can be written
            _remove(new)
    told = f"{stands}: {run.directory} at step {run.facts['step']}, {weights} weights, {_size(stands) / 1e6:.1f} MB"
    print(told if some else f"{told}, not checked")
    if wrong:
        earlier = f"; {place} is the earlier one" if place.exists() else ""
        print(f"{stands} {wrong}: do not use it{earlier}", file=sys.stderr)
        if config.format == "keras" and _own_layers(net):
            print(
                "Keras makes layers of your own again by get_config and **kwargs; saved_model needs neither",
                file=sys.stderr,
            )
    return not wrong


def _source(config: ExportConfig, run: load_run.TrainedRun) -> sources.Source:
    try:
        return sources.find(config.dataset or run.facts["dataset"], config.data_dir)
    except DataError as error:
        raise DataError(f"the export is checked on test images, and {error}; --check=0 leaves that out") from None


def _test_images(source: sources.Source, run: load_run.TrainedRun, count: int) -> Split:
    _, dataset = sources.load(source, run.config.validation_examples, run.info.side)
    return dataset.test.take(slice(count))


def _probabilities(net: keras.Model, towers: list[Tower], run: load_run.TrainedRun, split: Split) -> np.ndarray:
    classify = make_classify_fn(net, towers, run.augmentation)
    return softmax(classify(split.images, *load_run.variables_of(net))[0])


def _own_layers(net: keras.Model) -> dict[str, type]:
    """The classes of layers that are not Keras's, by their names: the `keras` format is read with them."""
    classes = {type(layer) for layer in net._flatten_layers(include_self=False)}
    return {kind.__name__: kind for kind in classes if not kind.__module__.startswith("keras.")}


def _check(kind: Format, path: Path, own: np.ndarray, split: Split) -> str:
    """What is wrong with an export, if anything; says how far it is from the net's `own` probabilities [n, C]."""
    try:
        call = kind.open(path)
        parts = [call(split.images[start : start + AT_ONCE]) for start in range(0, len(split.images), AT_ONCE)]
        theirs = np.concatenate(parts)
    except Exception as error:  # and so have interpreters
        return f"cannot be run here ({_told(error)})"
    furthest = float(np.abs(own - theirs).max()) if np.isfinite(theirs).all() else np.inf
    right = [int((table.argmax(1) == split.labels).sum()) for table in (own, theirs)]
    count = len(split.labels)
    print(
        f"checked on {count:,} test images: accuracy {100 * right[1] / count:.2f} %, the checkpoint's "
        f"{100 * right[0] / count:.2f} %; largest difference of a probability {furthest:.1e}"
    )
    return (
        ""
        if furthest <= PROBABILITY_ATOL
        else f"differs by more than the {PROBABILITY_ATOL:.0e} that rounding explains"
    )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error_text(error, 300)}"


def _require(name: str, modules: tuple[str, ...]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            raise UsageError(
                f"format={name} needs {module.replace('_', '-')}, which is not installed; for it: "
                f"{sys.executable} -m pip install -e '.[export]'"
            ) from None


def _refuse_to_replace(place: Path, kind: Format) -> None:
    """What is replaced is an earlier export, and nothing else."""
    suffix = Path(kind.name).suffix
    if kind.is_directory and place.name in ("", ".."):
        raise UsageError(f"--out={place} is where others stand; write --out={place / kind.name}")
    if place.suffix != suffix and not kind.is_directory:
        better = place / kind.name if place.is_dir() else place.with_suffix(suffix)
        raise UsageError(f"--out={place} does not end in {suffix}; write --out={better}")
    earlier = (place / tf.saved_model.SAVED_MODEL_FILENAME_PB).exists() if kind.is_directory else place.is_file()
    empty = kind.is_directory and place.is_dir() and not any(place.iterdir())
    if place.exists() and not (earlier or empty):
        raise UsageError(f"{place} is there already and no {kind.name}; give another --out, or remove it")


def _put(new: Path, place: Path) -> Path:
    """Has what was written at `new` stand at `place`; returns `place`."""
    old = place.with_name(f".old-{place.name}")
    try:
        if place.is_dir():  # a file is replaced at once, a directory only when it is out of the way
            _remove(old)
            place.replace(old)
        new.replace(place)
    finally:
        if old.exists() and not place.exists():  # broken off between the two
            old.replace(place)
    _remove(old)
    return place


def _keep_aside(new: Path, place: Path) -> Path:
    """Has what was written at `new` stand beside `place`, under a name that nothing has; returns its path."""
    paths = (place.with_name(f"failed-{number}-{place.name}") for number in itertools.count(1))
    return new.replace(next(path for path in paths if not path.exists()))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
