"""Images/s of this project's trainings beside the bare training steps of other frameworks, the peers."""

import contextlib
import dataclasses
import functools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from cifar_towers.benchmark import report
from cifar_towers.benchmark.cases import Rates, run_rounds
from cifar_towers.benchmark.worker import make_arrays, open_process
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import split_names
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import RunError
from cifar_towers.models.speednet import Whitening
from cifar_towers.reporting.run_records import align_columns
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT
from cifar_towers.training import build
from scripts.speedrun.settings import PEERS, SpeedrunConfig
from scripts.speedrun.training import last_line, run_training

OURS = "cifar_towers"
PROGRAMS = Path(__file__).parent / "peers"
VISIT_SECONDS, MIN_TIMED_STEPS = 15.0, 8  # of each framework in each round
NUM_PEER_CLASSES = 10
PILOT_STEPS = 3  # from which the number of timed steps is planned
# Published runs on PyTorch: the 2025 CIFAR-10 speed record; its accuracy is the mean with TTA.
PUBLISHED = {"speednet94": {"steps": 243, "batch_size": 1536, "accuracy": 0.9401, "runs": 200}}


@dataclasses.dataclass(kw_only=True)
class FrameworkRates(Rates):
    """The rates of one framework in one precision."""

    name: str
    precision: str
    images: int  # per step
    devices: int  # GPUs that it uses, or 1 for the CPU
    measure: Callable[[int], float] | None = None  # (steps) -> images/s

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}, {self.devices} device{'s' * (self.devices > 1)}"


def compare_frameworks(
    config: SpeedrunConfig, precisions: Sequence[str], dataset: Dataset, devices: int
) -> tuple[list[FrameworkRates], dict[str, str]]:
    """Time all frameworks in rounds, each in another order.

    Ours are whole trainings by `scripts/train.py`, with input and summaries. With several `devices` they are also timed
    on one of them, because some peers use one. Peers repeat steps over the same `NUM_FED_BATCHES` batches at full image
    size. A peer that trains another number of parameters than ours is left out.

    Returns:
      The rates, and the reason for each framework that was left out.
    """
    recipe, left_out = config.recipe, {}
    arrays = make_arrays(build.make_batches(recipe, dataset.train), build.make_augmentation(recipe, dataset.info))
    trained_parameters = num_trained_parameters(build.make_model(recipe, "float32", dataset.info))

    def leave_out(framework: FrameworkRates, error: RunError) -> None:
        if framework.name == OURS:
            raise error
        left_out[f"{framework.name}, {framework.precision}"] = str(error)
        print(f"{framework}: left out: {error}", flush=True)

    with contextlib.ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()), "batches.npz")
        np.savez(data, **arrays)
        results = []
        for framework in [*_ours(config, devices, precisions), *_peers(config, devices, precisions)]:
            try:
                if framework.name != OURS:
                    if (num_classes := len(dataset.info.class_names)) != NUM_PEER_CLASSES:
                        raise RunError(f"it has {NUM_PEER_CLASSES} classes, and {dataset.name} has {num_classes}")
                    command = _peer_command(framework, config, data)
                    time_steps = stack.enter_context(open_peer(command, trained_parameters))
                    framework.measure = functools.partial(_peer_rate, framework.images, time_steps)
                step_seconds = framework.images / framework.measure(PILOT_STEPS)
            except RunError as error:
                leave_out(framework, error)
                continue
            print(f"{framework}: a step {step_seconds:.2f} s", flush=True)
            framework.steps = max(MIN_TIMED_STEPS, math.ceil(VISIT_SECONDS / step_seconds))
            results.append(framework)
        run_rounds(results, config.rounds, lambda each: each.measure(each.steps), leave_out)
    return results, left_out


def num_trained_parameters(model: keras.Model) -> int:
    """Count the parameters that a step trains, of a model or its stock copy, where whitening layers are frozen."""
    trained = [layer.trainable_variables for layer in model.layers if not isinstance(layer, Whitening)]
    return sum(variable.shape.num_elements() for variables in trained for variable in variables)


def _ours(config: SpeedrunConfig, devices: int, precisions: Sequence[str]) -> Iterator[FrameworkRates]:
    """Yield our trainings in each precision, on one device and on all."""
    recipes = {1: dataclasses.replace(config.recipe, num_gpus=1, tower_shares=""), devices: config.recipe}
    for precision in precisions:
        for count, recipe in recipes.items():
            measure = functools.partial(_training_rate, recipe, precision, config.directory)
            yield FrameworkRates(
                name=OURS, precision=precision, images=recipe.batch_size, devices=count, measure=measure
            )


def _peers(config: SpeedrunConfig, devices: int, precisions: Sequence[str]) -> Iterator[FrameworkRates]:
    """Yield the peers that have the model, or those that are asked for, in the precisions that they have."""
    recipe, towers = config.recipe, _num_towers(config)
    available = [name for name, peer in PEERS.items() if recipe.model in peer.models]
    default = [name for name in available if towers > 1 or name != "keras-mirrored"]
    for name in split_names(config.peers) or default:
        images = recipe.batch_size * (towers if name == "tutorial" else 1)  # each of its towers has a batch
        count = devices if "{towers}" in PEERS[name].flags else 1
        for precision in precisions:
            if precision in PEERS[name].precisions:
                yield FrameworkRates(name=name, precision=precision, images=images, devices=count)


def _num_towers(config: SpeedrunConfig) -> int:
    """Return the number of towers of ours and of peers with several; with GPUs, the speedrun has set `num_gpus`."""
    return config.recipe.num_gpus or CPU_TOWERS_BY_DEFAULT


def _training_rate(recipe: TrainConfig, precision: str, directory: Path, steps: int) -> float:
    """Return the images/s of a training with that many steps, after a first one that compiles."""
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
        train_dir=str(directory / "comparison" / precision),
    )
    return run_training(timed, quiet=True)["images_per_sec"]


def _peer_rate(images: int, time_steps: Callable[[int], list[float]], steps: int) -> float:
    """Return the images/s of a peer's steps, after a first one that warms the caches."""
    return images * steps / sum(time_steps(steps + 1)[1:])


@contextlib.contextmanager
def open_peer(command: Sequence[str], trained_parameters: int) -> Iterator[Callable[[int], list[float]]]:
    """Start a peer's process, and yield a function (steps) -> seconds of each step; see peers/protocol.py.

    Raises:
      RunError: the peer cannot be started, ends early, or trains another number of parameters than
        `trained_parameters`.
    """
    with tempfile.TemporaryFile("w+") as captured, open_process(command, stderr=captured) as request:

        def time_steps(*steps: int) -> Any:
            try:
                return request(*steps)
            except RunError as error:
                raise RunError(last_line(captured) or str(error)) from error

        trained = time_steps()
        if trained != trained_parameters:
            raise RunError(f"it trains {trained:,} parameters where ours trains {trained_parameters:,}: another model")
        yield time_steps


def _peer_command(framework: FrameworkRates, config: SpeedrunConfig, data: Path) -> list[str]:
    peer, recipe = PEERS[framework.name], config.recipe
    python = config.peer_python if framework.name.startswith("pytorch") else ""
    flags = peer.flags.format(towers=_num_towers(config)).split()
    flags += [f"--model={recipe.model}", f"--precision={framework.precision}"]
    flags += [f"--batch_size={recipe.batch_size}", f"--data={data}"]
    return [python or sys.executable, str(PROGRAMS / peer.program), *flags]


def publish(directory: Path, metadata: Mapping, results: Sequence[FrameworkRates], left_out: Mapping[str, str]) -> None:
    """Print the comparison of frameworks, and write it to comparison.json and comparison.txt."""
    rows = {"frameworks": [each.as_json("measure") for each in results], "left_out": left_out}
    notes = [EXPLANATION, *(f"Left out: {name}: {reason}" for name, reason in left_out.items())]
    parts = [format_comparison(results), "\n".join(notes + _published_record(metadata["model"], results))]
    report.write_report(directory, "comparison", metadata, rows, parts)


def format_comparison(results: Sequence[FrameworkRates]) -> str:
    """Return a table with a line per framework and precision, the fastest first.

    `ours/theirs` compares equal numbers of devices.
    """
    ours = {(each.precision, each.devices): each.median for each in results if each.name == OURS}
    rows = [["framework", "precision", "devices", *results[0].cells(), "ours/theirs"]]
    for each in sorted(results, key=lambda each: (each.precision, -each.median)):
        ratio = "-" if each.name == OURS else f"{ours[each.precision, each.devices] / each.median:.2f}"
        rows.append([each.name, each.precision, str(each.devices), *each.cells().values(), ratio])
    return align_columns(rows)


def _published_record(model: str, results: Sequence[FrameworkRates]) -> list[str]:
    """Compute the duration of the published recipe at the rate of the fastest PyTorch peer, as a sentence if any."""
    pytorch = [each for each in results if each.name.startswith("pytorch")]
    record = PUBLISHED.get(model)
    if not record or not pytorch:
        return []
    best = max(pytorch, key=lambda each: each.median)
    steps, batch_size = record["steps"], record["batch_size"]
    return [
        f"The published recipe on PyTorch, computed and not run: its {steps} steps of {batch_size:,} at "
        f"the {best.median:,.0f} images/s of {best.name}, {best.precision}, take "
        f"{steps * batch_size / best.median:,.0f} s, without input, to "
        f"its published mean of {100 * record['accuracy']:.2f} % (n={record['runs']})."
    ]


EXPLANATION = (
    "Medians over rounds, each of which runs all frameworks in another order; n is rounds x timed steps per round. "
    f"{OURS} is a whole training by scripts/train.py at full image size, with input and summaries, without its "
    "compiling step. The peers make bare steps over the same batches (the tutorial with its own input). All make the "
    "step of most of a run, with the whitening's bias frozen. Devices are GPUs, or the CPU as one; ours/theirs "
    "compares equal numbers of devices. TF_ENABLE_ONEDNN_OPTS is the same for all TensorFlow "
    "programs except keras-untuned, which leaves it to TensorFlow; every process has all cores."
)
