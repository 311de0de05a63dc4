"""The command `cifar-towers <program>`. A program checks its flags before it imports TensorFlow."""

import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar_towers import api, files
from cifar_towers.config import TrainConfig, parse_numbers, programs
from cifar_towers.config.flags import HELP, parse_command_line
from cifar_towers.errors import DivergedError, Interrupted, RunError, UsageError, error_line
from cifar_towers.hardware import tensorflow_imported
from cifar_towers.multi_worker import cluster_spec, launcher
from cifar_towers.multi_worker.cluster_spec import Workers
from cifar_towers.runs.run import load_run
from cifar_towers.signals import StopSignals

log = logging.getLogger(__name__)

# in a process of its own; flags are appended
TRAIN_COMMAND = [sys.executable, "-m", "cifar_towers", "train"]
USAGE = """Train and use image classifiers on towers, which are copies of the forward and backward
pass, one per device, that share each batch.

{programs}

cifar-towers <program> --help lists its flags.
Exit codes: 0 done, 1 failed, 2 wrong flag or directory, 3 data missing or damaged,
4 diverged, 5 a worker was lost, 130/138/143 interrupted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that the command line names, and return its exit code; print its errors as
    one line.
    """
    name, *flags = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process, without a traceback
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[StderrHandler()])
    logging.getLogger("cifar_towers").setLevel(logging.INFO)
    try:
        return call(name, flags)
    except (RunError, Interrupted) as error:
        print(error_line(error), file=sys.stderr)
        return error.exit_code


def call(name: str, flags: Sequence[str]) -> int:
    """Call a program with the flags of its command line; return its exit code, or raise its
    errors.
    """
    if name in HELP:
        lines = [
            f"  {name:13} {str(program.__doc__).splitlines()[0]}"
            for name, (program, _) in PROGRAMS.items()
        ]
        print(USAGE.format(programs="\n".join(lines)))
        return 0
    if name not in PROGRAMS:
        raise UsageError(
            f"there is no program {name!r}; write: cifar-towers <program>, one of "
            f"{', '.join(PROGRAMS)}"
        )
    program, config_class = PROGRAMS[name]
    config: Any = parse_command_line(config_class, flags, inspect.cleandoc(str(program.__doc__)))
    if isinstance(config, programs.TrainedRunConfig):
        load_run(config.train_dir)  # is refused before TensorFlow is imported
    return program(config) or 0


class StderrHandler(logging.StreamHandler):
    """A handler that prints to what `sys.stderr` is then. During a live progress line, this prints
    above the line.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


# The programs: functions of their settings, whose docstrings are their help -----------------------


def train(config: TrainConfig) -> None:
    """Train an image classifier on towers.

      cifar-towers train --num_gpus=2                               CIFAR-10 to 94 %
      cifar-towers train --recipe=resnet20 --seeds=0,1,2            another recipe, with three seeds
      cifar-towers train --dataset=folder:photos --batch_size=128   a subfolder for each class

    Without --recipe and --model the recipe is speed94. Other flags override the recipe, in any
    order. The same command resumes, unless it has --overwrite.
    """
    if config.seeds:
        return train_seeds(config)
    cluster = resolve_cluster(config, os.environ)
    if cluster:
        if cluster.index:
            # the chief logs for all workers
            logging.getLogger("cifar_towers").setLevel(logging.WARNING)
            # except where a worker is
            logging.getLogger("cifar_towers.multi_worker").setLevel(logging.INFO)
        log.info(
            f"{cluster.name(cluster.index)}: TensorFlow opens its port on every interface, "
            "without authentication; see docs/cluster.md"
        )
    source, config = api.locate_data(config)
    api.train_run(config, source, StopSignals(), cluster)


def train_seeds(config: TrainConfig) -> None:
    """Train one run for each seed, and print their mean, or in what they differ.

    If seeds diverge, the others are trained and counted before a DivergedError is raised.
    """
    from cifar_towers.data import sources
    from cifar_towers.runs.table import explain_groups, summarize_groups

    source, config = api.locate_data(config)
    source = sources.read_once(source)
    trained = []
    diverged = []
    for seed in parse_numbers("seeds", config.seeds):
        run_config = config.of_seed(seed)
        try:
            api.train_run(run_config, source, StopSignals())
            trained.append(run_config.directory)
        except DivergedError as error:
            diverged.append(f"seed {seed} diverged: {error}")
            log.error(diverged[-1])
        if "keras" in sys.modules:  # not if every run so far was finished before
            sys.modules["keras"].backend.clear_session()

    root = config.directory.parent  # so that a group is called as `runs` calls it
    runs = [load_run(path, str(path.relative_to(root))) for path in trained]
    for line in [*summarize_groups(runs), *explain_groups(runs)]:
        print(line)
    if diverged:
        raise DivergedError("; ".join(diverged))


def resolve_cluster(config: TrainConfig, environment: Mapping[str, str]) -> Workers | None:
    """Return the workers of strategy=multi_worker, from `TF_CONFIG` or Slurm's variables; None
    for one process.

    Raises:
      UsageError: no workers are given, they make no cluster, or they cannot share the batch evenly.
    """
    if config.strategy != "multi_worker":
        return None
    cluster = cluster_spec.resolve_cluster(environment)
    config.check_shares(max(config.num_gpus, 1) * cluster.size)
    return cluster


def evaluate(config: programs.EvaluateConfig) -> None:
    """Evaluate a checkpoint of a run, the newest unless --step is given.

      cifar-towers evaluate --train_dir=runs/speed94-seed0 --tta
      cifar-towers evaluate --train_dir=runs/speed94-seed0 --dataset=cifar10_corrupted/fog_3

    NLL is the negative log likelihood, ECE the expected calibration error. With --tta both are
    computed from the mean logits. The table's column "most often taken for" names, for each class,
    the class that it is most often confused with. --json adds the confusion matrix: rows are true
    classes, columns predicted ones.
    """
    with tensorflow_imported():
        from cifar_towers.inference.evaluate import evaluate_checkpoint, format_evaluation

        record = evaluate_checkpoint(config)
        if config.json:
            print(files.to_json(record))
        else:
            print(format_evaluation(record))


def predict(config: programs.PredictConfig) -> None:
    """Classify image files with a trained run, and print the three most likely classes of each.

      cifar-towers predict --train_dir=runs/speed94-seed0 picture.jpg folder/ *.png

    It reads JPEG, PNG, GIF, BMP and WebP files of up to 25 megapixels. Each picture is rotated by
    its EXIF tag, cropped to the central square, put on white where it is transparent, and resized
    to the training size.
    """
    with tensorflow_imported():
        from cifar_towers.inference.predict import predict_images

        predict_images(config)


def export(config: programs.ExportConfig) -> None:
    """Export the model of a checkpoint with its preprocessing.

      cifar-towers export --train_dir=runs/speed94-seed0 --format=saved_model

    Its input is uint8 images [B, S, S, 3] of the size in training, its output class probabilities
    [B, C]. classes.txt beside it lists the names of the classes.
    """
    with tensorflow_imported():
        from cifar_towers.inference.export import export_model

        export_model(config)


def report(config: programs.ReportConfig) -> None:
    """Write a self-contained HTML report of runs, for readers without TensorBoard.

      cifar-towers report runs/one [runs/other ...] [--out=FILE]

    Name a directory to include every run in it. Runs that differ only in the seed appear as their
    mean, with a band of one standard deviation.
    """
    from cifar_towers.inference.report import render
    from cifar_towers.runs.table import read_runs

    directories = [Path(run) for run in config.runs]
    out = Path(config.out or Path(directories[0] if len(directories) == 1 else "", files.REPORT))
    files.write_whole(out, render(read_runs(sorted(directories))))
    print(out)


def runs(config: programs.RunsConfig) -> None:
    """List runs with their state, accuracy and time.

      cifar-towers runs                 all below runs/, a line each
      cifar-towers runs 'speed94*'      some of them

    Runs that differ only in the seed form a group. For each group with two or more finished runs,
    the mean accuracy, the standard deviation and the number of runs are printed below the table. If
    there are two such groups, their difference follows.
    """
    from cifar_towers.runs import table

    found = table.find_runs(Path(config.runs_dir), *config.patterns)
    if config.json:
        print("\n".join(files.to_json(table.describe(run)) for run in found))
    elif not found:
        print(f"no runs in {config.runs_dir} match {' '.join(config.patterns) or '*'}")
    else:
        print(table.format_table(found))
        groups = table.summarize_groups(found)
        if groups:
            print("", *groups, sep="\n")


def launch(config: programs.LaunchConfig) -> int:
    """Train with several workers on this machine, one process each, or restart one that fails.

      cifar-towers launch --num_workers=2 -- --recipe=speed94 --train_dir=runs/two-workers

    Flags after -- are flags of `cifar-towers train`. When a worker fails, all are restarted from
    the last checkpoint, up to --max_restarts times.
    """
    strategy = ["--strategy=multi_worker"] if config.num_workers else []
    flags = [*strategy, *config.command]
    training = parse_command_line(TrainConfig, flags)
    if training.overwrite:
        raise UsageError(
            "--overwrite would delete the run again at each restart; delete its directory yourself"
        )
    if config.num_workers:
        if training.strategy != "multi_worker":
            raise UsageError(f"strategy={training.strategy} has no workers; leave that flag out")
        training.check_shares(max(training.num_gpus, 1) * config.num_workers)
    else:
        resolve_cluster(training, os.environ)
    return launcher.launch(
        [*TRAIN_COMMAND, *flags], config.num_workers, config.max_restarts, log.info
    )


PROGRAMS: dict[str, tuple[Callable[[Any], int | None], type]] = {
    "train": (train, TrainConfig),
    "evaluate": (evaluate, programs.EvaluateConfig),
    "predict": (predict, programs.PredictConfig),
    "export": (export, programs.ExportConfig),
    "report": (report, programs.ReportConfig),
    "runs": (runs, programs.RunsConfig),
    "launch": (launch, programs.LaunchConfig),
}
