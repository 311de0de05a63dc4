"""The same net, batch and machine in turn: whole trainings of ours, and the bare steps of peers."""

import dataclasses
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_towers.benchmark import processes
from cifar_towers.benchmark.baselines import NUM_FED_BATCHES
from cifar_towers.benchmark.round_stats import RoundStats
from cifar_towers.cli import tf_import
from cifar_towers.cli.tool_configs import PEERS, SpeedrunConfig
from cifar_towers.config.settings import split_names
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.errors import RunError
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT

OURS = "cifar_towers"
VISIT_SECONDS, LEAST_STEPS = 15.0, 8  # a visit is about this long, and has this many steps at least
ON_ALL_DEVICES = ("keras-mirrored", "tutorial")  # the peers that are not on one alone
PILOT_STEPS = 3  # steps of the training that tells how long a step takes


@dataclasses.dataclass
class Competitor(RoundStats):
    """Who takes part; `images_per_sec` holds one number a round."""

    name: str
    precision: str
    images: int  # of a step
    devices: int  # GPUs that it computes on; without GPUs the machine's CPU, which is one for all
    steps: int  # of a visit
    images_per_sec: list[float] = dataclasses.field(default_factory=list)


class Entry(NamedTuple):
    """A contestant with what makes so many steps of it and tells their images/s."""

    contestant: Competitor
    visit: Callable[[int], float]


def run(
    config: SpeedrunConfig,
    devices: int,
    precisions: Sequence[str],
    batches: Batches,
    augmentation: Augmentation,
    trained: int,
) -> tuple[list[Competitor], dict[str, str]]:
    """Rounds of visits to all who can run; and who was left out, with the reason.

    Ours are trainings by `scripts/train.py`, input, summaries and all; on several `devices` there are also some on one
    of them, as some peers have one. Peers make steps over `NUM_FED_BATCHES` of the same batches. All are on full
    images, every first step is left out, and a peer whose steps do not train as many numbers as are
    `trained` in ours is none.
    """
    left_out: dict[str, str] = {}

    def leave_out(name: str, precision: str, error: RunError) -> None:
        left_out[f"{name}, {precision}"] = str(error)
        print(f"{name}, {precision}: left out: {error}", flush=True)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_batches(folder / "batches.npz", batches, augmentation)
        ours = {1: dataclasses.replace(config, num_gpus=1), devices: config}
        entries = [_enter_ours(each, count, precision) for precision in precisions for count, each in ours.items()]
        for name in _peers(config):
            for precision in _precisions_of(name, precisions):
                try:
                    entries.append(
                        _enter_peer(config, devices, name, precision, folder / "batches.npz", trained, stack)
                    )
                except RunError as error:
                    leave_out(name, precision, error)
        for number in range(config.rounds):
            print(f"round {number + 1}/{config.rounds}", flush=True)
            order = list(entries)
            random.Random(number).shuffle(order)
            for entry in order:
                contestant = entry.contestant
                try:
                    contestant.images_per_sec.append(entry.visit(contestant.steps))
                except RunError as error:  # as where memory has become short; the others go on
                    if contestant.name == OURS:
                        raise
                    leave_out(contestant.name, contestant.precision, error)
                    entries.remove(entry)
    return [entry.contestant for entry in entries], left_out


def write_batches(path: Path, batches: Batches, augmentation: Augmentation) -> None:
    """The recipe's first batches for peers: images as the net gets them, labels, and the images as they are."""
    first = [batches.at(step) for step in range(NUM_FED_BATCHES)]
    np.savez(
        path,
        images=np.concatenate([augmentation.train(batch.images, batch.draws) for batch in first]),
        labels=np.concatenate([batch.labels for batch in first]),
        raw=np.concatenate([batch.images for batch in first]),
    )


def _enter_ours(config: SpeedrunConfig, devices: int, precision: str) -> Entry:
    visit = _training(config, precision)
    seconds = config.batch_size / visit(PILOT_STEPS)
    return Entry(_contestant(OURS, precision, config.batch_size, devices, seconds), visit)


def _enter_peer(
    config: SpeedrunConfig, devices: int, name: str, precision: str, data: Path, trained: int, stack: ExitStack
) -> Entry:
    """A peer whose process has made its first step, and ends with `stack`."""
    towers = _towers(config)
    images = config.batch_size * (towers if name == "tutorial" else 1)
    command = [*_command(name, config, towers), f"--model={config.model}", f"--precision={precision}"]
    command += [f"--batch_size={config.batch_size}", f"--data={data}"]
    ask = stack.enter_context(processes.peer(command, trained))
    (step,) = ask(1)
    devices = devices if name in ON_ALL_DEVICES else 1
    return Entry(_contestant(name, precision, images, devices, step), _asking(ask, images))


def _contestant(name: str, precision: str, images: int, devices: int, seconds: float) -> Competitor:
    """One whose step takes so many seconds."""
    print(f"{name}, {precision}, {devices} device{'s' * (devices > 1)}: a step {seconds:.2f} s", flush=True)
    return Competitor(name, precision, images, devices, max(LEAST_STEPS, math.ceil(VISIT_SECONDS / seconds)))


def _training(config: SpeedrunConfig, precision: str) -> Callable[[int], float]:
    """A function (steps) -> images/s of a training of so many, and one that compiles before them."""

    def visit(steps: int) -> float:
        epochs = config.epochs and max(config.epochs, steps + 1.0)  # one has a step at least
        changes = {
            "epochs": epochs,
            "max_steps": steps + 1,
            "image_size_schedule": "",
            "tta": 0,
            "eval_every_epochs": 0.0,
        }
        changes |= {
            "seeds": "",
            "whitening_epochs": 0.0,  # its bias rests, as it does in most of a run
            "profile_steps": "",
            "precision": precision,
            "overwrite": True,
            "train_dir": str(config.directory / "side-by-side" / precision),
        }
        return processes.train(config.replace_recipe(**changes), quiet=True)["images_per_sec"]

    return visit


def _asking(ask: Callable[[int], list[float]], images: int) -> Callable[[int], float]:
    """A function (steps) -> images/s of a peer; before them is one step that finds the memory as another left it."""
    return lambda steps: images * steps / sum(ask(steps + 1)[1:])


def _peers(config: SpeedrunConfig) -> list[str]:
    known = [name for name, models in PEERS.items() if config.model in models]
    return split_names(config.peers) or [name for name in known if name != "keras-mirrored" or _towers(config) > 1]


def _towers(config: SpeedrunConfig) -> int:
    """How many ours has, and the peers that have some; where there are GPUs, the config names their number."""
    return config.num_gpus or CPU_TOWERS_BY_DEFAULT


def _precisions_of(name: str, precisions: Sequence[str]) -> list[str]:
    """Those that a peer has: the tutorial is of float32, and none is of float16."""
    known = ("float32",) if name == "tutorial" else ("float32", "bfloat16")
    return [precision for precision in precisions if precision in known]


def _command(name: str, config: SpeedrunConfig, towers: int) -> list[str]:
    """How a peer is started, without what all are told."""
    pytorch = [config.peer_python or sys.executable, tf_import.script("peers/pytorch_step.py")]
    keras = [sys.executable, tf_import.script("peers/keras_fit.py")]
    return {
        "pytorch": pytorch,
        "pytorch-compiled": [*pytorch, "--compile"],
        "keras": keras,
        "keras-mirrored": [*keras, f"--mirrored={towers}"],
        "tutorial": [sys.executable, tf_import.script("peers/tutorial_graph.py"), f"--towers={towers}"],
    }[name]
