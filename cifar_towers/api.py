"""Train runs, from Python and by the programs. Importing this module is quick.

Settings are those of the program, by name. What cannot be done raises a
`cifar_towers.errors.RunError`, whose text is the line that the programs print.
"""

import contextlib
import dataclasses
import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cifar_towers.config import TrainConfig
from cifar_towers.config.flags import make_config
from cifar_towers.errors import Interrupted, UsageError
from cifar_towers.hardware import tensorflow_imported
from cifar_towers.multi_worker.cluster_spec import Workers
from cifar_towers.registry import split_path
from cifar_towers.runs.run import Run
from cifar_towers.signals import StopSignals

if TYPE_CHECKING:
    from cifar_towers.data.sources import Source

log = logging.getLogger(__name__)

# TensorFlow's and Keras's random numbers, names and devices belong to the process
_is_training = threading.Lock()


def train(recipe: str | None = None, *, callbacks: Sequence[Any] = (), **settings: Any) -> Run:
    """Train or resume a run, as `cifar-towers train` does, and return it. A finished run is
    returned as it is.

    An interrupt (Ctrl-C, or a notebook's stop button) saves the run after the current step and
    returns it; the same call, without `overwrite`, resumes. A second interrupt raises
    `KeyboardInterrupt` at once.

    The call seeds the random numbers of Python, NumPy and TensorFlow by
    `keras.utils.set_random_seed(seed)`.

    TensorFlow fixes its devices when it is first used: later calls in a process can have as many
    towers or fewer.

    Args:
      recipe: name of a recipe in `configs/`; default: `speed94`, or none if `settings` have a
        `model`.
      callbacks: objects with any of `on_start(run)`, `on_step(step, metrics)`, `on_evaluation(step,
        evaluation)` and `on_end(run)`; a function is an `on_step`. What a callback raises is raised
        here once the step is saved.
      **settings: flags of `cifar-towers train` by name, such as `num_gpus=2`; they override those
        of the recipe.

    Raises:
      RunError: a setting is wrong or only for the programs (`seeds`, `strategy="multi_worker"`),
        the data cannot be read, training diverges, or the last step is unsaved.
      TypeError: there is no such setting.
      KeyboardInterrupt: there was no step to save yet, or it is the second interrupt.
    """
    if settings.get("seeds"):
        raise UsageError(
            "seeds works only with the command cifar-towers; here, call train once for each seed"
        )
    config = make_config(TrainConfig, {"recipe": recipe, **settings})
    if config.strategy == "multi_worker":
        raise UsageError("strategy=multi_worker works only with the command cifar-towers")
    with _visible_log():
        source, config = locate_data(config)
        try:
            train_run(config, source, StopSignals([signal.SIGINT]), callbacks=callbacks)
        except Interrupted as interrupt:
            print(f"interrupted: {interrupt}")
    return Run(config.directory)


def locate_data(config: TrainConfig) -> tuple["Source", TrainConfig]:
    """Locate the data of a run. Return a config that names the data set which `auto` stands for.

    Raises:
      DataError: there are no such data.
    """
    from cifar_towers.data import sources

    source = sources.find(config.dataset, config.data_dir)
    if config.dataset == "auto":
        # once CIFAR-10 is there, the same command must not find a run on synthetic data
        config = dataclasses.replace(config, dataset=source.name)
    return source, config


def train_run(
    config: TrainConfig,
    source: "Source",
    signals: StopSignals,
    cluster: Workers | None = None,
    callbacks: Sequence[Any] = (),
) -> dict[str, Any]:
    """Train or resume a run, alone or as a worker of a cluster, or return the stored result of a
    finished run.

    What can be refused without TensorFlow is refused before it is imported. See `trainer.train`.
    """
    from cifar_towers.data import sources
    from cifar_towers.evaluation.score import describe_score, reported_score
    from cifar_towers.reporting.phase_timer import PhaseTimer
    from cifar_towers.runs.directory import open_run, warn_of_edited_model

    timer = PhaseTimer()  # TensorFlow's import is a part of the start
    with contextlib.ExitStack() as stack:
        if not _is_training.acquire(blocking=False):
            raise UsageError("another run is being trained in this process; start a second process")
        stack.callback(_is_training.release)
        if cluster and cluster.index:  # worker 0 alone writes the run
            unused = tempfile.TemporaryDirectory(prefix=f"cifar_towers-worker{cluster.index}-")
            config = dataclasses.replace(config, train_dir=stack.enter_context(unused))
        directory = stack.enter_context(open_run(config))

        result = None if cluster else directory.stored_result()
        if result:
            assert directory.saved  # as there is a result
            _, metadata = directory.saved
            prefix, _ = split_path(source.name)
            if prefix or source.name != result["dataset"]:  # the data may have changed
                dataset = sources.load(source, config.validation_examples, config.image_size)
                dataset.check_unchanged(metadata, directory.path)
            warn_of_edited_model(config, metadata, directory.path)
            score = describe_score(reported_score(result["evaluations"]) or {})
            log.info(
                f"{directory.path} is complete at step {result['step']}, so nothing is trained; "
                f"another --train_dir starts a new run: {source.name} {score}"
            )
            return result

        stack.enter_context(tensorflow_imported())
        from cifar_towers import trainer
        from cifar_towers.callbacks import Callbacks

        of_run = Callbacks(callbacks, Run(directory.path))
        return trainer.train(config, source, directory, signals, cluster, of_run, timer)


@contextlib.contextmanager
def _visible_log() -> Iterator[None]:
    """Print the package's log lines inside, unless the process shows lines of level INFO by
    handlers of its own.

    A level that the caller has set for the logger `cifar_towers` stays as it is.
    """
    logger = logging.getLogger("cifar_towers")
    handler = logging.StreamHandler(sys.stdout)
    level = logger.level
    propagate = logger.propagate
    if not (logger.hasHandlers() and logger.isEnabledFor(logging.INFO)):
        logger.addHandler(handler)
        # a library's first warning gives the root logger a handler for all levels
        logger.propagate = False
        logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
