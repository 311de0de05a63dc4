"""Settings that a run chooses by itself: variable placement and tower shares by measuring, micro-batches by memory.

A run that is resumed keeps what was chosen when it was last trained.
"""

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from cifar_towers.config import TrainConfig, parse_shares
from cifar_towers.config.schedules import RunLength
from cifar_towers.config.train_config import MAX_MICRO_BATCHES
from cifar_towers.data.dataset import Split
from cifar_towers.registry import model_spec
from cifar_towers.towers import Tower, variable_placement
from cifar_towers.towers.devices import on_gpus
from cifar_towers.towers.placement import HOST, PLACEMENTS
from cifar_towers.towers.sharding import share_out
from cifar_towers.training import build
from cifar_towers.training.step import make_tower_fn

log = logging.getLogger(__name__)


def resolve_choices(
    config: TrainConfig, towers: Sequence[Tower], precision: str, train: Split, length: RunLength, previous: Mapping
) -> tuple[TrainConfig, list[str]]:
    """Choose micro-batches, variable placement and tower shares where they are `auto`; keep `previous` choices.

    Return `config` with the chosen values, and the names of the settings that were chosen.
    """
    config = asked = with_default_placement(config, towers)
    config = dataclasses.replace(config, micro_batches=config.micro_batches or previous.get("micro_batches", 1))
    config = resolve_placement(config, towers, precision, train, length, previous.get("variable_placement", ""))
    config = resolve_shares(config, towers, precision, train, length, previous.get("tower_shares", ""))
    return config, [name for name, value in vars(config).items() if value != getattr(asked, name)]


# Variable placement ---------------------------------------------------------------------------------------------------

PLACEMENT_IMAGES = 4  # per tower; few, so that the exchange takes most of the time
PLACEMENT_STEPS = 25  # timed steps for each placement
PLACEMENT_GAIN = 0.03  # a placement must beat the CPU by this fraction in three steps out of four


def with_default_placement(config: TrainConfig, towers: Sequence[Tower]) -> TrainConfig:
    """Return `config` with a placement in place of an empty one: `auto` for a speednet on GPUs, otherwise `cpu`."""
    has_choice = config.strategy == "towers" and config.parallelism == "data" and not config.deterministic
    is_measured = on_gpus(towers) and has_choice and model_spec(config.model).is_speednet
    default = "auto" if is_measured else "cpu"
    return dataclasses.replace(config, variable_placement=config.variable_placement or default)


def resolve_placement(
    config: TrainConfig, towers: Sequence[Tower], precision: str, train: Split, length: RunLength, previous: str = ""
) -> TrainConfig:
    """Return `config` with a variable placement in place of `auto`.

    It is the `previous` placement of the run, or else the fastest by measurement on GPUs; on CPUs it is `cpu`.
    """
    if config.variable_placement != "auto":
        return config
    if previous in PLACEMENTS:
        placement, reason = previous, "as the run began"
    elif not on_gpus(towers):
        placement, reason = "cpu", "all towers are on the CPU"
    else:
        log.info("measuring which variable placement is fastest; it compiles the step three times")
        placement, _, reason = recommend_placement(config, towers, precision, train, length)
    log.info(f"variable placement {placement}: {reason}")
    return dataclasses.replace(config, variable_placement=placement)


def recommend_placement(
    config: TrainConfig, towers: Sequence[Tower], precision: str, train: Split, length: RunLength
) -> tuple[str, bool, str]:
    """Measure steps over a small batch under each placement, and recommend the fastest, or the first of equals.

    Return that placement, whether another placement is slower, and the reason with the measured times. Most of the
    time is spent on tracing the step three times. `scripts/benchmark.py` measures whole batches.
    """
    if len({tower.device for tower in towers} | {HOST}) == 1:
        return "cpu", False, "one tower on the CPU leaves nothing to choose"
    steps, parts = {}, len(towers) * config.micro_batches
    for placement in PLACEMENTS:
        small = dataclasses.replace(
            config,
            num_gpus=len(towers),
            variable_placement=placement,
            tower_shares="",
            hard_example_pool=0,
            batch_size=min(config.batch_size // parts, PLACEMENT_IMAGES) * parts,
        )
        steps[placement] = make_trial_step(small, towers, precision, train, length)
    seconds: dict[str, list[float]] = {placement: [] for placement in steps}
    for _ in range(PLACEMENT_STEPS):
        for placement, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[placement].append(time.perf_counter() - began)
    times = ", ".join(f"{placement} {1000 * np.median(taken):.1f} ms" for placement, taken in seconds.items())
    ratios = {placement: np.divide(taken, seconds["cpu"]) for placement, taken in seconds.items()}
    faster = {placement: np.median(r) for placement, r in ratios.items() if np.quantile(r, 0.75) < 1 - PLACEMENT_GAIN}
    slower = [placement for placement, r in ratios.items() if np.quantile(r, 0.25) > 1 + PLACEMENT_GAIN]
    fastest = min(faster.values(), default=1.0)
    chosen = next((name for name, ratio in faster.items() if ratio <= (1 + PLACEMENT_GAIN) * fastest), "cpu")
    return (
        chosen,
        bool(faster or slower),
        f"a step of {PLACEMENT_IMAGES} images on each of {len(towers)} towers takes {times} "
        f"(medians of {PLACEMENT_STEPS}; with so few images placement weighs most; a difference counts if it "
        f"exceeds {100 * PLACEMENT_GAIN:.0f} % in three steps out of four)",
    )


def make_trial_step(
    config: TrainConfig, towers: Sequence[Tower], precision: str, train: Split, length: RunLength
) -> Callable[[], Any]:
    """Return a function that runs a config's step and waits for its end.

    The step is traced. It has variables and a batch of its own, and learning rates of 0.
    """
    batches = build.make_batches(config, train.take(slice(config.batch_size)), towers=towers)
    state, train_step, _ = build.make_training(
        config, towers, precision, train, length, load_images=batches.load_images
    )
    with tf.device(HOST):
        rates = {name: tf.constant(0.0) for name in state.optimizer.learning_rates(0)}
        step = partial(train_step, batches.at(0), rates)
    step()  # traces
    return lambda: step().loss.numpy()


# Tower shares ---------------------------------------------------------------------------------------------------------

SHARES_STEPS = 8  # minimum number of timed steps of the slowest tower
SHARES_SECONDS = 3.0  # minimum time of the measurement
SAME_SPEED = 0.05  # if all speeds differ by less than this fraction, all shares are equal


def resolve_shares(
    config: TrainConfig, towers: Sequence[Tower], precision: str, train: Split, length: RunLength, previous: str = ""
) -> TrainConfig:
    """Return `config` with shares in place of `auto`: the `previous` ones of the run, or else by measured speeds."""
    if config.tower_shares != "auto":
        return config
    if previous:
        log.info("tower shares %s, as the run began", previous)
        return dataclasses.replace(config, tower_shares=previous)
    if len(towers) == 1:
        return dataclasses.replace(config, tower_shares="1")
    log.info("measuring how fast the towers are beside each other; it compiles a step for each")
    speeds = measure_speeds(config, towers, precision, train, length)
    equal = max(speeds) / min(speeds) < 1 + SAME_SPEED
    sizes = share_out(config.batch_size, [1.0] * len(towers) if equal else speeds, config.micro_batches)
    rates = ", ".join(f"{speed:,.0f}" for speed in speeds)
    shares = ", ".join(f"{size:,}" for size in sizes)
    log.info(f"tower shares {shares} of {config.batch_size:,} images: beside each other they make {rates} images/s")
    return dataclasses.replace(config, tower_shares=",".join(map(str, sizes)))


def measure_speeds(
    config: TrainConfig, towers: Sequence[Tower], precision: str, train: Split, length: RunLength
) -> list[float]:
    """Return [K] images per second of each tower, while all towers work on shards of one size."""
    size = max(1, config.batch_size // len(towers) // config.micro_batches) * config.micro_batches
    small = dataclasses.replace(config, tower_shares="", batch_size=size, hard_example_pool=0, num_gpus=1)
    with variable_placement(config.variable_placement, towers):
        state, loss_fn = build.make_state(small, precision, train, length)
    batches = build.make_batches(small, train.take(slice(size)), towers=towers)
    augmentation = build.make_augmentation(small, train.info)
    tower_fn = make_tower_fn(state, loss_fn, augmentation, config.micro_batches, load_images=batches.load_images)
    groups, batch = state.optimizer.learning_rates(0), batches.at(0)

    def make_work(tower: Tower) -> Callable[[], object]:
        @tf.function(autograph=False)
        def work():
            with tf.device(tower.device), tf.name_scope(tower.name):
                return tower_fn(tower, batch, groups).nonfinite_index

        work().numpy()  # compiles
        return lambda: work().numpy()

    return [size * rate for rate in rates_beside_each_other([make_work(tower) for tower in towers])]


def rates_beside_each_other(works: Sequence[Callable[[], object]]) -> list[float]:
    """Call all functions repeatedly at the same time, each in its own thread; return the calls per second of each."""
    ends: list[list[float]] = [[] for _ in works]
    start, ended = threading.Barrier(len(works)), threading.Event()

    def repeat(index: int) -> None:
        try:
            start.wait()
            ends[index].append(time.perf_counter())
            enough = ends[index][0] + SHARES_SECONDS
            while (min(map(len, ends)) <= SHARES_STEPS or ends[index][-1] < enough) and not ended.is_set():
                works[index]()
                ends[index].append(time.perf_counter())
        finally:
            ended.set()  # so that the others end where this one fails

    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(repeat, range(len(works))))  # which raises what one of them raised
    return [1 / float(np.median(np.diff(times))) for times in ends]


# Micro-batches --------------------------------------------------------------------------------------------------------


def shard_sizes(config: TrainConfig, num_towers: int, examples: int = 0) -> list[int]:
    """Return [K], the number of examples that each tower takes of `examples`, by default of a batch."""
    shares = parse_shares(config.tower_shares) or [1] * num_towers
    return share_out(examples or config.batch_size, shares, config.micro_batches)


def more_micro_batches(config: TrainConfig, num_devices: int) -> int:
    """Return the smallest number of micro-batches that at least halves their size; 0 if there is none."""
    num_towers = config.num_towers(num_devices)
    sizes = shard_sizes(config, num_towers)
    if config.hard_example_pool:
        sizes += shard_sizes(config, num_towers, config.hard_example_pool)
    divisible = math.gcd(*sizes)
    counts = range(2 * config.micro_batches, min(divisible, MAX_MICRO_BATCHES) + 1)
    return next((count for count in counts if divisible % count == 0), 0)


def suggest_more_micro_batches(config: TrainConfig, num_devices: int) -> str:
    """Return flags for micro-batches of at most half the size; empty if there are none."""
    count = more_micro_batches(config, num_devices) if config.micro_batches else 0  # auto has tried them
    unsynchronized = " --batch_statistics=mean" if config.batch_statistics == "synchronized" else ""
    return f"--micro_batches={count}{unsynchronized}" if count else ""
