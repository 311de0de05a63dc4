"""Several runs of a recipe, one for each seed, and their statistics."""

from pathlib import Path

import keras
import numpy as np

from cifar_towers.cli.run import Run
from cifar_towers.config import TrainConfig, parse_seeds
from cifar_towers.data import sources
from cifar_towers.reporting.run_records import format_rate
from cifar_towers.reporting.sample import Sample
from cifar_towers.reporting.seed_statistics import SeedStatistics
from cifar_towers.shutdown import ShutdownHandler
from cifar_towers.trainer import train


def train_seeds(config: TrainConfig, source: sources.Source, shutdown: ShutdownHandler, launch_id: str = "") -> None:
    """Train one run for each seed; print mean, standard deviation and n of the final accuracies.

    The same statistics of every scalar are written for TensorBoard, see `seeds_directory`.
    """
    accuracies: dict[str, list[float]] = {}
    speeds = []
    runs = [config.of_seed(seed) for seed in parse_seeds(config.seeds)]
    with SeedStatistics(seeds_directory(config), [run.directory for run in runs]).updated_in_background():
        for run in runs:
            result = train(run, source, shutdown, launch_id=launch_id, open_run=Run)
            if result["images_per_sec"]:  # else no step was timed
                speeds.append(result["images_per_sec"])
            for score in result["evaluations"]:
                name = f"{score['split']} accuracy, {score['weights']} weights, TTA {score['tta']}"
                accuracies.setdefault(name, []).append(score["accuracy"])
            keras.backend.clear_session()
    speed = f": {format_rate(float(np.mean(speeds)))} images/s" if speeds else ""
    print(f"{config.name}, seeds {', '.join(str(run.seed) for run in runs)}{speed}")
    for name, values in accuracies.items():
        print(f"{name}: {Sample.of(values).describe_percent()}")


def seeds_directory(config: TrainConfig) -> Path:
    """Return the directory of the statistics: `<recipe>-seeds` beside the runs, or `seeds` within `train_dir`."""
    first = config.of_seed(0).directory
    return first.with_name(first.name.removesuffix("0") + "s")
