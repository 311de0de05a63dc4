"""Where a run that leaves it open has its variables: as it began, or where measuring says they are fastest here."""

import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import RunLength
from cifar_towers.data.dataset import Split
from cifar_towers.registry import model_spec
from cifar_towers.towers import Tower
from cifar_towers.towers.devices import on_gpus
from cifar_towers.towers.placement import HOST, PLACEMENTS
from cifar_towers.training.trial_steps import STEPS, make_trial_step, time_steps

log = logging.getLogger(__name__)

IMAGES = 4  # a tower: few, so that what is exchanged weighs most
SAME = 0.03  # a smaller difference from variables on the CPU does not count, nor one that one step in four lacks


def resolve_placement(
    config: TrainConfig,
    towers: list[Tower],
    compute_dtype: str,
    train: Split,
    length: RunLength,
    previous_placement: str = "",
) -> TrainConfig:
    """`config` with a placement in place of `auto` or of none: as the run was trained so far, else by measuring. It is
    not measured where all towers are on the CPU, nor without `auto` if little is to be gained."""
    if config.variable_placement not in ("", "auto"):
        return config
    has_choice = config.strategy == "towers" and config.parallelism == "data" and not config.deterministic
    is_speednet = model_spec(config.model).whitening
    if not config.variable_placement and not (on_gpus(towers) and has_choice and is_speednet):
        return dataclasses.replace(config, variable_placement="cpu")
    if previous_placement in PLACEMENTS:
        log.info("variable placement %s: as the run began", previous_placement)
        return dataclasses.replace(config, variable_placement=previous_placement)
    if not on_gpus(towers):
        log.info("variable placement cpu: all towers are on the CPU")
        return dataclasses.replace(config, variable_placement="cpu")
    log.info("measuring which variable placement is fastest; it compiles the step three times")
    recommended = recommend_placement(config, towers, compute_dtype, train, length)
    log.info(f"variable placement {recommended.placement}: {recommended.reason}")
    return dataclasses.replace(config, variable_placement=recommended.placement)


class Recommendation(NamedTuple):
    """The variable placement to use on this machine."""

    placement: str  # one of PLACEMENTS
    matters: bool  # whether another one is slower
    reason: str  # with the measured times

    def sentence(self) -> str:
        """The answer to someone who asks which placement to use."""
        answer = f"Use --variable_placement={self.placement}" if self.matters else "Variable placement does not matter"
        return f"{answer} here: {self.reason}."


def recommend_placement(
    config: TrainConfig, towers: list[Tower], compute_dtype: str, train: Split, length: RunLength
) -> Recommendation:
    """The placement whose steps over a small batch are fastest; of those that tie, the first of `PLACEMENTS`.

    It takes as long as tracing the step three times. `scripts/benchmark.py` does the same at full size.
    """
    if len({tower.device for tower in towers} | {HOST}) == 1:
        return Recommendation("cpu", False, "one tower on the CPU leaves nothing to choose")
    seconds = time_steps(_make_trial_steps(config, towers, compute_dtype, train, length))
    times = ", ".join(f"{placement} {1000 * np.median(taken):.1f} ms" for placement, taken in seconds.items())
    ratios = {placement: np.divide(taken, seconds["cpu"]) for placement, taken in seconds.items()}
    faster = {placement: np.median(r) for placement, r in ratios.items() if np.quantile(r, 0.75) < 1 - SAME}
    slower = [placement for placement, r in ratios.items() if np.quantile(r, 0.25) > 1 + SAME]
    fastest = min(faster.values(), default=1.0)
    chosen = next((placement for placement, ratio in faster.items() if ratio <= (1 + SAME) * fastest), "cpu")
    return Recommendation(
        chosen,
        bool(faster or slower),
        f"a step of {IMAGES} images on each of {len(towers)} towers takes {times} "
        f"(medians of {STEPS}; with so few images placement weighs most; a difference counts if it is "
        f"{100 * SAME:.0f} % in three of four)",
    )


def _make_trial_steps(
    config: TrainConfig, towers: list[Tower], compute_dtype: str, train: Split, length: RunLength
) -> dict[str, Callable]:
    """The traced step of each placement."""
    steps = {}
    for placement in PLACEMENTS:
        small = dataclasses.replace(
            config,
            num_gpus=len(towers),
            variable_placement=placement,
            tower_shares="",
            hard_example_pool=0,
            batch_size=min(config.batch_size, IMAGES * len(towers) * config.micro_batches),
        )
        steps[placement] = make_trial_step(small, towers, compute_dtype, train, length)
    return steps
