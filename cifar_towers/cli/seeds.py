"""A recipe over several seeds, a run each."""

import dataclasses

import keras
import numpy as np

from cifar_towers.config import TrainConfig
from cifar_towers.data import sources
from cifar_towers.trainer import train


def train_seeds(
    config: TrainConfig, seeds: tuple[int, ...], source: sources.Source, shutdown, launch_id: str = ""
) -> None:
    """Trains one run a seed and prints mean, standard deviation and n of each of their last accuracies."""
    scores: dict[str, list[float]] = {}
    speeds = []
    for seed in seeds:
        train_dir = f"{config.train_dir}/seed{seed}" if config.train_dir else ""
        result = train(
            dataclasses.replace(config, seed=seed, seeds="", train_dir=train_dir), source, shutdown, launch_id=launch_id
        )
        speeds.append(result["images_per_sec"])
        for score in result["evaluations"]:
            key = f"{score['split']} accuracy, {score['weights']} weights, TTA {score['tta']}"
            scores.setdefault(key, []).append(score["accuracy"])
        keras.backend.clear_session()
    print(f"{config.name}, seeds {', '.join(map(str, seeds))}: {np.mean(speeds):,.0f} images/s")
    for key, values in scores.items():
        spread = f"std {100 * np.std(values, ddof=1):.2f}" if len(values) > 1 else "std not known"
        print(f"{key}: mean {100 * np.mean(values):.2f} %, {spread}, n={len(values)}")
