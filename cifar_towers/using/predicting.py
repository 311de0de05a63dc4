"""What a trained net says of pictures: the class of each, and how sure it is."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cifar_towers.data import images
from cifar_towers.errors import DataError, printable
from cifar_towers.evaluation import make_classifier, softmax
from cifar_towers.program_configs import PredictConfig
from cifar_towers.reporting import records
from cifar_towers.training import opening
from cifar_towers.using import trained

AT_ONCE = 256  # pictures that the net gets at a time
TOLD = 3  # classes that are told of each


def predict(config: PredictConfig) -> None:
    """Prints a line for each picture, in the order they were given; those of a folder by their names.

    A picture that cannot be read is told of on the standard error, and the others go on.

    Raises:
      UsageError: there is no such run or set of weights. DataError: at the end, if some could not be read.
    """
    run = trained.open_run(Path(config.train_dir), config.model, config.step)
    expanded = list(_expand(config.pictures))
    towers = opening.open_towers(config)
    model = run.load(run.choose_weights(config.weights), opening.choose_precision(config.precision, towers))
    classify = make_classifier(model, towers, run.augmentation)
    size, side, bad = min(AT_ONCE, len(expanded)), run.traits.side, []
    width = max(len(_shown(path)) for path, _ in expanded)
    for start in range(0, len(expanded), size):
        some = expanded[start : start + size]
        levels, told = images.read_all([path for path, _ in some], side, at_once=1)  # memory stays small
        told |= {place: wrong for place, (_, wrong) in enumerate(some) if wrong}
        levels = np.pad(levels, [(0, size - len(some)), (0, 0), (0, 0), (0, 0)])  # always as many: one size is traced
        found = softmax(classify(levels, *trained.variables_of(model), config.tta)[1])
        for place, (path, _) in enumerate(some):
            if place in told:
                bad.append(path)
                print(f"{_shown(path)} {told[place]}", file=sys.stderr)
            if config.json:
                answer = {"error": told[place]} if place in told else _best(found[place], run.traits.class_names)
                print(records.to_json({"picture": os.fspath(path), **answer}))
            elif place not in told:
                print(f"{_shown(path):{width}}  {_as_text(_best(found[place], run.traits.class_names))}")
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
        found = list(filter(images.is_picture, entries))
        others = [e for e in entries if not (images.is_picture(e) or e.name.startswith(".") or e.is_dir())]
        if found and others:
            print(f"{_shown(path)}: {images.left_out(len(others))}", file=sys.stderr)
        if not found:
            yield path, f"holds no pictures ({', '.join(images.SUFFIXES)})"
        yield from ((picture, "") for picture in found)


def _best(probabilities: np.ndarray, class_names: Sequence[str]) -> dict:
    best = np.argsort(-probabilities, kind="stable")[:TOLD]
    return {
        "class": class_names[best[0]],
        "probabilities": {class_names[index]: round(float(probabilities[index]), 6) for index in best},
    }


def _as_text(answer: dict) -> str:
    return printable("  ".join(f"{name} {100 * share:.1f} %" for name, share in answer["probabilities"].items()))


def _shown(path: Path) -> str:
    return printable(os.fspath(path))
