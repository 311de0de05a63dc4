"""The benchmark: short trainings of one recipe in rounds of random order, and their report."""

import datetime
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from cifar_towers import files
from cifar_towers.benchmark.visits import BenchmarkCase, make_cases, short_training, visit
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.errors import RunError
from cifar_towers.reporting.records import align_columns, format_rate
from cifar_towers.signals import StopSignals

Rates = Mapping[BenchmarkCase, Sequence[float]]  # images per second of each visit
JSON_FILE, PICTURE_FILE = "benchmark.json", "benchmark.png"


def run_benchmark(config: BenchmarkConfig, training_command: Sequence[str]) -> None:
    """Measure all cases; print a table and the fastest case, and write them to the config's directory.

    After a signal to stop, the visits that are finished are reported.

    Args:
      training_command: command that trains; the flags of each training are appended.
    """
    num_gpus = len(tf.config.get_visible_devices("GPU"))
    cases = make_cases(config, num_gpus)
    recipe = short_training(config.recipe, on_gpus=num_gpus > 0)
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
            if signals.received or not cases or elapsed * (number + 1) / number > 60 * config.minutes:
                break
    if rates:
        publish(config, rates, machine)
    if not rates:
        raise RunError("no case could be measured; the lines above say why")


def rounds(cases: Sequence[BenchmarkCase]) -> Iterator[list[BenchmarkCase]]:
    """Yield the cases again and again in another random order. The orders are the same in every benchmark.

    A case that is removed from `cases` is left out from the next round on.
    """
    for number in itertools.count():
        yield random.Random(number).sample(cases, len(cases))


def publish(config: BenchmarkConfig, rates: Rates, machine: Mapping[str, Any]) -> None:
    """Print the table and the flags of the fastest case; write the JSON file and the picture."""
    write_json(config, rates, machine)
    title = describe(config, machine)
    plot(rates, title).savefig(config.directory / PICTURE_FILE, dpi=120)
    print(f"\n{title}\n{table(rates, config.recipe.batch_size)}")
    print(f"\nwritten to {config.directory}: {JSON_FILE}, {PICTURE_FILE}\nfastest: {fastest(rates)}", flush=True)


def write_json(config: BenchmarkConfig, rates: Rates, machine: Mapping[str, Any]) -> None:
    """Write all visits, and the statistics of every case."""
    cases = []
    for case, values in rates.items():
        low, median, high = quartiles(values)
        statistics = {"images_per_sec": list(values), "median": median, "quartiles": [low, high]}
        cases.append({**case._asdict(), "flags": str(case), **statistics})
    content = {
        "recipe": config.recipe.name,
        "model": config.recipe.model,
        "batch_size": config.recipe.batch_size,
        "dataset": config.recipe.dataset,
        "date": datetime.date.today().isoformat(),
        **{name: machine[name] for name in ("processor", "cores", "gpus", "packages")},
        "cases": cases,
        "fastest": fastest(rates),
    }
    files.write_json(config.directory / JSON_FILE, content)


def table(rates: Rates, batch_size: int) -> str:
    """Return a table with a line per case, the fastest first."""
    rows = [["towers", "strategy", "placement", "precision", "images/s", "quartiles", "ms per step", "visits"]]
    for case, values in by_rate(rates):
        low, median, high = quartiles(values)
        row = [str(case.num_gpus), case.strategy, case.variable_placement or "-", case.precision]
        row += [format_rate(median), f"{format_rate(low)}-{format_rate(high)}"]
        rows.append([*row, f"{1000 * batch_size / median:,.1f}", str(len(values))])
    return align_columns(rows, left=(1, 2, 3))


def plot(rates: Rates, title: str) -> Figure:
    """Draw the median of every case as a bar, with its quartiles as error bars, the fastest on top."""
    ordered = by_rate(rates)
    low, median, high = np.transpose([quartiles(values) for _, values in ordered])
    figure = Figure((9, 1.2 + 0.35 * len(ordered)), layout="constrained")
    panel = figure.subplots()
    bars = panel.barh([str(case) for case, _ in ordered], median, xerr=[median - low, high - median], capsize=3)
    panel.bar_label(bars, fmt=format_rate, padding=4)
    panel.invert_yaxis()
    panel.set(title=title, xlabel="images/s: median and quartiles")
    panel.title.set_fontsize(9)
    panel.margins(x=0.12)
    return figure


def describe(config: BenchmarkConfig, machine: Mapping[str, Any]) -> str:
    """Return the recipe and the machine, such as `speed94, batches of 1,024; AMD EPYC, 2 cores`."""
    recipe, gpus = config.recipe, machine["gpus"]
    devices = [machine["processor"], f"{machine['cores']} cores", *(f"{gpus.count(gpu)} x {gpu}" for gpu in {*gpus})]
    return f"{recipe.name}, batches of {recipe.batch_size:,}; {', '.join(devices)}"


def fastest(rates: Rates) -> str:
    """Return the flags of the case with the highest median."""
    return str(by_rate(rates)[0][0])


def by_rate(rates: Rates) -> list[tuple[BenchmarkCase, Sequence[float]]]:
    """Return the cases with their visits, sorted by the median, the fastest first."""
    return sorted(rates.items(), key=lambda item: -np.median(item[1]))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return low, median, high
