"""Every setting of a training run and of the other programs: its name, default, help and limits."""

from cifar_towers.config.train_config import (
    DeviceSettings,
    TrainConfig,
    parse_numbers,
    parse_profile_steps,
)

__all__ = ["DeviceSettings", "TrainConfig", "parse_numbers", "parse_profile_steps"]
