"""The programs, as `scripts/` and the console commands call them: first all checks, then what is slow."""

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from cifar_towers.benchmark.settings import BenchmarkConfig, SpeedrunConfig
from cifar_towers.cli.cluster import join_cluster, resolve_cluster
from cifar_towers.cli.flags import Config, parse_command_line
from cifar_towers.cli.shutdown import ShutdownHandler
from cifar_towers.cli.tf_import import import_tensorflow
from cifar_towers.cli.tool_configs import (
    CompareConfig,
    EvaluateConfig,
    ExportConfig,
    LaunchConfig,
    PredictConfig,
    ReportConfig,
)
from cifar_towers.config import TrainConfig, parse_seeds
from cifar_towers.errors import Interrupted, RunError, UsageError, error_line, error_text
from cifar_towers.multi_worker.launcher import LAUNCH_VARIABLE

log = logging.getLogger(__name__)


def _program(body: Callable[[ShutdownHandler], int | None]) -> Callable[[], None]:
    """A program that does what `body` says, and ends with its exit code or with that of what it raises."""

    @functools.wraps(body)
    def program() -> None:
        sys.exit(_run(body))

    return program


@_program
def train(stop: ShutdownHandler) -> None:
    """`train.py`: trains a recipe."""
    config = parse_command_line(
        TrainConfig,
        sys.argv,
        "Trains a net for CIFAR-10 on towers.\n\n  train.py --flagfile=configs/speed94.cfg --num_gpus=2",
    )
    several = parse_seeds(config.seeds)
    with join_cluster(config) as coordinator:
        source = _find_data(config)
        from cifar_towers import trainer
        from cifar_towers.cli import seeds

        launch_id = os.environ.get(LAUNCH_VARIABLE, "")
        if several:
            seeds.train_seeds(config, several, source, stop, launch_id)
        else:
            trainer.train(config, source, stop, coordinator, launch_id)


@_program
def launch(stop: ShutdownHandler) -> int:
    """`launch.py`: starts the workers of a cluster on this machine, and all again when one is lost."""
    try:
        config = parse_command_line(
            LaunchConfig,
            sys.argv,
            "Trains on several workers on this machine, a process each, or supervises one; what stands after -- are\n"
            "flags of train.py. When a worker is lost, all are started again and go on from the last checkpoint.\n\n"
            "  launch.py --num_workers=2 -- --flagfile=configs/speed94.cfg --train_dir=runs/two-workers",
        )
    except UsageError as error:
        if "--" in sys.argv:
            raise
        raise UsageError(f"{error}; flags of train.py stand after --") from None
    strategy = ["--strategy=multi_worker"] if config.num_workers else []
    training = parse_command_line(TrainConfig, [sys.argv[0], *config.command, *strategy], "")
    if config.num_workers:
        training.tower_batch_size(max(training.num_gpus, 1) * config.num_workers)
    else:
        resolve_cluster(training, os.environ)
    from cifar_towers.benchmark.processes import script_path
    from cifar_towers.multi_worker import launcher

    stop.announce = lambda line: None  # the workers announce it
    stop.defer_signals()
    return launcher.launch(
        [sys.executable, script_path("train.py"), *config.command],
        config.num_workers,
        config.max_restarts,
        log.info,
        stop,
    )


@_program
def evaluate(stop: ShutdownHandler) -> None:
    """`evaluate.py`: scores a checkpoint."""
    config = _begin(
        EvaluateConfig,
        stop,
        "nothing was changed",
        "Scores a checkpoint of a run, the newest unless --step is given.\n\n"
        "  evaluate.py --train_dir=runs/speed94-seed0 --tta=2",
    )
    from cifar_towers.inference.evaluate import evaluate_checkpoint

    with _answering():
        print(evaluate_checkpoint(config))


@_program
def predict(stop: ShutdownHandler) -> None:
    """`predict.py`: says what pictures show."""
    config = _begin(
        PredictConfig,
        stop,
        "nothing was changed",
        "Says what pictures show, by a checkpoint of a run: the three likeliest classes of each.\n\n"
        "  predict.py --train_dir=runs/speed94-seed0 picture.jpg folder/ *.png\n\n"
        "JPEG, PNG, GIF, BMP and WebP, up to 25 megapixels and 20 MB (WebP: 16 megapixels). The net sees the central\n"
        "square, upright, over white where it is transparent, resized to what it was trained on.",
    )
    from cifar_towers.inference.predict import predict_images

    with _answering():
        predict_images(config)


@_program
def export(stop: ShutdownHandler) -> int:
    """`export.py`: writes a trained net for use elsewhere."""
    config = _begin(
        ExportConfig,
        stop,
        "what was there before is there still",
        "Writes the net of a run's checkpoint for use elsewhere, with all that is done to a picture before and\n"
        "after it: uint8 pictures of any size in, probabilities and names of classes out.\n\n"
        "  export.py --train_dir=runs/speed94-seed0 --format=saved_model",
    )
    from cifar_towers.inference.export import export_model

    return 0 if export_model(config) else 1


@_program
def compare_runs(stop: ShutdownHandler) -> int:
    """`compare_runs.py`: says whether two runs are the same. Exit code 0 if so, 1 if not, as `diff`."""
    config = _begin(
        CompareConfig,
        stop,
        "nothing was changed",
        "Says whether two runs are the same to the bit, and where and why they part.\n\n"
        "  compare_runs.py runs/one runs/other",
    )
    from cifar_towers.inference import compare

    finding = compare.compare_runs(*map(Path, config.runs))
    with _answering():
        print(finding.text)
    return 0 if finding.equal else 1


@_program
def report(stop: ShutdownHandler) -> None:
    """`report.py`: writes one HTML page about some runs."""
    config = parse_command_line(
        ReportConfig,
        sys.argv,
        "Writes one HTML page about some runs, for somebody without TensorBoard: all it shows is in it.\n\n"
        "  report.py runs/one [runs/other ...] [--out=FILE]\n\n"
        "Runs that differ in nothing but the seed are shown as their mean, with a band from the lowest to the\n"
        "highest.",
    )
    stop.exit_immediately_from_now("nothing was written")
    from cifar_towers.files import run_files
    from cifar_towers.reporting import html_report

    runs = [Path(run) for run in config.runs]
    default = Path(runs[0] if len(runs) == 1 else "", run_files.REPORT)
    with _answering():
        print(html_report.write(runs, Path(config.out or default)))


@_program
def benchmark(stop: ShutdownHandler) -> None:
    """`benchmark.py`: measures placements, strategies and numbers of towers for a recipe's step."""
    config = parse_command_line(
        BenchmarkConfig,
        sys.argv,
        "Measures a recipe's step on this machine: placements, strategies, numbers of towers.\n\n"
        "  benchmark.py --flagfile=configs/speed94.cfg --towers=1,2,4",
    )
    recipe = dataclasses.replace(config.recipe, hard_example_pool=0)  # the bare step, without selecting examples
    config = dataclasses.replace(config, recipe=recipe)
    stop.exit_immediately_from_now("the benchmark ends unfinished; the same command starts it again")
    _find_data(recipe)
    from cifar_towers.benchmark import runner

    runner.run_benchmark(config, initializer=import_tensorflow)


@_program
def speedrun(stop: ShutdownHandler) -> None:
    """`speedrun.py`: times a recipe over seeds, to a target if one is given, and its step beside others'."""
    config = parse_command_line(
        SpeedrunConfig,
        sys.argv,
        "Times a recipe over seeds, each in a process of its own, against what this machine could do; and its step\n"
        "beside others'. The same command goes on where it stopped. Runs are not evaluated on the way.\n\n"
        "  speedrun.py --flagfile=configs/speed94.cfg --target=0.94 --seeds=0,1,2",
    )
    stop.exit_immediately_from_now("the seeds that are done are kept; the same command goes on")
    source = _find_data(config.recipe)
    from cifar_towers.benchmark import race

    race.run_race(config, source)


def _begin(config_class: type[Config], stop: ShutdownHandler, left: str, description: str) -> Config:
    """The settings of a program that can be left at any time, with the message `left`; TensorFlow is imported."""
    config = parse_command_line(config_class, sys.argv, description)
    stop.exit_immediately_from_now(left)
    import_tensorflow()
    return config


@contextlib.contextmanager
def _answering():
    """Around the printing of what a program was asked for.

    Raises:
      RunError: nobody will read it, as where the disk that it goes to is full.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted
        raise
    except OSError as error:
        raise RunError(f"the answer cannot be written ({error_text(error)}); give it another place to go to") from error


def _find_data(config: TrainConfig):
    """Where the data will come from; TensorFlow, which is slow, is imported when that is known."""
    from cifar_towers.data import sources

    source = sources.find(config.dataset, config.data_dir)
    import_tensorflow()
    return source


def _run(program: Callable[[ShutdownHandler], int | None]) -> int:
    """Calls a program and turns what it raises into one line and an exit code."""
    stop = ShutdownHandler()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("cifar_towers").setLevel(logging.INFO)
    try:
        try:
            stop.install()  # a signal may come before it returns
            code = program(stop) or 0
            stop.ignore_signals()
        except Exception as error:
            stop.reraise_as_interrupt(error)
            raise
    except (RunError, Interrupted) as error:
        stop.ignore_signals()
        print(error_line(error), file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        code = 1
    except SystemExit as left:  # --help has been printed
        code = left.code
    except Exception:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # the reader of our output has gone, or the disk it goes to is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
