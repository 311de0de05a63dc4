"""The command-line programs. Each checks its flags before it imports TensorFlow, which takes seconds."""

import dataclasses
import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cifar_towers.cli.flags import parse_command_line
from cifar_towers.cli.program import checked_output, confirm, find_data, import_tensorflow, parse, program, start_tool
from cifar_towers.cli.run import Run
from cifar_towers.config import TrainConfig, parse_seeds, programs
from cifar_towers.config.train_config import check_training, claimed_accuracy, recipe_fields, recipe_names
from cifar_towers.errors import DivergedError, RunError, UsageError, command
from cifar_towers.multi_worker import cluster_spec, launcher
from cifar_towers.multi_worker.cluster_spec import ClusterSpec
from cifar_towers.shutdown import ShutdownHandler

if TYPE_CHECKING:
    from cifar_towers.data import sources

log = logging.getLogger(__name__)


@program
def train(shutdown: ShutdownHandler) -> None:
    """Train an image classifier on towers: copies of the model that share each batch, one on each GPU.

    train.py --num_gpus=2                               CIFAR-10 to 94 %, by the recipe speed94
    train.py --recipe=resnet20 --seeds=0,1,2            another recipe, with three seeds
    train.py --dataset=folder:photos --batch_size=128   pictures of your own, a subfolder a class

    Without --recipe, --flagfile and --model the recipe is speed94. Other flags override the recipe's
    settings, wherever they stand. The same command resumes, unless it has --overwrite.
    """
    config = parse(TrainConfig, train)
    cluster = join_cluster(config)
    if measured := measured_accuracy(config):
        log.info(f"recipe {config.recipe}, measured to reach {measured}")
    start_training(config, shutdown, cluster, os.environ.get(launcher.LAUNCH_VARIABLE, ""))


def start_training(
    config: TrainConfig,
    shutdown: ShutdownHandler,
    cluster: ClusterSpec | None = None,
    launch_id: str = "",
    callbacks: Sequence = (),
    make_handle: Callable[[Path], Run] = Run,
) -> None:
    """Refuse what can be refused without TensorFlow, then train a run, or one for each of the config's seeds.

    Raises:
      RunError: the weights are not those of `expect_sha256`. Other errors, and the arguments: see `trainer.train`.
    """
    from cifar_towers.checkpointing import workdir
    from cifar_towers.data import sources
    from cifar_towers.reporting.phase_timer import PhaseTimer

    timer = PhaseTimer()  # TensorFlow's import is a part of the start
    check_training(config)
    source = sources.find(config.dataset, config.data_dir)
    if not (cluster and cluster.index):  # only worker 0 has a directory
        for run in [config.of_seed(seed) for seed in parse_seeds(config.seeds)] or [config]:
            run = workdir.choose_directory(run, source.banner, launch_id)
            workdir.check_settings(run, launch_id)
            if source.is_among_pictures(run.directory):
                raise UsageError(
                    f"train_dir={run.directory} is among the pictures of {source.name}; give one outside of it"
                )
    import_tensorflow()
    if config.seeds:
        train_seeds(config, source, shutdown, launch_id)
        return
    from cifar_towers import trainer

    result = trainer.train(config, source, shutdown, cluster, launch_id, callbacks, make_handle, timer)
    if not result["weights_sha256"].startswith(config.expect_sha256):
        raise RunError(
            f"the weights after step {result['step']} have sha256 {result['weights_sha256'][:16]}, not expect_sha256="
            f"{config.expect_sha256[:16]}: other settings, data, processor or versions train other bits; "
            f"{command('compare_runs.py')} tells where two runs part"
        )


def train_seeds(config: TrainConfig, source: "sources.Source", shutdown: ShutdownHandler, launch_id: str = "") -> None:
    """Train one run for each seed; print mean, standard deviation and n of the final accuracies.

    The same statistics of every scalar are written for TensorBoard, to `<recipe>-seeds` beside the runs, or to `seeds`
    within `train_dir`. If seeds diverge, the others are trained and counted before a DivergedError is raised.
    """
    import keras

    from cifar_towers import trainer
    from cifar_towers.checkpointing import workdir
    from cifar_towers.reporting.phase_timer import training_seconds
    from cifar_towers.reporting.run_records import format_rate
    from cifar_towers.reporting.sample import Sample
    from cifar_towers.reporting.seed_statistics import SeedStatistics

    accuracies: dict[str, list[float]] = {}
    results: list[dict] = []
    diverged: dict[int, str] = {}
    seeds = parse_seeds(config.seeds)
    runs = [config.of_seed(seed) for seed in seeds]
    chosen = [workdir.choose_directory(run, source.banner, launch_id) for run in runs]
    directories, overwritten = [run.directory for run in chosen], [run.directory for run in chosen if run.overwrite]
    launch_id = launch_id or uuid.uuid4().hex  # written to cleared directories: no later run clears them again
    statistics = directories[0].with_name(directories[0].name.removesuffix(str(seeds[0])) + "s")
    with SeedStatistics(statistics, directories, overwritten).updated_in_background():
        for run in runs:
            others = [other for other in runs if other is not run]
            try:
                result = trainer.train(run, source, shutdown, launch_id=launch_id, others=others)
                results.append(result)
            except DivergedError as error:
                diverged[run.seed] = str(error)
                log.error(f"seed {run.seed} diverged: {error}")
            keras.backend.clear_session()
    for result in results:
        for score in result["evaluations"]:
            name = f"{score['split']} accuracy, {score['weights']} weights, TTA {score['tta']}"
            accuracies.setdefault(name, []).append(score["accuracy"])
    speeds = [result["images_per_sec"] for result in results if result["images_per_sec"]]  # of runs with timed steps
    speed = f": {format_rate(Sample.of(speeds).mean)} images/s" if speeds else ""
    missing = f" ({len(results)} of {len(seeds)}; seed {', '.join(map(str, diverged))} diverged)" if diverged else ""
    if source.banner:
        print(source.banner)
    print(f"{config.name}, seeds {', '.join(map(str, seeds))}{missing}{speed}")
    if config.target_accuracy:
        seconds = [training_seconds(result["seconds"]) for result in results if result["reached"]]
        mean = f", after {Sample.of(seconds).mean:.1f} s of training in the mean" if seconds else ""
        print(f"stopped at {100 * config.target_accuracy:.2f} %: {len(seconds)} of {len(seeds)}{mean}")
    for name, values in accuracies.items():
        print(f"{name}: {Sample.of(values).describe_percent()}")
    if diverged:
        raise DivergedError("; ".join(f"seed {seed}: {error}" for seed, error in diverged.items()))


def join_cluster(config: TrainConfig) -> ClusterSpec | None:
    """Return the workers of `resolve_cluster`. Warn of the port that this process opens; refuse a public address."""
    cluster = resolve_cluster(config, os.environ)
    if not cluster:
        return None
    address = cluster.addresses[cluster.index]
    if not config.allow_public_cluster:
        cluster_spec.check_not_public(address, config.worker_wait_seconds)
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
def launch(shutdown: ShutdownHandler) -> int:
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
    shutdown.announce = lambda line: None  # the workers announce it
    shutdown.defer_signals()
    command = [*command_for(train), *config.command]
    return launcher.launch(command, config.num_workers, config.max_restarts, log.info, shutdown)


@program
def evaluate(shutdown: ShutdownHandler) -> None:
    """Evaluate a checkpoint of a run, the newest unless --step is given.

    evaluate.py --train_dir=runs/speed94-seed0 --tta=2
    evaluate.py --train_dir=runs/speed94-seed0 --corruptions='*_3'

    NLL is the negative log likelihood, ECE the expected calibration error. With --tta both are of the mean logits.
    The table's column "most often taken for" names, for each class, the wrong class that most of its images get.
    --json adds the confusion matrix: rows are true classes, columns predicted ones.
    """
    config = start_tool(programs.EvaluateConfig, evaluate, shutdown, "nothing was changed")
    from cifar_towers.inference.evaluate import evaluate_checkpoint

    with checked_output():
        print(evaluate_checkpoint(config))


@program
def predict(shutdown: ShutdownHandler) -> None:
    """Print the three most likely classes of each image file, by a checkpoint of a run.

    predict.py --train_dir=runs/speed94-seed0 picture.jpg folder/ *.png

    JPEG, PNG, GIF, BMP and WebP, up to 25 megapixels and 20 MB (WebP: 16 megapixels). The model gets the
    central square, upright, over white where it is transparent, resized to the size of the training images.
    """
    config = start_tool(programs.PredictConfig, predict, shutdown, "nothing was changed")
    from cifar_towers.inference.predict import predict_images

    with checked_output():
        predict_images(config)


@program
def export(shutdown: ShutdownHandler) -> int:
    """Export the model of a checkpoint with its pre- and postprocessing: uint8 images of any size in, class
    probabilities and names out.

    export.py --train_dir=runs/speed94-seed0 --format=saved_model
    """
    config = start_tool(programs.ExportConfig, export, shutdown, "earlier exports are unchanged")
    from cifar_towers.inference.export import export_model

    return 0 if export_model(config) else RunError.exit_code


@program
def compare_runs(shutdown: ShutdownHandler) -> int:
    """Compare two runs: are they equal to the bit, and if not, where and why do they differ?

    compare_runs.py runs/one runs/other
    """
    config = start_tool(programs.CompareConfig, compare_runs, shutdown, "nothing was changed")
    from cifar_towers.inference import compare

    same, text = compare.compare_runs(*map(Path, config.runs))
    with checked_output():
        print(text)
    return 0 if same else RunError.exit_code


@program
def report(shutdown: ShutdownHandler) -> None:
    """Write a self-contained HTML report of runs, for readers without TensorBoard.

    report.py runs/one [runs/other ...] [--out=FILE]

    Runs that differ only in the seed are shown as their mean, with a band of one standard deviation.
    """
    config = parse(programs.ReportConfig, report)
    shutdown.exit_immediately_from_now("nothing was written")
    from cifar_towers import files
    from cifar_towers.reporting.run_records import read_runs

    directories = [Path(run) for run in config.runs]
    records = read_runs(directories)
    from cifar_towers.reporting import html_report  # loads Matplotlib, after all that usually fails

    default = Path(directories[0] if len(directories) == 1 else "", files.REPORT)
    with checked_output():
        print(html_report.write(records, Path(config.out or default)))


@program
def runs(shutdown: ShutdownHandler) -> None:
    """List runs with their state and what they reached, or delete runs.

    runs.py                                        all below runs/, a line each
    runs.py 'speed94*' --sort=accuracy             some, the best last
    runs.py --delete runs/speed94-seed3            after a question
    evaluate.py --train_dir=$(runs.py --best=speed94)

    Accuracies are those of the averaged weights if a run keeps an average, otherwise of the raw weights.
    --best ranks runs on the recipe's own data set, by accuracies on validation images if all of them have some.
    """
    config = parse(programs.RunsConfig, runs)
    shutdown.exit_immediately_from_now("nothing more is deleted")
    from cifar_towers.inference import runs as trained

    if config.delete:
        print(trained.delete_runs([Path(argument) for argument in config.arguments], confirm))
        return
    root, pattern = Path(config.runs_dir), next(iter(config.arguments), "*")
    found = trained.sort_runs(trained.find_runs(root, pattern, config.verify), config.sort)
    with checked_output():
        if config.best:
            recipe = read_recipe(config.best)
            own_data = recipe.dataset.replace("auto", "cifar10") if recipe else ""
            print(trained.best_run(found, config.best, own_data).run)
        elif config.json:
            print(trained.format_json(found))
        else:
            print(trained.format_table(found, root) if found else "no runs")


@program
def benchmark(shutdown: ShutdownHandler) -> None:
    """Measure the training step of a recipe on this machine with different placements, strategies and numbers of
    towers. Without --recipe, --flagfile and --model the recipe is speed94.

    benchmark.py --recipe=speed94 --towers=1,2,4
    benchmark.py --placement_only
    """
    config = parse(programs.BenchmarkConfig, benchmark)
    recipe = dataclasses.replace(config.recipe, hard_example_pool=0)  # the bare step, without selecting examples
    config = dataclasses.replace(config, recipe=recipe)
    shutdown.exit_immediately_from_now("the benchmark is incomplete; the same command starts it again")
    find_data(recipe)
    from cifar_towers.benchmark import runner

    runner.run_benchmark(config, worker_command=command_for(serve_benchmark))


def serve_benchmark() -> None:
    """Measure in a process that the benchmark starts for each number of towers."""
    import_tensorflow()
    from cifar_towers.benchmark import worker

    worker.serve()


def command_for(function: Callable[[], None]) -> list[str]:
    """Return the command that calls a function of this module in a process of its own, with this one's import path.

    The command works in a checkout and in an installed copy.
    """
    program = Path(sys.argv[0])
    named = program.with_name(program.name.replace("launch", function.__name__))  # a run records its program's name
    setup = f"import sys; sys.path[:] = {sys.path}; sys.argv[0] = {str(named)!r}"
    return [sys.executable, "-c", f"{setup}; from {__name__} import {function.__name__} as run; run()"]


def read_recipe(name: str) -> TrainConfig | None:
    """Return a recipe of `configs/`; None if there is none of this name."""
    return parse_command_line(TrainConfig, ["", f"--recipe={name}"], "") if name in recipe_names() else None


def measured_accuracy(config: TrainConfig) -> str:
    """Return the accuracy that the recipe was measured to reach; empty if unknown, or if flags change the training."""
    recipe = read_recipe(config.recipe)
    if not recipe:
        return ""
    whole = config.max_steps == recipe.max_steps and not config.target_accuracy
    same_data = config.dataset in (recipe.dataset, "auto")  # a fallback to other data says so itself
    same = recipe_fields(dataclasses.replace(config, seed=recipe.seed)) == recipe_fields(recipe)
    return claimed_accuracy(config.recipe) if whole and same_data and same else ""
