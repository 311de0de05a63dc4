"""Settings of the prediction for other machines. Must not import TensorFlow."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import CLUSTER, OF_TRAINING, VARIED, BenchmarkConfig
from cifar_towers.config.train_config import RECIPE, check_limits, setting, settings_of

_scaling = settings_of("Scaling")


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """A recipe whose step is measured on one tower, and the links of the devices that it is predicted for."""

    exit_codes: ClassVar[str] = BenchmarkConfig.exit_codes
    refused: ClassVar[Mapping[str, str]] = {  # settings of the recipe without a flag here -> why
        **dict.fromkeys(VARIED, "one tower is measured, and every exchange is predicted"),
        **dict.fromkeys(CLUSTER, "one tower is measured, on one machine"),
        **dict.fromkeys(OF_TRAINING, "one tower is measured, and no run is trained"),
    }

    recipe: TrainConfig = setting(TrainConfig(), RECIPE, "recipe whose step is measured")
    train_dir: str = _scaling("", "directory of the results; by default runs/scaling-<recipe>")
    link_gb_per_s: float = _scaling(16.0, "bandwidth of a device's link, each way, in 10^9 bytes/s", low=1e-3)
    minutes: float = _scaling(1.0, "duration of the measurement in minutes; at least three rounds are made", low=0)

    def __post_init__(self):
        check_limits(self)

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        return Path(self.train_dir or f"runs/scaling-{self.recipe.name}")
