"""Every setting of a training run: its name, default, help and limits."""

from cifar_towers.config.device_config import DeviceConfig
from cifar_towers.config.recipe import shared_settings
from cifar_towers.config.train_config import TrainConfig
from cifar_towers.config.validation import parse_profile_steps, parse_seeds

__all__ = ["DeviceConfig", "TrainConfig", "parse_profile_steps", "parse_seeds", "shared_settings"]
