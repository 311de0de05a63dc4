"""The command-line programs. Each checks its flags before it imports TensorFlow, which takes seconds."""

import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.cli.program import checked_output, find_data, import_tensorflow, parse, program, start_tool
from cifar_towers.config import TrainConfig, parse_seeds, programs
from cifar_towers.errors import DivergedError, RunError, UsageError
from cifar_towers.inference.run import Run
from cifar_towers.multi_worker import cluster_spec, launcher
from cifar_towers.multi_worker.cluster_spec import ClusterSpec
from cifar_towers.signals import StopSignals

if TYPE_CHECKING:
    from cifar_towers.data.sources import Source

log = logging.getLogger(__name__)


@program
def train() -> None:
    """Train an image classifier on towers: copies of the model that share each batch, one on each GPU.

    train.py --num_gpus=2                               CIFAR-10 to 94 %, by the recipe speed94
    train.py --recipe=resnet20 --seeds=0,1,2            another recipe, with three seeds
    train.py --dataset=folder:photos --batch_size=128   pictures of your own, a subfolder a class

    Without --recipe, --flagfile and --model the recipe is speed94. Other flags override the recipe's
    settings, wherever they stand. The same command resumes, unless it has --overwrite.
    """
    config = parse(TrainConfig, train)
    cluster = join_cluster(config)
    if config.seeds:
        train_seeds(config)
    else:
        start_training(config, StopSignals(), cluster)


def start_training(
    config: TrainConfig,
    signals: StopSignals,
    cluster: ClusterSpec | None = None,
    callbacks: Sequence = (),
    make_handle: Callable[[Path], Run] = Run,
) -> dict:
    """Train or resume a run, or return the stored result of a finished one. See `trainer.train`.

    What can be refused without TensorFlow is refused before it is imported, which takes seconds.
    """
    from cifar_towers.checkpointing.run_directory import open_run
    from cifar_towers.evaluation.score import describe_score, reported_score
    from cifar_towers.reporting.phase_timer import PhaseTimer

    timer = PhaseTimer()  # TensorFlow's import is a part of the start
    source, config = locate(config)
    with contextlib.ExitStack() as stack:
        if cluster and cluster.index:  # worker 0 alone writes the run
            directory = tempfile.TemporaryDirectory(prefix=f"cifar_towers-worker{cluster.index}-")
            config = dataclasses.replace(config, train_dir=stack.enter_context(directory))
        run = stack.enter_context(open_run(config))
        if result := None if cluster else run.stored_result():
            score = describe_score(reported_score(result["evaluations"]) or {})
            log.info(f"{run.path} is complete at step {result['step']}: {score}")
            make_handle(run.path)
            return result
        import_tensorflow()
        from cifar_towers import trainer

        return trainer.train(config, source, run, signals, cluster, callbacks, make_handle, timer)


def locate(config: TrainConfig) -> tuple["Source", TrainConfig]:
    """Locate the data of a run. If synthetic data replace CIFAR-10, the default directory says so."""
    from cifar_towers.data import sources

    source = sources.find(config.dataset, config.data_dir)
    if source.banner and not config.train_dir:
        config = dataclasses.replace(config, train_dir=f"runs/{config.name}-synthetic-seed{config.seed}")
    return source, config


def train_seeds(config: TrainConfig) -> None:
    """Train one run for each seed; print mean, standard deviation and n of the final accuracies.

    If seeds diverge, the others are trained and counted before a DivergedError is raised.
    """
    from cifar_towers.checkpointing.run_directory import open_run
    from cifar_towers.evaluation.score import score_name
    from cifar_towers.inference.runs import Sample
    from cifar_towers.reporting.phase_timer import training_seconds
    from cifar_towers.reporting.records import format_rate

    accuracies: dict[str, list[float]] = {}
    results: list[dict] = []
    diverged: dict[int, str] = {}
    seeds = parse_seeds(config.seeds)
    runs = [config.of_seed(seed) for seed in seeds]
    for run in runs if config.overwrite else []:  # all at once: a later start without it resumes them
        with open_run(locate(run)[1]) as directory:
            directory.clear()
    for run in runs:
        try:
            results.append(start_training(dataclasses.replace(run, overwrite=False), StopSignals()))
        except DivergedError as error:
            diverged[run.seed] = str(error)
            log.error(f"seed {run.seed} diverged: {error}")
        sys.modules["keras"].backend.clear_session()
    for result in results:
        for score in result["evaluations"]:
            accuracies.setdefault(score_name(score), []).append(score["accuracy"])
    speeds = [result["images_per_sec"] for result in results if result["images_per_sec"]]  # of runs with timed steps
    speed = f": {format_rate(Sample.of(speeds).mean)} images/s" if speeds else ""
    missing = f" ({len(results)} of {len(seeds)}; seed {', '.join(map(str, diverged))} diverged)" if diverged else ""
    print(f"{config.name}, seeds {', '.join(map(str, seeds))}{missing}{speed}")
    if config.target_accuracy:
        seconds = [training_seconds(result["seconds"]) for result in results if result["reached"]]
        mean = f", after {Sample.of(seconds).mean:.1f} s of training in the mean" if seconds else ""
        print(f"stopped at {100 * config.target_accuracy:.2f} %: {len(seconds)} of {len(seeds)}{mean}")
    for name, values in accuracies.items():
        print(f"accuracy, {name}: {Sample.of(values).describe_percent()}")
    if diverged:
        raise DivergedError("; ".join(f"seed {seed}: {error}" for seed, error in diverged.items()))


def join_cluster(config: TrainConfig) -> ClusterSpec | None:
    """Return the workers of `resolve_cluster`, and warn of the port that this process opens."""
    cluster = resolve_cluster(config, os.environ)
    if not cluster:
        return None
    address = cluster.addresses[cluster.index]
    if cluster.index:
        logging.getLogger("cifar_towers").setLevel(logging.WARNING)  # the chief logs for all workers
        logging.getLogger("cifar_towers.multi_worker").setLevel(logging.INFO)  # except where a worker is
    log.info(
        f"{cluster.name(cluster.index)}: TensorFlow opens port {address.rpartition(':')[2]} on every interface, "
        "without authentication; see docs/cluster.md"
    )
    return cluster


def resolve_cluster(config: TrainConfig, environment: Mapping[str, str]) -> ClusterSpec | None:
    """Return the workers of strategy=multi_worker, from flags, `TF_CONFIG` or Slurm's variables; None for one process.

    Raises:
      UsageError: no workers are given, they make no cluster, or they cannot share the batch evenly.
    """
    if config.strategy != "multi_worker":
        return None
    cluster = cluster_spec.resolve_cluster(config.workers, config.worker_index, environment)
    config.check_shares(max(config.num_gpus, 1) * cluster.size)
    return cluster


@program
def launch() -> int:
    """Train with several workers on this machine, one process each, or supervise one process. The flags
    after -- are those of train.py. When a worker fails, all restart from the last checkpoint.

    launch.py --num_workers=2 -- --recipe=speed94 --train_dir=runs/two-workers
    """
    try:
        config = parse(programs.LaunchConfig, launch)
        strategy = ["--strategy=multi_worker"] if config.num_workers else []
        training = parse_command_line(TrainConfig, [sys.argv[0], *config.command, *strategy], "")
    except UsageError as error:
        if "--" in sys.argv:
            raise
        raise UsageError(f"{error}; flags of train.py stand after --") from None
    if config.num_workers:
        if training.workers or training.worker_index >= 0:
            raise UsageError(
                f"num_workers={config.num_workers} starts workers on this machine, at addresses of its own; leave "
                "--workers and --worker_index, or leave --num_workers on each of several machines"
            )
        training.check_shares(max(training.num_gpus, 1) * config.num_workers)
    else:
        resolve_cluster(training, os.environ)
    command = [*command_for(train), *config.command]
    return launcher.launch(command, config.num_workers, config.max_restarts, log.info)


@program
def evaluate() -> None:
    """Evaluate a checkpoint of a run, the newest unless --step is given.

    evaluate.py --train_dir=runs/speed94-seed0 --tta=2
    evaluate.py --train_dir=runs/speed94-seed0 --dataset='cifar10_corrupted/*'

    NLL is the negative log likelihood, ECE the expected calibration error. With --tta both are of the mean logits.
    The table's column "most often taken for" names, for each class, the wrong class that most of its images get.
    --json adds the confusion matrix: rows are true classes, columns predicted ones.
    """
    config = start_tool(programs.EvaluateConfig, evaluate)
    from cifar_towers.inference.evaluate import evaluate_checkpoint

    with checked_output():
        print(evaluate_checkpoint(config))


@program
def predict() -> None:
    """Print the three most likely classes of each image file, by a checkpoint of a run.

    predict.py --train_dir=runs/speed94-seed0 picture.jpg folder/ *.png

    JPEG, PNG, GIF, BMP and WebP, up to 25 megapixels and 20 MB (WebP: 16 megapixels). The model gets the
    central square, upright, over white where it is transparent, resized to the size of the training images.
    """
    config = start_tool(programs.PredictConfig, predict)
    from cifar_towers.inference.predict import predict_images

    with checked_output():
        predict_images(config)


@program
def export() -> None:
    """Export the model of a checkpoint with its preprocessing: uint8 images [B, S, S, 3] of the training's size
    in, class probabilities [B, C] out. The names of the classes are in classes.txt beside it.

    export.py --train_dir=runs/speed94-seed0 --format=saved_model
    """
    config = start_tool(programs.ExportConfig, export)
    from cifar_towers.inference.export import export_model

    export_model(config)


@program
def compare_runs() -> int:
    """Compare two runs: are they equal to the bit, and if not, where and why do they differ?

    compare_runs.py runs/one runs/other
    """
    config = start_tool(programs.CompareConfig, compare_runs)
    from cifar_towers.inference import compare

    same, text = compare.compare_runs(*map(Path, config.runs))
    with checked_output():
        print(text)
    return 0 if same else RunError.exit_code


@program
def report() -> None:
    """Write a self-contained HTML report of runs, for readers without TensorBoard.

    report.py runs/one [runs/other ...] [--out=FILE]

    Runs that differ only in the seed are shown as their mean, with a band of one standard deviation.
    """
    config = parse(programs.ReportConfig, report)
    from cifar_towers import files
    from cifar_towers.inference.runs import read_runs

    directories = [Path(run) for run in config.runs]
    records = read_runs(directories)
    from cifar_towers.inference import report as page  # loads Matplotlib, after all that usually fails

    default = Path(directories[0] if len(directories) == 1 else "", files.REPORT)
    with checked_output():
        print(page.write(records, Path(config.out or default)))


@program
def runs() -> None:
    """List runs with their state and what they reached.

    runs.py                                        all below runs/, a line each
    runs.py 'speed94*' --sort=accuracy             some, the best last
    evaluate.py --train_dir=$(runs.py --best=speed94)

    Accuracies are those of the averaged weights if a run keeps an average, otherwise of the raw weights.
    --best ranks runs by validation accuracy if every run has it, otherwise by test accuracy.
    """
    config = parse(programs.RunsConfig, runs)
    from cifar_towers.inference import runs as trained

    found = trained.find_runs(Path(config.runs_dir), *config.pattern)
    found = trained.sort_runs(found, config.sort)
    with checked_output():
        if config.best:
            print(trained.best_run(found, config.best).directory)
        elif config.json:
            print(trained.format_json(found))
        else:
            print(trained.format_table(found) if found else "no runs")


@program
def benchmark() -> None:
    """Measure short trainings of a recipe on this machine with different placements, strategies and numbers of
    towers. Without --recipe, --flagfile and --model the recipe is speed94; its flags are passed on.

    benchmark.py --recipe=speed94 --towers=1,2,4

    After Ctrl-C the finished trainings are reported. The same command starts again.
    """
    config = parse(programs.BenchmarkConfig, benchmark)
    find_data(config.recipe)
    from cifar_towers.benchmark import runner

    runner.run_benchmark(config, command_for(train))


def command_for(function: Callable[[], None]) -> list[str]:
    """Return the command that calls a function of this module in a process of its own, with this one's import path.

    The command works in a checkout and in an installed copy.
    """
    program = Path(sys.argv[0])
    named = program.with_name(program.name.replace("launch", function.__name__))  # a run records its program's name
    setup = f"import sys; sys.path[:] = {sys.path}; sys.argv[0] = {str(named)!r}"
    return [sys.executable, "-c", f"{setup}; from {__name__} import {function.__name__} as run; run()"]
