"""Every setting of a training run: its name, default, help and limits."""

from cifar_towers.config.train_config import (
    MOST_PARTS,
    MOST_TRACED,
    DeviceConfig,
    TrainConfig,
    parse_seeds,
    parse_window,
    shared_settings,
)

__all__ = ["MOST_PARTS", "MOST_TRACED", "DeviceConfig", "TrainConfig", "parse_seeds", "parse_window", "shared_settings"]
