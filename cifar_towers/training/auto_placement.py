"""Where a run that leaves it open has its variables: as it began, or where measuring says they are fastest here."""

import dataclasses
import logging
import statistics
import time

import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Split
from cifar_towers.towers import Tower
from cifar_towers.towers.placement import HOST, PLACEMENTS
from cifar_towers.training import build

log = logging.getLogger(__name__)

IMAGES = 16  # a tower and step: few, so that what is exchanged weighs most
STEPS, SAME = 7, 0.03  # timed steps of each placement; times as near as this count as equal, and the plainer one wins


def resolve_placement(
    config: TrainConfig,
    towers: list[Tower],
    compute_dtype: str,
    train: Split,
    length: RunLength,
    previous_placement: str | None,
) -> TrainConfig:
    """`config` with `variable_placement=auto` resolved: as the run was trained so far, else by measuring."""
    if config.variable_placement != "auto":
        return config
    if previous_placement in PLACEMENTS:
        log.info("variable placement %s: as the run began", previous_placement)
        return dataclasses.replace(config, variable_placement=previous_placement)
    measured = benchmark_placements(config, towers, compute_dtype, train, length)
    return dataclasses.replace(config, variable_placement=measured)


def benchmark_placements(
    config: TrainConfig, towers: list[Tower], compute_dtype: str, train: Split, length: RunLength
) -> str:
    """One of `PLACEMENTS`: whose step over a small batch took least time, in the median of interleaved steps.

    It takes as long as tracing the step three times. `scripts/benchmark.py` does the same at full size.
    """
    if len({tower.device for tower in towers} | {HOST}) == 1:
        log.info("variable placement cpu: one tower on the CPU leaves nothing to choose")
        return "cpu"
    start = time.perf_counter()
    steps = {}
    for placement in PLACEMENTS:
        small = dataclasses.replace(
            config,
            num_gpus=len(towers),
            variable_placement=placement,
            hard_example_pool=0,
            batch_size=min(config.batch_size, IMAGES * len(towers) * config.micro_batches),
        )
        batches = build.make_batches(small, train)
        training = build.make_training(small, towers, compute_dtype, train, length)
        with tf.device(HOST):
            rates = {name: tf.constant(0.0) for name in training.state.optimizer.learning_rates(0)}
            steps[placement] = (training.train_step, batches.at(0), rates)
        training.train_step(*steps[placement][1:])  # traces
    seconds: dict[str, list[float]] = {placement: [] for placement in steps}
    for _ in range(STEPS):
        for placement, (step, *arguments) in steps.items():
            began = time.perf_counter()
            step(*arguments).loss.numpy()
            seconds[placement].append(time.perf_counter() - began)
    medians = {placement: statistics.median(times) for placement, times in seconds.items()}
    chosen = next(p for p in PLACEMENTS if medians[p] <= (1 + SAME) * min(medians.values()))
    timings = ", ".join(f"{placement} {1000 * median:.1f} ms" for placement, median in medians.items())
    log.info(
        f"variable placement {chosen}: a step of {IMAGES} images a tower takes {timings} "
        f"(within {100 * SAME:.0f} % counts as equal; measured in {time.perf_counter() - start:.0f} s)"
    )
    return chosen
