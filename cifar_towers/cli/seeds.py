"""Training a recipe with several seeds."""

import dataclasses

import keras
import numpy as np

from cifar_towers.cli.shutdown import ShutdownHandler
from cifar_towers.config import TrainConfig
from cifar_towers.data import sources
from cifar_towers.trainer import train


def train_seeds(
    config: TrainConfig, seeds: tuple[int, ...], source: sources.Source, shutdown: ShutdownHandler, launch_id: str = ""
) -> None:
    """Trains one run for each seed; prints mean, standard deviation and n of their final accuracies."""
    accuracies: dict[str, list[float]] = {}
    speeds = []
    for seed in seeds:
        train_dir = f"{config.train_dir}/seed{seed}" if config.train_dir else ""
        result = train(
            dataclasses.replace(config, seed=seed, seeds="", train_dir=train_dir), source, shutdown, launch_id=launch_id
        )
        if result["images_per_sec"]:  # else no step was timed
            speeds.append(result["images_per_sec"])
        for score in result["evaluations"]:
            name = f"{score['split']} accuracy, {score['weights']} weights, TTA {score['tta']}"
            accuracies.setdefault(name, []).append(score["accuracy"])
        keras.backend.clear_session()
    speed = f": {np.mean(speeds):,.0f} images/s" if speeds else ""
    print(f"{config.name}, seeds {', '.join(map(str, seeds))}{speed}")
    for name, values in accuracies.items():
        std = f"std {100 * np.std(values, ddof=1):.2f}" if len(values) > 1 else "std unknown"
        print(f"{name}: mean {100 * np.mean(values):.2f} %, {std}, n={len(values)}")
