"""Every setting of a training run and of the other programs: its name, default, help and limits."""

from cifar_towers.config.train_config import (
    DeviceConfig,
    TrainConfig,
    parse_numbers,
    parse_profile_steps,
)

__all__ = ["DeviceConfig", "TrainConfig", "parse_numbers", "parse_profile_steps"]
