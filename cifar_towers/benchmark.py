"""Short trainings of one recipe with different placements, strategies and numbers of towers,
compared on this machine.

A case is a set of flags. A visit is a short training of a case in a process of its own. Each round
visits all cases in another random order.
"""

import dataclasses
import datetime
import itertools
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.errors import RunError
from cifar_towers.reporting.records import align_columns, format_rate
from cifar_towers.signals import StopSignals
from cifar_towers.towers.placement import PLACEMENTS

JSON_FILE, PICTURE_FILE = "benchmark.json", "benchmark.png"
WINDOW_STEPS = 20  # a training writes the rate of its last 20 steps
WARM_UP_STEPS = 5
NUM_WINDOWS = {
    "CPU": 1,
    "GPU": 9,
}  # of a visit; steps take seconds on a CPU and milliseconds on a GPU


class BenchmarkCase(NamedTuple):
    """The settings that the benchmark varies, by the names of their flags."""

    num_gpus: int
    strategy: str  # towers or mirrored
    variable_placement: str  # empty if every device has a copy of the variables
    jit_compile: bool = False

    def __str__(self) -> str:
        return " ".join(as_flags(self._asdict()))


Rates = Mapping[BenchmarkCase, Sequence[float]]  # images per second of each visit


def run_benchmark(config: BenchmarkConfig, training_command: Sequence[str]) -> None:
    """Measure all cases; print a table and the fastest case, and write them to the config's
    directory.

    After a signal to stop, the visits that are finished are reported.

    Args:
      training_command: command that trains; the flags of each training are appended.

    Raises:
      RunError: no case could be measured.
    """
    num_gpus = len(tf.config.get_visible_devices("GPU"))
    cases = make_cases(config, num_gpus)
    recipe = short_training(config, on_gpus=num_gpus > 0)
    config.directory.mkdir(parents=True, exist_ok=True)
    rates: dict[BenchmarkCase, list[float]] = {}
    machine: dict[str, Any] = {}
    start, signals = time.monotonic(), StopSignals()
    with signals.recorded():
        for number, order in enumerate(rounds(cases), 1):
            for case in order:
                if signals.received:
                    break
                print(f"round {number}: {case}: ", end="", flush=True)
                try:
                    rate, machine = visit(recipe, case, training_command, config.directory)
                except RunError as error:
                    cases.remove(case)
                    print(f"left out: {error}", flush=True)
                else:
                    rates.setdefault(case, []).append(rate)
                    write_json(config, rates, machine)
                    print(f"{rate:,.0f} images/s", flush=True)
            elapsed = time.monotonic() - start
            if (
                signals.received
                or not cases
                or elapsed * (number + 1) / number > 60 * config.minutes
            ):
                break
    if not rates:
        raise RunError("no case could be measured; the lines above say why")
    publish(config, rates, machine)


def make_cases(config: BenchmarkConfig, num_gpus: int) -> list[BenchmarkCase]:
    """Return the placements and strategies to compare, for each number of towers; on GPUs with and
    without XLA.

    By default the numbers of towers are 1, 2, 4 and so on up to all GPUs, or 1 and 2 on a CPU, if
    they can divide the batch evenly. One tower on a CPU has only one placement.
    """
    limit = num_gpus or 2
    doubled = sorted({limit, *(2**power for power in range(limit.bit_length()))})
    counts = config.tower_counts or [count for count in doubled if config.batch_size % count == 0]
    cases = []
    for count in counts:
        placements = (
            tuple(PLACEMENTS) if count > 1 else ("cpu", "round_robin") if num_gpus else ("cpu",)
        )
        cases += [BenchmarkCase(count, "towers", placement) for placement in placements]
        cases += [BenchmarkCase(count, "mirrored", "")] if count > 1 else []
    ways = (False, True) if num_gpus else (config.jit_compile,)
    return [case._replace(jit_compile=way) for way in ways for case in cases]


def short_training(config: TrainConfig, on_gpus: bool) -> TrainConfig:
    """Return the recipe with a few steps, as in most of a run, without evaluations before the end
    and summaries.

    Images have their full size and the whitening's bias is frozen.
    """
    steps = WARM_UP_STEPS + WINDOW_STEPS * NUM_WINDOWS["GPU" if on_gpus else "CPU"]
    return dataclasses.replace(
        config,
        max_steps=steps,
        epochs=config.epochs and max(config.epochs, float(steps)),  # an epoch has at least one step
        image_size_schedule="",
        whitening_epochs=0.0,
        eval_every_epochs=0.0,
        tta=False,
        summary_every_steps=10 * WINDOW_STEPS,  # rates are written ten times as often
    )


def rounds(cases: Sequence[BenchmarkCase]) -> Iterator[list[BenchmarkCase]]:
    """Yield the cases again and again in another random order. The orders are the same in every
    benchmark.

    A case that is removed from `cases` is left out from the next round on.
    """
    for number in itertools.count():
        yield random.Random(number).sample(cases, len(cases))


def visit(
    recipe: TrainConfig, case: BenchmarkCase, training_command: Sequence[str], directory: Path
) -> tuple[float, dict[str, Any]]:
    """Train once; return the images per second, without compilation and saving, and the training's
    environment.json.

    The training writes to a folder of `directory` that is deleted afterwards.

    Raises:
      RunError: the training failed, with the last line that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="visit-", dir=directory) as train_dir:
        flags = [
            "--recipe=",
            *as_flags(vars(recipe) | case._asdict() | {"recipe": "", "train_dir": train_dir}),
        ]
        done = subprocess.run([*training_command, *flags], capture_output=True, text=True)
        if done.returncode:
            raise RunError([f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1])
        records = [
            json.loads(line) for line in Path(train_dir, files.METRICS).read_text().splitlines()
        ]
        _, *rates = (record["images_per_sec"] for record in records if record["kind"] == "train")
        return statistics.median(rates), json.loads(Path(train_dir, files.ENVIRONMENT).read_text())


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of the settings that a training has, without those that have their
    default.
    """
    return [
        f"--{name}={value}"
        for name, value in settings.items()
        if value != getattr(TrainConfig, name, value)
    ]


def write_json(config: BenchmarkConfig, rates: Rates, machine: Mapping[str, Any]) -> None:
    """Write all visits, and the statistics of every case."""
    cases = []
    for case, values in by_rate(rates):
        low, median, high = quartiles(values)
        results = {"images_per_sec": values, "median": median, "quartiles": [low, high]}
        cases.append({**case._asdict(), "flags": str(case), **results})
    content = {
        "recipe": config.name,
        "model": config.model,
        "batch_size": config.batch_size,
        "dataset": config.dataset,
        "date": datetime.date.today().isoformat(),
        **{name: machine[name] for name in ("processor", "cores", "gpus", "packages")},
        "cases": cases,
        "fastest": cases[0]["flags"],
    }
    files.write_json(config.directory / JSON_FILE, content)


def publish(config: BenchmarkConfig, rates: Rates, machine: Mapping[str, Any]) -> None:
    """Print the recipe, the machine, the table and the flags of the fastest case; write the
    picture.
    """
    gpus = machine["gpus"]
    devices = [
        machine["processor"],
        f"{machine['cores']} cores",
        *(f"{gpus.count(gpu)} x {gpu}" for gpu in {*gpus}),
    ]
    title = f"{config.name}, batches of {config.batch_size:,}; {', '.join(devices)}"
    plot(rates, title).savefig(config.directory / PICTURE_FILE, dpi=120)
    print(f"\n{title}\n{table(rates, config.batch_size)}")
    fastest, _ = by_rate(rates)[0]
    print(
        f"\nwritten to {config.directory}: {JSON_FILE}, {PICTURE_FILE}\nfastest: {fastest}",
        flush=True,
    )


def table(rates: Rates, batch_size: int) -> str:
    """Return a table with a line per case, the fastest first."""
    rows = [
        ["towers", "strategy", "placement", "XLA", "images/s", "quartiles", "ms per step", "visits"]
    ]
    for case, values in by_rate(rates):
        low, median, high = quartiles(values)
        row = [
            str(case.num_gpus),
            case.strategy,
            case.variable_placement or "-",
            "yes" if case.jit_compile else "no",
        ]
        row += [format_rate(median), f"{format_rate(low)}-{format_rate(high)}"]
        rows.append([*row, f"{1000 * batch_size / median:,.1f}", str(len(values))])
    return align_columns(rows, left=(1, 2, 3))


def plot(rates: Rates, title: str) -> Figure:
    """Draw the median of every case as a bar, with its quartiles as error bars, the fastest on
    top.
    """
    ordered = by_rate(rates)
    low, median, high = np.transpose([quartiles(values) for _, values in ordered])
    figure = Figure((9, 1.2 + 0.35 * len(ordered)), layout="constrained")
    panel = figure.subplots()
    bars = panel.barh(
        [str(case) for case, _ in ordered], median, xerr=[median - low, high - median], capsize=3
    )
    panel.bar_label(bars, fmt=format_rate, padding=4)
    panel.invert_yaxis()
    panel.set(title=title, xlabel="images/s: median and quartiles")
    panel.title.set_fontsize(9)
    panel.margins(x=0.12)
    return figure


def by_rate(rates: Rates) -> list[tuple[BenchmarkCase, Sequence[float]]]:
    """Return the cases with their visits, sorted by the median, the fastest first."""
    return sorted(rates.items(), key=lambda item: -np.median(item[1]))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return low, median, high
