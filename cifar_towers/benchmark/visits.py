"""What the benchmark measures: its cases, and the short training that is one visit of a case."""

import dataclasses
import itertools
import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.config.train_config import split_names
from cifar_towers.errors import RunError
from cifar_towers.towers.placement import PLACEMENTS

WINDOW_STEPS = 20  # a training writes the rate of its last 20 steps
WARM_UP_STEPS = 5
NUM_WINDOWS = {"CPU": 1, "GPU": 9}  # of a visit; steps take seconds on a CPU and milliseconds on a GPU


class BenchmarkCase(NamedTuple):
    """The settings that the benchmark varies, by the names of their flags."""

    num_gpus: int
    strategy: str  # towers or mirrored
    variable_placement: str  # empty if every device has a copy of the variables
    precision: str

    def __str__(self) -> str:
        return " ".join(as_flags(self._asdict()))


def make_cases(config: BenchmarkConfig, num_gpus: int) -> list[BenchmarkCase]:
    """Return every variable placement and `mirrored`, for each number of towers and each precision.

    By default the numbers of towers are 1, 2, 4 and so on up to all GPUs, or 1 and 2 on a CPU, if they can divide the
    batch evenly. One tower on a CPU has only one placement.
    """
    limit = num_gpus or 2
    doubled = sorted({limit, *(2**power for power in range(limit.bit_length()))})
    counts = config.tower_counts or [count for count in doubled if config.recipe.batch_size % count == 0]
    cases = []
    for precision, count in itertools.product(split_names(config.precisions) or [config.recipe.precision], counts):
        placements = tuple(PLACEMENTS) if count > 1 else ("cpu", "round_robin") if num_gpus else ("cpu",)
        cases += [BenchmarkCase(count, "towers", placement, precision) for placement in placements]
        cases += [BenchmarkCase(count, "mirrored", "", precision)] if count > 1 else []
    return cases


def short_training(recipe: TrainConfig, on_gpus: bool) -> TrainConfig:
    """Return the recipe with a few steps, as in most of a run, without evaluations before the end and summaries.

    Images have their full size and the whitening's bias is frozen.
    """
    steps = WARM_UP_STEPS + WINDOW_STEPS * NUM_WINDOWS["GPU" if on_gpus else "CPU"]
    return dataclasses.replace(
        recipe,
        max_steps=steps,
        epochs=recipe.epochs and max(recipe.epochs, float(steps)),  # an epoch has at least one step
        image_size_schedule="",
        whitening_epochs=0.0,
        eval_every_epochs=0.0,
        tta=0,
        summary_every_steps=10 * WINDOW_STEPS,  # rates are written ten times as often
    )


def visit(
    recipe: TrainConfig, case: BenchmarkCase, training_command: Sequence[str], directory: Path
) -> tuple[float, dict[str, Any]]:
    """Train once; return the images per second, without compilation and saving, and the training's environment.json.

    The training writes to a folder of `directory` that is deleted afterwards.

    Raises:
      RunError: the training failed, with the last line that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="visit-", dir=directory) as train_dir:
        config = dataclasses.replace(recipe, **case._asdict(), recipe="", train_dir=train_dir)
        flags = ["--recipe=", *as_flags({name: getattr(config, name) for name in vars(config)})]
        done = subprocess.run([*training_command, *flags], capture_output=True, text=True)
        if done.returncode:
            raise RunError([f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1])
        records = [json.loads(line) for line in Path(train_dir, files.METRICS).read_text().splitlines()]
        _, *rates = (record["images_per_sec"] for record in records if record["kind"] == "train")
        return statistics.median(rates), json.loads(Path(train_dir, files.ENVIRONMENT).read_text())


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of a training's settings, without those that have their default."""
    return [f"--{name}={value}" for name, value in settings.items() if value != getattr(TrainConfig, name)]
