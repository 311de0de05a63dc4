"""Steps on variables of their own, timed side by side, to choose between ways to train."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Split
from cifar_towers.towers import Tower
from cifar_towers.towers.placement import HOST
from cifar_towers.training import build

STEPS = 25  # timed, of each kind


def make_trial_step(
    config: TrainConfig, towers: list[Tower], compute_dtype: str, train: Split, length: RunLength
) -> Callable[[], Any]:
    """The traced step of this config on a batch of its own, with rates of 0; it returns when it is done."""
    batches = build.make_batches(config, train, towers=towers)
    training = build.make_training(config, towers, compute_dtype, train, length, load_images=batches.load_images)
    with tf.device(HOST):
        rates = {name: tf.constant(0.0) for name in training.state.optimizer.learning_rates(0)}
        step = partial(training.train_step, batches.at(0), rates)
    step()  # traces
    return lambda: step().loss.numpy()


def time_steps(steps: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of `STEPS` calls of each function, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(STEPS):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds
