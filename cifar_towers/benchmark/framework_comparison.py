"""Compares images/s of this project's trainings with the bare training steps of other frameworks."""

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
from cifar_towers.benchmark.baselines import make_arrays
from cifar_towers.benchmark.round_stats import RoundStats
from cifar_towers.benchmark.settings import PEERS, SpeedrunConfig
from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import split_names
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.errors import RunError
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT

OURS = "cifar_towers"
VISIT_SECONDS, MIN_TIMED_STEPS = 15.0, 8  # of each competitor in each round
ON_ALL_DEVICES = ("keras-mirrored", "tutorial")  # the other peers use one device
PILOT_STEPS = 3  # of the training from which the number of timed steps is planned


@dataclasses.dataclass
class Competitor(RoundStats):
    """One framework's step; `images_per_sec` holds one number per round."""

    name: str
    precision: str
    images: int  # per step
    devices: int  # GPUs that it uses, or 1 for the CPU
    steps: int  # timed in each round
    images_per_sec: list[float] = dataclasses.field(default_factory=list)


class Entry(NamedTuple):
    """A competitor, and a function (steps) -> images/s."""

    competitor: Competitor
    measure: Callable[[int], float]


class Comparison(NamedTuple):
    """Measured competitors, and the reason for each that was left out."""

    competitors: list[Competitor]
    left_out: dict[str, str]


def compare_frameworks(
    config: SpeedrunConfig,
    devices: int,
    precisions: Sequence[str],
    batches: Batches,
    augmentation: Augmentation,
    trained_parameters: int,
) -> Comparison:
    """Times all competitors in rounds, in another order each time.

    Ours are whole trainings by `scripts/train.py`, with input and summaries; with several `devices`, also on one of
    them, as some peers use one. Peers repeat steps over `NUM_FED_BATCHES` of the same batches, at full image size. A
    peer that does not train `trained_parameters` parameters is left out.
    """
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()), "batches.npz")
        np.savez(data, **make_arrays(batches, augmentation))
        left_out: dict[str, str] = {}
        entries = _enter_ours(config, devices, precisions)
        for name in _peer_names(config):
            supported = ("float32",) if name == "tutorial" else ("float32", "bfloat16")
            for precision in [each for each in precisions if each in supported]:  # no peer runs in float16
                command = _peer_command(name, precision, config, data)
                try:
                    time_steps = stack.enter_context(processes.open_peer(command, trained_parameters))
                    entries.append(_enter_peer(name, precision, config, devices, time_steps))
                except RunError as error:
                    _leave_out(name, precision, error, left_out)
        _run_rounds(entries, config.rounds, left_out)
    return Comparison([entry.competitor for entry in entries], left_out)


def _run_rounds(entries: list[Entry], rounds: int, left_out: dict[str, str]) -> None:
    """Adds a measurement of each entry in each round; removes peers that fail."""
    for number in range(rounds):
        print(f"round {number + 1}/{rounds}", flush=True)
        order = list(entries)
        random.Random(number).shuffle(order)
        for entry in order:
            competitor = entry.competitor
            try:
                competitor.images_per_sec.append(entry.measure(competitor.steps))
            except RunError as error:  # for example out of memory; the other peers are still measured
                if competitor.name == OURS:
                    raise
                _leave_out(competitor.name, competitor.precision, error, left_out)
                entries.remove(entry)


def _leave_out(name: str, precision: str, error: RunError, left_out: dict[str, str]) -> None:
    left_out[f"{name}, {precision}"] = str(error)
    print(f"{name}, {precision}: left out: {error}", flush=True)


def _enter_ours(config: SpeedrunConfig, devices: int, precisions: Sequence[str]) -> list[Entry]:
    """Our trainings in each precision, on one device and on all."""
    recipes = {1: dataclasses.replace(config.recipe, num_gpus=1), devices: config.recipe}
    entries = []
    for precision in precisions:
        for count, recipe in recipes.items():
            measure = _make_training_fn(recipe, precision, config.directory)
            step_seconds = recipe.batch_size / measure(PILOT_STEPS)
            entries.append(Entry(_make_competitor(OURS, precision, recipe.batch_size, count, step_seconds), measure))
    return entries


def _enter_peer(
    name: str, precision: str, config: SpeedrunConfig, devices: int, time_steps: Callable[[int], list[float]]
) -> Entry:
    """A peer whose process has made its first step."""
    images = config.recipe.batch_size * (_num_towers(config.recipe) if name == "tutorial" else 1)
    (step_seconds,) = time_steps(1)
    devices = devices if name in ON_ALL_DEVICES else 1

    def measure(steps: int) -> float:
        return images * steps / sum(time_steps(steps + 1)[1:])  # the first step warms the caches

    return Entry(_make_competitor(name, precision, images, devices, step_seconds), measure)


def _make_competitor(name: str, precision: str, images: int, devices: int, step_seconds: float) -> Competitor:
    """Plans the number of timed steps by the seconds of one."""
    print(f"{name}, {precision}, {devices} device{'s' * (devices > 1)}: a step {step_seconds:.2f} s", flush=True)
    steps = max(MIN_TIMED_STEPS, math.ceil(VISIT_SECONDS / step_seconds))
    return Competitor(name, precision, images, devices, steps)


def _make_training_fn(recipe: TrainConfig, precision: str, directory: Path) -> Callable[[int], float]:
    """A function (steps) -> images/s of a training with that many steps, after a first one that compiles."""

    def measure(steps: int) -> float:
        timed = dataclasses.replace(
            recipe,
            epochs=recipe.epochs and max(recipe.epochs, steps + 1.0),  # an epoch has at least one step
            max_steps=steps + 1,
            image_size_schedule="",
            tta=0,
            eval_every_epochs=0.0,
            whitening_epochs=0.0,  # its bias is frozen, as it is in most of a run
            profile_steps="",
            precision=precision,
            overwrite=True,
            train_dir=str(directory / "side-by-side" / precision),
        )
        return processes.run_training(timed, quiet=True)["images_per_sec"]

    return measure


def _peer_names(config: SpeedrunConfig) -> list[str]:
    several = _num_towers(config.recipe) > 1
    available = [name for name, models in PEERS.items() if config.recipe.model in models]
    return split_names(config.peers) or [name for name in available if several or name != "keras-mirrored"]


def _num_towers(recipe: TrainConfig) -> int:
    """Towers of ours and of the peers that have several; with GPUs, the race has set `num_gpus`."""
    return recipe.num_gpus or CPU_TOWERS_BY_DEFAULT


def _peer_command(name: str, precision: str, config: SpeedrunConfig, data: Path) -> list[str]:
    recipe, towers = config.recipe, _num_towers(config.recipe)
    pytorch = [config.peer_python or sys.executable, processes.script_path("peers/pytorch_step.py")]
    keras = [sys.executable, processes.script_path("peers/keras_fit.py")]
    programs = {
        "pytorch": pytorch,
        "pytorch-compiled": [*pytorch, "--compile"],
        "keras": keras,
        "keras-mirrored": [*keras, f"--mirrored={towers}"],
        "tutorial": [sys.executable, processes.script_path("peers/tutorial_graph.py"), f"--towers={towers}"],
    }
    flags = [f"--model={recipe.model}", f"--precision={precision}", f"--batch_size={recipe.batch_size}"]
    return [*programs[name], *flags, f"--data={data}"]
