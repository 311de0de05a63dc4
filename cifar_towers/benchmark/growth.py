"""How a step's time, memory and start grow with batch size, towers and model: a process a point, one after another."""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from cifar_towers.benchmark import growth_report
from cifar_towers.benchmark.cases import BenchmarkCase
from cifar_towers.benchmark.growth_points import Point, Row, Series
from cifar_towers.benchmark.report_io import circumstances, make_directory
from cifar_towers.benchmark.runner import VISIT_SECONDS, open_worker
from cifar_towers.cli.tool_configs import BenchmarkConfig
from cifar_towers.errors import DataError, RunError, UsageError
from cifar_towers.towers.devices import CPU_TOWERS_BY_DEFAULT
from cifar_towers.training import precision

BATCH_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
TOWERS = (1, 2, 4, 8, 16)
MODELS = ("cifarnet", "speednet93", "resnet20", "speednet94", "resnet56", "speednet95", "speednet96")  # by their work
MODEL_BATCH_SIZE = 256
FEWEST_STEPS, PATIENCE = 3, 30.0  # as many steps are timed, if they take no longer than that many seconds


def run(config: BenchmarkConfig) -> None:
    """Measures, prints table and conclusion, and writes growth.json, growth.txt, growth.png to the directory.

    Raises:
      UsageError: no point could be measured.
    """
    start = time.monotonic()
    make_directory(config)
    with open_worker(config, 1) as ask:  # downloads the data if need be, and has all files read once
        found = ask()
    gpus = len(tf.config.get_visible_devices("GPU"))
    compute_dtype, _ = precision.choose(config.precision, found["kind"])
    series = plan(config, gpus or CPU_TOWERS_BY_DEFAULT)
    rows, left_out = _measure(config, series, compute_dtype, start, math.inf if gpus else _machine_memory_mb())
    if not rows:
        raise UsageError("nothing could be measured; the lines above say why")
    facts = circumstances(config, found["dataset"]) | {
        "precision": compute_dtype,
        "kind": found["kind"],
        "devices": gpus or 1,
        "minutes": (time.monotonic() - start) / 60,
    }
    growth_report.publish(config.directory, facts, series, rows, left_out)


def plan(config: BenchmarkConfig, towers: int) -> list[Series]:
    """The recipe's step for all batch sizes on `towers`, its batch for all numbers of towers, and all models."""
    models = (Point(model, MODEL_BATCH_SIZE, towers) for model in MODELS)
    return [
        Series("batch size", BATCH_SIZES, tuple(Point(config.model, size, towers) for size in BATCH_SIZES)),
        Series("towers", TOWERS, tuple(Point(config.model, config.batch_size, count) for count in TOWERS)),
        Series("model", tuple(range(1, len(MODELS) + 1)), tuple(models)),
    ]


def recipe_at(config: BenchmarkConfig, point: Point) -> BenchmarkConfig:
    """The recipe with a point's model and batch size. What the recipe has and the model cannot take is left.

    Raises:
      UsageError: the batch cannot be shared by the towers.
    """
    changes = {"model": point.model, "batch_size": point.batch_size}
    if config.optimizer == "muon" and not point.model.startswith("speednet"):
        changes["optimizer"] = "momentum"
    if point.model == "cifarnet":
        changes["image_size_schedule"] = ""
    changed = dataclasses.replace(config, **changes)
    changed.tower_batch_size(point.towers)
    return changed


def _measure(
    config: BenchmarkConfig, series: Sequence[Series], compute_dtype: str, start: float, memory_mb: float
) -> tuple[dict[Point, Row], dict[Point, str]]:
    """What was measured, and why the rest was left out; small batches first."""
    rows, left_out = {}, {}
    points = dict.fromkeys(itertools.chain.from_iterable(one.points for one in series))
    for number, point in enumerate(sorted(points, key=lambda point: point.batch_size), 1):
        told = f"{number}/{len(points)}: {point.told()}"
        left = 60 * config.minutes - (time.monotonic() - start)
        try:
            recipe = recipe_at(config, point)
            check_room(point, series, rows, left, memory_mb)
            row = rows[point] = _measure_point(recipe, point, compute_dtype)
        except DataError:
            raise
        except RunError as error:  # what cannot be had, or a process that ended for want of memory
            left_out[point] = str(error)
            print(f"{told}: left out: {error}", flush=True)
            continue
        began = f"{row.start_seconds:.0f} s to start, {row.compile_seconds:.0f} s to compile"
        print(f"{told}: {began}, a step {row.median:.3g} s, {row.memory_mb:,.0f} MB", flush=True)
    return rows, left_out


def _measure_point(recipe: BenchmarkConfig, point: Point, compute_dtype: str) -> Row:
    variation = BenchmarkCase("towers", "cpu", point.towers, compute_dtype)
    began = time.perf_counter()
    with open_worker(recipe, point.towers) as ask:
        ask()
        starting = time.perf_counter() - began
        first, second = ask(("build", variation))
        told = ask(("run_watched", variation, steps_timed(second)))
    return Row(point, starting, max(0.0, first - second), told["seconds"], told["memory_mb"])


def steps_timed(seconds: float) -> int:
    """How many steps of so many seconds tell enough."""
    return max(1, math.ceil(VISIT_SECONDS / seconds), min(FEWEST_STEPS, int(PATIENCE / seconds)))


def check_room(
    point: Point, series: Sequence[Series], rows: Mapping[Point, Row], seconds: float, memory_mb: float
) -> None:
    """Sees whether a point will fit into so many seconds and so much memory, as far as the smaller ones tell.

    Raises:
      UsageError: it will not.
    """
    for one in [*(one for one in series if point in one.points), series[0]]:  # the first of its kind: by its batch
        known = [(size, rows[each]) for size, each in zip(one.sizes, one.points, strict=True) if each in rows]
        if known:
            break
    else:
        return
    size = dict(zip(one.points, one.sizes, strict=True)).get(point, point.batch_size)

    def expected(name: str, first: Sequence[tuple[int, float]] = ()) -> float:
        return extrapolate([*first, *((at, getattr(row, name)) for at, row in known)], size)

    step = expected("median", [(0, 0.0)] if one is series[0] else [])  # no images would take no time
    needed = expected("start_seconds") + expected("compile_seconds") + (2 + steps_timed(step)) * step
    if needed > seconds:
        raise UsageError(f"it needs about {needed:.0f} s, and {max(0, seconds):.0f} s are left; give more --minutes")
    if (megabytes := expected("memory_mb")) > memory_mb:
        raise UsageError(f"it needs about {megabytes:,.0f} MB of memory, and the machine has {memory_mb:,.0f}")


def extrapolate(known: Sequence[tuple[float, float]], size: float) -> float:
    """The value at `size` on the line through the last two of (size, value); not below the last, nor above an only
    one."""
    (low, first), (high, last) = [*known[:1], *known][-2:]
    return last + (max(0.0, last - first) / (high - low) * (size - high) if high > low else 0.0)


def _machine_memory_mb() -> float:
    """All of the machine's memory, in 10^6 bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6
