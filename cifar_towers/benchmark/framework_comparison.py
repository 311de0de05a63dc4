"""Compares images/s of this project's trainings with the bare training steps of other frameworks."""

import contextlib
import dataclasses
import functools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cifar_towers.benchmark import processes
from cifar_towers.benchmark.baselines import make_arrays, num_trained_parameters
from cifar_towers.benchmark.rounds import Rates, run_rounds
from cifar_towers.benchmark.settings import PEERS, SpeedrunConfig
from cifar_towers.config import TrainConfig
from cifar_towers.config.settings import split_names
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import RunError
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT
from cifar_towers.training import build

OURS = "cifar_towers"
VISIT_SECONDS, MIN_TIMED_STEPS = 15.0, 8  # of each competitor in each round
PILOT_STEPS = 3  # from which the number of timed steps is planned


@dataclasses.dataclass(kw_only=True)
class Competitor(Rates):
    """One framework's step."""

    name: str
    precision: str
    images: int  # per step
    devices: int  # GPUs that it uses, or 1 for the CPU
    measure: Callable[[int], float] | None = None  # (steps) -> images/s

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}, {self.devices} device{'s' * (self.devices > 1)}"


def compare_frameworks(
    config: SpeedrunConfig, precisions: Sequence[str], dataset: Dataset, devices: int
) -> tuple[list[Competitor], dict[str, str]]:
    """Times all competitors in rounds, in another order each time; returns them and why others were left out.

    Ours are whole trainings by `scripts/train.py`, with input and summaries; with several `devices`, also on one of
    them, as some peers use one. Peers repeat steps over `NUM_FED_BATCHES` of the same batches, at full image size. A
    peer that trains another number of parameters than ours is left out.
    """
    recipe, left_out = config.recipe, {}
    arrays = make_arrays(build.make_batches(recipe, dataset.train), build.make_augmentation(recipe, dataset.info))
    trained_parameters = num_trained_parameters(build.make_model(recipe, "float32", dataset.info))

    def leave_out(competitor: Competitor, error: RunError) -> None:
        if competitor.name == OURS:
            raise error
        left_out[f"{competitor.name}, {competitor.precision}"] = str(error)
        print(f"{competitor}: left out: {error}", flush=True)

    with contextlib.ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()), "batches.npz")
        np.savez(data, **arrays)
        competitors = []
        for competitor in [*_ours(config, devices, precisions), *_peers(config, devices, precisions)]:
            try:
                if competitor.name != OURS:
                    command = _peer_command(competitor, config, data)
                    time_steps = stack.enter_context(open_peer(command, trained_parameters))
                    competitor.measure = functools.partial(_peer_rate, competitor.images, time_steps)
                step_seconds = competitor.images / competitor.measure(PILOT_STEPS)
            except RunError as error:
                leave_out(competitor, error)
                continue
            print(f"{competitor}: a step {step_seconds:.2f} s", flush=True)
            competitor.steps = max(MIN_TIMED_STEPS, math.ceil(VISIT_SECONDS / step_seconds))
            competitors.append(competitor)
        run_rounds(competitors, config.rounds, lambda each: each.measure(each.steps), leave_out)
    return competitors, left_out


def _ours(config: SpeedrunConfig, devices: int, precisions: Sequence[str]) -> Iterator[Competitor]:
    """Our trainings in each precision, on one device and on all."""
    recipes = {1: dataclasses.replace(config.recipe, num_gpus=1), devices: config.recipe}
    for precision in precisions:
        for count, recipe in recipes.items():
            measure = functools.partial(_training_rate, recipe, precision, config.directory)
            yield Competitor(name=OURS, precision=precision, images=recipe.batch_size, devices=count, measure=measure)


def _peers(config: SpeedrunConfig, devices: int, precisions: Sequence[str]) -> Iterator[Competitor]:
    """The peers that have the model, or those that are asked for, in the precisions that they have."""
    recipe, towers = config.recipe, _num_towers(config)
    available = [name for name, peer in PEERS.items() if recipe.model in peer.models]
    default = [name for name in available if towers > 1 or name != "keras-mirrored"]
    for name in split_names(config.peers) or default:
        images = recipe.batch_size * (towers if name == "tutorial" else 1)  # each of its towers has a batch
        count = devices if "{towers}" in PEERS[name].flags else 1
        for precision in precisions:
            if precision in PEERS[name].precisions:
                yield Competitor(name=name, precision=precision, images=images, devices=count)


def _num_towers(config: SpeedrunConfig) -> int:
    """Towers of ours and of the peers that have several; with GPUs, the race has set `num_gpus`."""
    return config.recipe.num_gpus or CPU_TOWERS_BY_DEFAULT


def _training_rate(recipe: TrainConfig, precision: str, directory: Path, steps: int) -> float:
    """Images/s of a training with that many steps, after a first one that compiles."""
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


def _peer_rate(images: int, time_steps: Callable[[int], list[float]], steps: int) -> float:
    """Images/s of a peer's steps, after a first one that warms the caches."""
    return images * steps / sum(time_steps(steps + 1)[1:])


@contextlib.contextmanager
def open_peer(command: Sequence[str], trained_parameters: int) -> Iterator[Callable[[int], list[float]]]:
    """A peer's process as a function (steps) -> seconds of each; see scripts/peers/protocol.py.

    Raises:
      RunError: it cannot be started, ends early, or trains another number of parameters than `trained_parameters`.
    """
    with processes.open_process(command) as time_steps:
        trained = time_steps()
        if trained != trained_parameters:
            raise RunError(f"it trains {trained:,} parameters where ours trains {trained_parameters:,}: another model")
        yield time_steps


def _peer_command(competitor: Competitor, config: SpeedrunConfig, data: Path) -> list[str]:
    peer, recipe = PEERS[competitor.name], config.recipe
    python = config.peer_python if competitor.name.startswith("pytorch") else ""
    flags = peer.flags.format(towers=_num_towers(config)).split()
    flags += [f"--model={recipe.model}", f"--precision={competitor.precision}"]
    flags += [f"--batch_size={recipe.batch_size}", f"--data={data}"]
    return [python or sys.executable, processes.script_path(f"peers/{peer.program}"), *flags]
