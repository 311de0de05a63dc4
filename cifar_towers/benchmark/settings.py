"""Settings of `benchmark.py`: a recipe, and how to measure it. Must not import TensorFlow."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from cifar_towers.config import DeviceConfig, TrainConfig
from cifar_towers.config.settings import RECIPE, check_limits, names_with, parse_names, setting, settings_of
from cifar_towers.errors import UsageError

VARIED = ("strategy", "variable_placement", "parallelism", "num_gpus", "tower_shares")  # by the benchmark
CLUSTER = names_with(TrainConfig, group="Cluster")
EXIT_CODES = f"{DeviceConfig.exit_codes}, or what it started failed"
_benchmark = settings_of("Benchmark")


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """A recipe, and how to measure its step. Placement, strategy and number of towers are varied."""

    exit_codes: ClassVar[str] = EXIT_CODES
    refused: ClassVar[Mapping[str, str]] = {  # settings of the recipe without a flag here -> why
        **dict.fromkeys(VARIED, f"the benchmark varies {', '.join(VARIED)} itself"),
        **dict.fromkeys(CLUSTER, "the benchmark measures one machine"),
        "gpu_memory_growth": "the processes of the benchmark share the GPUs, so it is always on",
    }

    recipe: TrainConfig = setting(TrainConfig(), RECIPE, "whose step is measured")
    train_dir: str = _benchmark("", "where results are written; by default runs/benchmark-<recipe>")
    towers: str = _benchmark("", "numbers of towers; by default 1,2,4, or 1 to all GPUs by doubling")
    precisions: str = _benchmark(
        "", "compute types; by default that of --precision, the native 16-bit ones, and float32"
    )
    all_reduce: str = _benchmark(
        "auto",
        "how strategy=mirrored combines gradients; auto: NCCL where every tower has a GPU",
        choices=("auto", "nccl", "hierarchical", "one_device"),
    )
    minutes: float = _benchmark(12.0, "how long to measure; at least three rounds are made", low=0)
    peers: bool = _benchmark(True, "also measure Keras fit with stock layers, mirrored for several towers")
    placement_only: bool = _benchmark(
        False, "only say which variable placement is fastest here, or that it does not matter; half a minute"
    )

    def __post_init__(self):
        check_limits(self)
        for count in self.tower_counts:
            self.recipe.check_shares(count)
        parse_names("precisions", self.precisions, ("float32", "bfloat16", "float16"))

    @property
    def tower_counts(self) -> tuple[int, ...]:
        """`towers` as numbers; empty for the default."""
        try:
            counts = tuple(int(part) for part in self.towers.split(",")) if self.towers else ()
        except ValueError:
            raise UsageError(f"towers={self.towers} is not a list of whole numbers; write --towers=1,2,4") from None
        if any(count < 1 for count in counts):
            raise UsageError(f"towers={self.towers}: a number of towers is 1 or more")
        return tuple(sorted(set(counts)))

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        return Path(self.train_dir or f"runs/benchmark-{self.recipe.name}")
