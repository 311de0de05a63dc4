"""Train, evaluate and use runs from Python, with the settings of the programs. Importing this module is quick.

Settings are checked as on the command line. What cannot be done raises a `cifar_towers.errors.RunError`, whose text is
the line that the programs print, with settings as `batch_size=256` in place of flags.
"""

import contextlib
import logging
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_towers.cli.program import tensorflow_imported
from cifar_towers.cli.run import parse_settings
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import EvaluateConfig, PredictConfig
from cifar_towers.errors import FLAG_DASHES, Interrupted, UsageError, with_errors_for_python
from cifar_towers.inference.run import Run
from cifar_towers.signals import StopSignals

if TYPE_CHECKING:
    import numpy as np


@with_errors_for_python
def train(recipe: str | None = None, *, callbacks: Sequence[Any] = (), **settings: Any) -> Run:
    """Train or resume a run, as `train.py` does, and return it. A finished run is returned as it is.

    An interrupt (Ctrl-C, or a notebook's stop button) saves the run after the current step and returns it; the same
    call, without `overwrite`, resumes. A second interrupt raises `KeyboardInterrupt` at once.

    TensorFlow fixes its devices when it is first used: later calls in a process can have as many towers or fewer.

    Args:
      recipe: name of a recipe in `configs/`; default: `speed94`, or none if `settings` have a `model`.
      callbacks: objects with any of `on_start(run)`, `on_step(step, metrics)`, `on_evaluation(step, evaluation)` and
        `on_end(run)`; a function is an `on_step`. What a callback raises is raised here once the step is saved.
      **settings: flags of `train.py` by name, such as `num_gpus=2`; they override those of the recipe.

    Raises:
      RunError: a setting is wrong or only for the programs (`seeds`, `strategy="multi_worker"`), the data cannot be
        read, training diverges, or the last step is unsaved.
      KeyboardInterrupt: there was no step to save yet, or it is the second interrupt.
    """
    config = parse_settings(TrainConfig, {"recipe": recipe, **settings})
    if config.seeds or config.strategy == "multi_worker":
        name = "seeds" if config.seeds else "strategy=multi_worker"
        raise UsageError(f"{name} is for the programs; call train once for each seed, and start workers by launch.py")
    from cifar_towers.cli.main import start_training

    opened: list[Run] = []

    def make_handle(directory: Path) -> Run:
        opened.append(Run(directory))
        return opened[-1]

    with _visible_log(), tensorflow_imported():
        try:
            signals = StopSignals([signal.SIGINT])
            start_training(config, signals, callbacks=callbacks, make_handle=make_handle)
        except Interrupted as interrupt:
            print(FLAG_DASHES.sub("", f"interrupted: {interrupt}"))
    return opened[-1]


@with_errors_for_python
def evaluate(run: Run | Path | str, **settings: Any) -> dict[str, Any]:
    """Evaluate a checkpoint of a run, as `evaluate.py --json` does, and return what that prints.

    Args:
      run: a run or its directory.
      **settings: flags of `evaluate.py` by name, such as `tta=2`, `split`, `step`, `dataset`, or `model` for a net of
        your own.

    Returns:
      `accuracy` in [0, 1], both ends of its 95 % confidence interval (`interval95`), `loss` (mean cross entropy, nats:
      the NLL), the calibration as `ece` and `reliability` (see docs/tracking.md), `count` (images), `per_class`
      (accuracy by class name, NaN without examples), `confusion` [C, C] (images by true class and by prediction), and
      what was evaluated. For corrupted images, `accuracy`, `loss` and `ece` are tables.

    Raises:
      RunError: there is no such run or split, its data cannot be read or have changed, or logits are not finite.
    """
    config = parse_settings(EvaluateConfig, {"train_dir": getattr(run, "directory", run), **settings})
    with tensorflow_imported():
        from cifar_towers.inference.evaluate import score_checkpoint

        return score_checkpoint(config)


@with_errors_for_python
def predict(
    run: Run | Path | str, images: "np.ndarray | Iterable[Path | str] | Path | str", **settings: Any
) -> "np.ndarray":
    """Classify images by a checkpoint of a run.

    Args:
      run: a run or its directory.
      images: [n, S, S, 3] uint8 levels in the training's size, or paths of image files or of folders, or one path. The
        images of a folder are sorted by name.
      **settings: flags of `predict.py` by name, such as `tta=2`, `step`, or `model` for a net of your own.

    Returns:
      Probabilities [n, C] float64, with the classes in the order of `run.class_names`.

    Raises:
      RunError: there is no such run, the array has another shape or type, a file cannot be read, or logits are not
        finite.
    """
    settings = {"train_dir": getattr(run, "directory", run), **settings}
    config = parse_settings(PredictConfig, settings, arguments=("images",))
    with tensorflow_imported():
        from cifar_towers.inference.predict import predict_probabilities

        return predict_probabilities(config, images)


@with_errors_for_python
def load_run(path: Path | str) -> Run:
    """Return the run in a directory.

    Raises:
      UsageError: the directory holds no run.
    """
    from cifar_towers import files

    directory = Path(path).expanduser()
    if not (directory / files.CONFIG).exists():
        raise UsageError(f"{path} is not the directory of a run: it has no {files.CONFIG}")
    return Run(directory)


@contextlib.contextmanager
def _visible_log() -> Iterator[None]:
    """Print the package's log lines inside, unless the process shows lines of level INFO by handlers of its own.

    A level that the caller has set for the logger `cifar_towers` stays as it is.
    """
    logger, handler = logging.getLogger("cifar_towers"), logging.StreamHandler(sys.stdout)
    level, propagate = logger.level, logger.propagate
    if not (logger.hasHandlers() and logger.isEnabledFor(logging.INFO)):
        logger.addHandler(handler)
        logger.propagate = False  # a library's first warning gives the root logger a handler for all levels
        logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
