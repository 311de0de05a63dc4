"""Settings of the speedrun, and the peers that it knows. Must not import TensorFlow."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from cifar_towers.config import TrainConfig, parse_seeds
from cifar_towers.config.programs import CLUSTER, BenchmarkConfig
from cifar_towers.config.train_config import RECIPE, check_limits, parse_names, setting, settings_of
from cifar_towers.errors import UsageError
from cifar_towers.registry import MODELS


class Peer(NamedTuple):
    """Another framework's training step, measured by a program in scripts/speedrun/peers/."""

    program: str
    models: Collection[str]
    flags: str = ""  # a peer with {towers} uses all devices, any other peer uses one
    precisions: tuple[str, ...] = ("float32", "bfloat16")


PEERS = {
    "pytorch": Peer("pytorch_step.py", ("speednet94", "resnet20")),
    "pytorch-compiled": Peer("pytorch_step.py", ("speednet94", "resnet20"), "--compile"),
    "keras": Peer("keras_fit.py", MODELS),
    "keras-untuned": Peer("keras_fit.py", MODELS, "--untuned"),
    "keras-mirrored": Peer("keras_fit.py", MODELS, "--mirrored={towers}"),
    "tutorial": Peer("tutorial_graph.py", ("cifarnet",), "--towers={towers}", ("float32",)),
}
_speedrun = settings_of("Speedrun")


@dataclasses.dataclass(frozen=True)
class SpeedrunConfig:
    """A recipe, the seeds it is timed over, and the frameworks its step is compared with."""

    exit_codes: ClassVar[str] = BenchmarkConfig.exit_codes
    refused: ClassVar[Mapping[str, str]] = {  # settings of the recipe without a flag here -> why
        **dict.fromkeys(CLUSTER, "a speedrun takes one machine"),
        "seed": "a speedrun takes several; write --seeds=",
        "target_accuracy": "it ends a run early, and a speedrun times whole runs; give --target, for their mean",
    }

    recipe: TrainConfig = setting(TrainConfig(), RECIPE, "recipe that is timed")
    train_dir: str = _speedrun("", "directory of the runs and results; by default runs/speedrun-<recipe>")
    seeds: str = _speedrun("0,1,2,3,4", "seeds to train, one after another; empty: only the comparison of frameworks")
    target: float = _speedrun(
        0.0, "fraction that the mean test accuracy, with the recipe's TTA, should reach; 0: no target", low=0, high=1
    )
    rounds: int = _speedrun(
        3, "rounds over all frameworks, each in another order; 0: no comparison of frameworks", low=0
    )
    peers: str = _speedrun("", f"peers to compare with, some of {', '.join(PEERS)}; by default all that have the model")
    precisions: str = _speedrun("", "precisions of the comparison; by default that of --precision, and float32")
    peer_python: str = _speedrun("", "Python interpreter that has PyTorch; by default the one that runs this")

    def __post_init__(self):
        check_limits(self)
        parse_seeds(self.seeds)
        parse_names("precisions", self.precisions, ("float32", "bfloat16"))
        for name in parse_names("peers", self.peers, tuple(PEERS)):
            if self.recipe.model not in PEERS[name].models:
                raise UsageError(f"peers={self.peers}: {name} has no {self.recipe.model}; leave it out")
        if self.recipe.strategy == "multi_worker":
            raise UsageError("strategy=multi_worker: a speedrun takes one machine; leave it out")
        if not self.seeds and not self.rounds:
            raise UsageError("seeds is empty and rounds=0, which leave nothing to do; give one of them")

    @property
    def directory(self) -> Path:
        """`train_dir`, or its default."""
        return Path(self.train_dir or f"runs/speedrun-{self.recipe.name}")
