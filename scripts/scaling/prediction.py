"""A recipe's step, measured on one tower and predicted for several devices."""

import dataclasses
import math
import time
from collections.abc import Sequence

import tensorflow as tf

from cifar_towers.benchmark import report
from cifar_towers.benchmark.cases import BenchmarkCase, Rates
from cifar_towers.benchmark.worker import prepare_case
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.data import sources
from cifar_towers.data.dataset import Split
from cifar_towers.devices import resolve_precision, setup_towers
from cifar_towers.reporting.run_records import align_columns
from cifar_towers.towers import Tower
from cifar_towers.towers.devices import on_gpus
from cifar_towers.training import build
from scripts.scaling.communication import Prediction, predict, variable_bytes
from scripts.scaling.settings import ScalingConfig

PREDICTED_DEVICES = (1, 2, 4, 8, 16, 32, 64)
ROUNDS, MIN_STEPS = 3, 3


def run_prediction(config: ScalingConfig, source: sources.Source) -> None:
    """Measure one tower; print and write its rate and the prediction, to prediction.json and prediction.txt."""
    report.make_directory(config.directory)
    recipe = config.recipe
    towers = setup_towers(dataclasses.replace(recipe, num_gpus=1))
    _, dataset = build.load_data(recipe, source)
    kind = "GPU" if on_gpus(towers) else "CPU"
    recipe = dataclasses.replace(recipe, precision=resolve_precision(recipe.precision, kind)[0])
    rates = measure(dataclasses.replace(config, recipe=recipe), towers, dataset.train)

    model = build.make_model(recipe, recipe.precision, dataset.info, dataset.train)
    batch = build.make_batches(recipe, dataset.train).at(0)
    batch_bytes = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tf.nest.flatten(batch))
    counts = [count for count in PREDICTED_DEVICES if count <= recipe.batch_size]
    seconds, example_bytes = recipe.batch_size / rates.median, batch_bytes // recipe.batch_size
    predictions = predict(
        seconds, variable_bytes(model), recipe.batch_size, example_bytes, config.link_gb_per_s, counts
    )

    metadata = report.collect_metadata(recipe, dataset.name) | {"precision": recipe.precision}
    results = {
        "measured": rates.as_json(),
        "link_gb_per_s": config.link_gb_per_s,
        "predictions": [prediction._asdict() for prediction in predictions],
    }
    measured = align_columns([["towers", *rates.cells()], ["1", *rates.cells().values()]])
    links = f"links of {config.link_gb_per_s:g} GB/s each way, no overlap of compute and transfers"
    predicted = f"On devices as fast as one tower here, {links}:\n{format_predictions(predictions)}"
    report.write_report(config.directory, "prediction", metadata, results, [measured, predicted])


def measure(config: ScalingConfig, towers: list[Tower], train: Split) -> Rates:
    """Time the step on one tower, after its compilation, in `ROUNDS` rounds of equally many steps."""
    placement = "round_robin" if on_gpus(towers) else "cpu"
    case = BenchmarkCase("towers", placement, 1, config.recipe.precision)
    recipe = dataclasses.replace(config.recipe, micro_batches=config.recipe.micro_batches or 1)  # auto begins with one
    run_steps, _ = prepare_case(BenchmarkConfig(recipe=recipe), case, towers, train)
    print("compiling", flush=True)
    list(run_steps(1))
    ((step_seconds, _),) = run_steps(1)
    rates = Rates(steps=max(MIN_STEPS, math.ceil(60 * config.minutes / ROUNDS / step_seconds)))
    for number in range(ROUNDS):
        print(f"round {number + 1}/{ROUNDS}, about {rates.steps * step_seconds:.0f} s", flush=True)
        start = time.perf_counter()
        list(run_steps(rates.steps))
        rates.images_per_sec.append(rates.steps * config.recipe.batch_size / (time.perf_counter() - start))
    return rates


def format_predictions(predictions: Sequence[Prediction]) -> str:
    """Return a table with a line per exchange and number of devices; times are in milliseconds."""
    rows = [["variables", "devices", "batch", "compute ms", "transfer ms", "step ms", "images/s", "efficiency"]]
    for exchange, count, batch, *times, rate, efficiency in predictions:
        milliseconds = [f"{1000 * seconds:.2f}" for seconds in times]
        rows.append([exchange, str(count), f"{batch:,}", *milliseconds, f"{rate:,.0f}", f"{efficiency:.1%}"])
    return align_columns(rows)
