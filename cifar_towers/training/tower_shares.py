"""The share of each batch that a tower takes where devices are of unequal speed: as it began, else by measuring."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Split
from cifar_towers.towers import Tower, variable_placement
from cifar_towers.towers.sharding import share_out
from cifar_towers.training import build
from cifar_towers.training.step import StepOptions, make_tower_fn

log = logging.getLogger(__name__)

STEPS, SECONDS = 8, 3.0  # of measuring, at least: steps of the slowest tower, and time
SAME = 0.05  # a smaller difference in speed is none


def resolve_shares(
    config: TrainConfig, towers: list[Tower], compute_dtype: str, train: Split, length: RunLength, previous: str = ""
) -> TrainConfig:
    """`config` with shares in place of `auto`: as the run was trained so far, else by measured speeds."""
    if config.tower_shares != "auto":
        return config
    if previous:
        log.info("tower shares %s: as the run began", previous)
        return dataclasses.replace(config, tower_shares=previous)
    if len(towers) == 1:
        return dataclasses.replace(config, tower_shares="1")
    log.info("measuring how fast the towers are beside each other; it compiles a step for each")
    speeds = measure_speeds(config, towers, compute_dtype, train, length)
    equal = max(speeds) / min(speeds) < 1 + SAME
    sizes = share_out(config.batch_size, [1.0] * len(towers) if equal else speeds, config.micro_batches)
    rates = ", ".join(f"{speed:,.0f}" for speed in speeds)
    shares = ", ".join(f"{size:,}" for size in sizes)
    log.info(f"tower shares {shares} of {config.batch_size:,} images: beside each other they make {rates} images/s")
    return dataclasses.replace(config, tower_shares=",".join(map(str, sizes)))


def measure_speeds(
    config: TrainConfig, towers: Sequence[Tower], compute_dtype: str, train: Split, length: RunLength
) -> list[float]:
    """[K] images per second of each tower, all at work at once on shards of one size."""
    size = max(1, config.batch_size // len(towers) // config.micro_batches) * config.micro_batches
    small = dataclasses.replace(config, tower_shares="", batch_size=size, hard_example_pool=0, num_gpus=1)
    with variable_placement(config.variable_placement or "cpu", list(towers)):
        state, loss_fn = build.make_state(small, compute_dtype, train, length)
    batches = build.make_batches(small, train, towers=towers)
    augmentation = build.make_augmentation(small, train.info)
    tower_fn = make_tower_fn(state, loss_fn, augmentation, config.micro_batches, load_images=batches.load_images)
    options, batch = StepOptions(frozenset(state.optimizer.learning_rates(0))), batches.at(0)

    def make_work(tower: Tower) -> Callable[[], object]:
        @tf.function(autograph=False)
        def work():
            with tf.device(tower.device), tf.name_scope(tower.name):
                return tower_fn(tower, batch, options).nonfinite_index

        work().numpy()  # compiles
        return lambda: work().numpy()

    return [size * rate for rate in rates_beside_each_other([make_work(tower) for tower in towers])]


def rates_beside_each_other(works: Sequence[Callable[[], object]]) -> list[float]:
    """Calls per second of each function, in a thread of its own, while all are at work, for `STEPS` and `SECONDS`."""
    ends: list[list[float]] = [[] for _ in works]
    start, ended = threading.Barrier(len(works)), threading.Event()

    def repeat(index: int) -> None:
        try:
            start.wait()
            ends[index].append(time.perf_counter())
            enough = ends[index][0] + SECONDS
            while (min(map(len, ends)) <= STEPS or ends[index][-1] < enough) and not ended.is_set():
                works[index]()
                ends[index].append(time.perf_counter())
        finally:
            ended.set()  # so that the others end where this one fails

    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(repeat, range(len(works))))  # which raises what one of them raised
    return [1 / float(np.median(np.diff(times))) for times in ends]
