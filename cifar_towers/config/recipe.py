"""The settings that decide what is trained: which a resumed run, and all workers of a cluster, must have in common."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cifar_towers.config.settings import names_with, with_current_names
from cifar_towers.config.train_config import TrainConfig
from cifar_towers.registry import OPTIMIZERS


def recipe_fields(config: TrainConfig) -> dict[str, Any]:
    """Settings that decide what is trained, by name. max_steps is one where a schedule depends on the run's length."""
    by_length = "%" in config.learning_rate_schedule + config.image_size_schedule
    by_length = by_length or OPTIMIZERS[config.optimizer].by_length or config.lookahead or config.freeze_first_group
    left_out = set(names_with(TrainConfig, on_resume="allow"))
    if config.epochs == 0 and by_length:
        left_out -= {"max_steps"}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out}


def differing_settings(config: TrainConfig, saved: Mapping[str, Any], has_batch_norm: bool) -> list[str]:
    """Settings under which a run may not be resumed, each as `name saved value -> value now`.

    Args:
      saved: `recipe_fields` of the run so far; where it is older than a setting, that setting had its default.
      has_batch_norm: whether the net has batch normalization; some settings change what is trained only there.
    """
    saved = with_current_names(saved)
    conditional = names_with(TrainConfig, on_resume="allow_without_batch_norm")
    defaults = {name: value for name, value in recipe_fields(TrainConfig()).items() if name not in conditional}
    saved, current = defaults | saved, recipe_fields(config)
    compared = [name for name in current if name in saved and (has_batch_norm or name not in conditional)]
    return [f"{name} {saved[name]} -> {current[name]}" for name in compared if saved[name] != current[name]]


def shared_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that must be the same on all workers of a cluster."""
    return {name: getattr(config, name) for name in names_with(TrainConfig, per_worker=False)}
