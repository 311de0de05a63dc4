"""Settings of `benchmark.py` and `speedrun.py`: a recipe, and how to measure it. Must not import TensorFlow."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from cifar_towers.config import DeviceConfig, TrainConfig, parse_seeds
from cifar_towers.config.settings import RECIPE, check_limits, names_with, parse_names, setting, settings_of
from cifar_towers.errors import UsageError
from cifar_towers.registry import MODELS


class Peer(NamedTuple):
    """Another framework's training step, measured by a program in scripts/peers/."""

    program: str
    models: Collection[str]
    flags: str = ""  # one with {towers} uses all devices, the others one
    precisions: tuple[str, ...] = ("float32", "bfloat16")


PEERS = {
    "pytorch": Peer("pytorch_step.py", ("speednet94", "resnet20")),
    "pytorch-compiled": Peer("pytorch_step.py", ("speednet94", "resnet20"), "--compile"),
    "keras": Peer("keras_fit.py", MODELS),
    "keras-untuned": Peer("keras_fit.py", MODELS, "--untuned"),
    "keras-mirrored": Peer("keras_fit.py", MODELS, "--mirrored={towers}"),
    "tutorial": Peer("tutorial_graph.py", ("cifarnet",), "--towers={towers}", ("float32",)),
}
VARIED = ("strategy", "variable_placement", "parallelism", "num_gpus", "tower_shares")  # by the benchmark
CLUSTER = names_with(TrainConfig, group="Cluster")
EXIT_CODES = f"{DeviceConfig.exit_codes}, or what it started failed"
_benchmark, _race = settings_of("Benchmark"), settings_of("Race")


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
    predict: bool = _benchmark(
        False, "measure one tower only, and compute the step of 1 to 64 devices with links of link_gb_per_s"
    )
    link_gb_per_s: float = _benchmark(16.0, "for predict: a device's link each way, in 10^9 bytes/s", low=1e-3)

    def __post_init__(self):
        check_limits(self)
        if self.predict and self.placement_only:
            raise UsageError("predict measures one tower, and placement_only compares placements; leave one out")
        if self.predict and self.towers:
            raise UsageError(f"towers={self.towers} does not go with predict, which measures one tower; leave one out")
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


@dataclasses.dataclass(frozen=True)
class SpeedrunConfig:
    """A recipe, the seeds it is timed over, and the frameworks its step is compared with."""

    exit_codes: ClassVar[str] = EXIT_CODES
    refused: ClassVar[Mapping[str, str]] = {  # settings of the recipe without a flag here -> why
        **dict.fromkeys(CLUSTER, "a race is run on one machine"),
        "seed": "a race takes several; write --seeds=",
        "target_accuracy": "it ends a run early, and a race is over whole runs; give --target, for their mean",
    }

    recipe: TrainConfig = setting(TrainConfig(), RECIPE, "what is trained")
    train_dir: str = _race("", "where runs and results are written; by default runs/speedrun-<recipe>")
    seeds: str = _race("0,1,2,3,4", "seeds to train, one after another; empty: only the comparison of frameworks")
    target: float = _race(
        0.0, "the fraction that the mean test accuracy, with the recipe's TTA, is to reach; 0: none", low=0, high=1
    )
    rounds: int = _race(
        3, "rounds over all frameworks, in another order each time; 0: no comparison of frameworks", low=0
    )
    peers: str = _race(
        "", f"frameworks to compare with, some of {', '.join(PEERS)}; by default all that have the model"
    )
    precisions: str = _race("", "compute types of the comparison; by default that of --precision, and float32")
    peer_python: str = _race("", "the Python that has PyTorch; by default the one that runs this")

    def __post_init__(self):
        check_limits(self)
        parse_seeds(self.seeds)
        parse_names("precisions", self.precisions, ("float32", "bfloat16"))
        for name in parse_names("peers", self.peers, tuple(PEERS)):
            if self.recipe.model not in PEERS[name].models:
                raise UsageError(f"peers={self.peers}: {name} has no {self.recipe.model}; leave it out")
        if self.recipe.strategy == "multi_worker":
            raise UsageError("strategy=multi_worker: a race is run on one machine; leave it out")
        if not self.seeds and not self.rounds:
            raise UsageError("seeds is empty and rounds=0, which leave nothing to do; give one of them")

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        return Path(self.train_dir or f"runs/speedrun-{self.recipe.name}")
