"""What a trained net says of pictures: the class of each, and how sure it is."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cifar_towers.cli.tool_configs import PredictConfig
from cifar_towers.data import image_files
from cifar_towers.errors import DataError, printable
from cifar_towers.evaluation.evaluator import make_classify_fn
from cifar_towers.evaluation.score import softmax
from cifar_towers.files import run_files
from cifar_towers.inference import load_run
from cifar_towers.training import devices

AT_ONCE = 256  # pictures that the net gets at a time
TOP_K = 3  # classes that are told of each


def predict(config: PredictConfig) -> None:
    """Prints a line for each picture, in the order they were given; those of a folder by their names.

    A picture that cannot be read is told of on the standard error, and the others go on.

    Raises:
      UsageError: there is no such run or set of weights. DataError: at the end, if some could not be read.
    """
    run = load_run.open_run(Path(config.train_dir), config.model, config.step)
    expanded = list(_expand(config.pictures))
    towers = devices.setup_towers(config)
    model = run.load(run.choose_weights(config.weights), devices.choose_precision(config.precision, towers))
    classify = make_classify_fn(model, towers, run.augmentation)
    size, side, bad = min(AT_ONCE, len(expanded)), run.info.side, []
    width = max(len(_shown(path)) for path, _ in expanded)
    for start in range(0, len(expanded), size):
        some = expanded[start : start + size]
        levels, told = image_files.read_all([path for path, _ in some], side, num_threads=1)  # memory stays small
        told |= {place: wrong for place, (_, wrong) in enumerate(some) if wrong}
        levels = np.pad(levels, [(0, size - len(some)), (0, 0), (0, 0), (0, 0)])  # always as many: one size is traced
        found = softmax(classify(levels, *load_run.variables_of(model), config.tta)[1])
        for place, (path, _) in enumerate(some):
            if place in told:
                bad.append(path)
                print(f"{_shown(path)} {told[place]}", file=sys.stderr)
            if config.json:
                answer = {"error": told[place]} if place in told else _best(found[place], run.info.class_names)
                print(run_files.to_json({"picture": os.fspath(path), **answer}))
            elif place not in told:
                print(f"{_shown(path):{width}}  {_as_text(_best(found[place], run.info.class_names))}")
        sys.stdout.flush()
    if bad:
        names = ", ".join(map(os.fspath, bad))
        raise DataError(f"{len(bad)} of {len(expanded)} pictures could not be read: {names}")


def _expand(given: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """(path, what is wrong with it or nothing) of the pictures that were given, and of those in folders that were
    given, but in none of their subfolders."""
    for path in map(Path, given):
        if not os.path.isdir(path):
            yield path, ""
            continue
        try:
            entries = sorted(path.iterdir())
        except OSError as error:
            yield path, f"cannot be read: {error.strerror}"
            continue
        found = list(filter(image_files.is_picture, entries))
        others = [e for e in entries if not (image_files.is_picture(e) or e.name.startswith(".") or e.is_dir())]
        if found and others:
            print(f"{_shown(path)}: {image_files.describe_ignored(len(others))}", file=sys.stderr)
        if not found:
            yield path, f"holds no pictures ({', '.join(image_files.SUFFIXES)})"
        yield from ((picture, "") for picture in found)


def _best(probabilities: np.ndarray, class_names: Sequence[str]) -> dict:
    best = np.argsort(-probabilities, kind="stable")[:TOP_K]
    return {
        "class": class_names[best[0]],
        "probabilities": {class_names[index]: round(float(probabilities[index]), 6) for index in best},
    }


def _as_text(answer: dict) -> str:
    return printable("  ".join(f"{name} {100 * share:.1f} %" for name, share in answer["probabilities"].items()))


def _shown(path: Path) -> str:
    return printable(os.fspath(path))
