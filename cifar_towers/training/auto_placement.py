"""Where a run that leaves it open has its variables: as it began, or where measuring says they are fastest here."""

import dataclasses
import logging
import statistics
import time

import numpy as np
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
ANSWER_IMAGES, ANSWER_STEPS = 4, 25  # the same where the answer is all that is wanted, for a machine that is busy too


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
    if not _has_choice(towers):
        log.info("variable placement cpu: one tower on the CPU leaves nothing to choose")
        return "cpu"
    start = time.perf_counter()
    medians = _medians(_time_steps(_prepare_steps(config, towers, compute_dtype, train, length, IMAGES), STEPS))
    chosen = next(p for p in PLACEMENTS if medians[p] <= (1 + SAME) * min(medians.values()))
    log.info(
        f"variable placement {chosen}: a step of {IMAGES} images a tower takes {_describe(medians)} "
        f"(within {100 * SAME:.0f} % counts as equal; measured in {time.perf_counter() - start:.0f} s)"
    )
    return chosen


def recommend_placement(
    config: TrainConfig, towers: list[Tower], compute_dtype: str, train: Split, length: RunLength
) -> str:
    """One sentence: which placement to use on this machine, or that it does not matter, with the measured times.

    A difference from variables on the CPU counts if three in four steps show it.
    """
    if not _has_choice(towers):
        return "Variable placement does not matter here: one tower on the CPU leaves nothing to choose."
    steps = _prepare_steps(config, towers, compute_dtype, train, length, ANSWER_IMAGES)
    seconds = _time_steps(steps, ANSWER_STEPS)
    timings = _describe(_medians(seconds))
    ratios = {placement: np.divide(times, seconds["cpu"]) for placement, times in seconds.items()}
    faster = [placement for placement, ratio in ratios.items() if np.quantile(ratio, 0.75) < 1 - SAME]
    slower = [placement for placement, ratio in ratios.items() if np.quantile(ratio, 0.25) > 1 + SAME]
    chosen = min(faster, key=lambda placement: np.median(ratios[placement]), default="cpu")
    matters = faster or slower
    answer = f"Use --variable_placement={chosen} here" if matters else "Variable placement does not matter here"
    return (
        f"{answer}: a step of {ANSWER_IMAGES} images on each of {len(towers)} towers takes {timings} "
        f"(medians of {ANSWER_STEPS}; a difference counts if it is {100 * SAME:.0f} % in three of four)."
    )


def _has_choice(towers: list[Tower]) -> bool:
    return len({tower.device for tower in towers} | {HOST}) > 1


def _describe(medians: dict[str, float]) -> str:
    return ", ".join(f"{placement} {1000 * median:.1f} ms" for placement, median in medians.items())


def _prepare_steps(
    config: TrainConfig, towers: list[Tower], compute_dtype: str, train: Split, length: RunLength, images: int
) -> dict[str, tuple]:
    """The traced step of each placement and its arguments, with a batch of so many images a tower."""
    steps = {}
    for placement in PLACEMENTS:
        small = dataclasses.replace(
            config,
            num_gpus=len(towers),
            variable_placement=placement,
            hard_example_pool=0,
            batch_size=min(config.batch_size, images * len(towers) * config.micro_batches),
        )
        batches = build.make_batches(small, train)
        training = build.make_training(small, towers, compute_dtype, train, length)
        with tf.device(HOST):
            rates = {name: tf.constant(0.0) for name in training.state.optimizer.learning_rates(0)}
            steps[placement] = (training.train_step, batches.at(0), rates)
        training.train_step(*steps[placement][1:])  # traces
    return steps


def _time_steps(steps: dict[str, tuple], count: int) -> dict[str, list[float]]:
    """Seconds of `count` steps of each placement, interleaved."""
    seconds: dict[str, list[float]] = {placement: [] for placement in steps}
    for _ in range(count):
        for placement, (step, *arguments) in steps.items():
            began = time.perf_counter()
            step(*arguments).loss.numpy()
            seconds[placement].append(time.perf_counter() - began)
    return seconds


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {placement: statistics.median(times) for placement, times in seconds.items()}
