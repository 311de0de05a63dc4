"""Prepares and times benchmark cases on a fixed number of towers, on request.

Threads per operation and logical devices are fixed for a process, so every number of towers has a process of its own.
All are idle while one works.
"""

import dataclasses
import functools
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.benchmark.baselines import make_array_fit, make_arrays
from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, BenchmarkCase
from cifar_towers.config import TrainConfig, schedules
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.data import sources
from cifar_towers.data.batches import Batch
from cifar_towers.data.dataset import Split
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.reporting.profiler import profile_step
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import on_gpus
from cifar_towers.towers.placement import HOST, custom_placement
from cifar_towers.training import build
from cifar_towers.training.auto_placement import recommend_placement
from cifar_towers.training.devices import choose_precision, setup_towers
from cifar_towers.training.results import to_numpy

EXPECTED_ERRORS = (ValueError, NotImplementedError, MemoryError, tf.errors.OpError, RunError)  # of a single case


def serve() -> None:
    """Answers requests on standard input, lines of JSON with a method of `Worker` and its arguments, until it ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output free of what libraries print
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(worker.answer(*json.loads(line))), file=output, flush=True)


class PreparedCase(NamedTuple):
    """A case that is ready to run."""

    run_steps: Callable[[int], Iterator[tuple[float, float]]]  # (steps) -> each step's seconds, and those of its input
    step: Callable[[], Any] | None = None  # one step on the constant batch, for a profile; None for Keras


class Worker:
    """Towers, data and the cases that have been prepared on them. Cases come as lists, from JSON."""

    def __init__(self):
        self.prepared: dict[tuple, PreparedCase] = {}

    def answer(self, name: str, *arguments) -> Any:
        """What a method returns, or the error that it raises as `open_process` reads it."""
        try:
            return getattr(self, name)(*arguments)
        except Exception as error:  # it concerns one case; the others can still be measured
            if not isinstance(error, EXPECTED_ERRORS):
                traceback.print_exc()
            if not isinstance(error, RunError):
                error = UsageError(error_text(error) or type(error).__name__)
            return {"error": type(error).__name__, "message": str(error)}

    def start(self, config: dict, num_towers: int) -> dict:
        """Kind and number of physical devices under the towers, and the data set's name."""
        recipe = TrainConfig(**config["recipe"])
        self.config = BenchmarkConfig(**config | {"recipe": recipe})
        self.towers = setup_towers(dataclasses.replace(recipe, num_gpus=num_towers))
        _, dataset = build.load_data(recipe, sources.find(recipe.dataset, recipe.data_dir))
        self.train = dataset.train
        kind = "GPU" if on_gpus(self.towers) else "CPU"
        physical = len(tf.config.get_visible_devices(kind)) if kind == "GPU" else 1
        return {"kind": kind, "physical": min(physical, num_towers), "dataset": dataset.name}

    def prepare(self, case: list) -> tuple[float, float]:
        """Seconds until the first step is done, tracing and compilation included; seconds of the second step."""
        start = time.perf_counter()
        prepared = prepare_case(self.config, BenchmarkCase(*case), self.towers, self.train)
        list(prepared.run_steps(1))
        self.prepared[tuple(case)] = prepared
        first = time.perf_counter() - start
        ((second, _),) = prepared.run_steps(1)
        return first, second

    def recommend_placement(self) -> str:
        """One sentence: the variable placement that is fastest on these towers, or that it does not matter."""
        recipe = self.config.recipe
        length = recipe.run_length(build.make_batches(recipe, self.train).steps_per_epoch)
        dtype = choose_precision(recipe.precision, self.towers)
        return recommend_placement(recipe, self.towers, dtype, self.train, length).sentence()

    def run_steps(self, case: list, steps: int) -> list[tuple[float, float]]:
        """Seconds of each step, and the part of them waiting for input."""
        return list(self.prepared[tuple(case)].run_steps(steps))

    def profile(self, case: list) -> dict[str, float]:
        """Shares of a step's work, summed over towers."""
        return profile_step(self.prepared[tuple(case)].step)


def prepare_case(config: BenchmarkConfig, case: BenchmarkCase, towers: list[Tower], train: Split) -> PreparedCase:
    """Builds the step of a case on these towers.

    Raises:
      UsageError: this machine or this recipe does not support it.
    """
    if case.strategy == "mirrored":
        changes = {"strategy": "mirrored", "gradient_device": "variable", "all_reduce": config.all_reduce}
    else:
        changes = {"variable_placement": "cpu" if case.placement == UNPLACED else case.placement}
    recipe = dataclasses.replace(config.recipe, precision=case.precision, **changes)
    steps_by_ours = case.strategy not in (KERAS, NO_EXCHANGE)
    batches = build.make_batches(recipe, train, towers=towers if steps_by_ours else ())
    if case.strategy == KERAS:
        model = build.make_model(recipe, case.precision, train.info, train)
        arrays = make_arrays(batches, build.make_augmentation(recipe, train.info))
        fit = make_array_fit(model, towers, arrays["images"], arrays["labels"], batches.batch_size)
        return PreparedCase(lambda steps: ((seconds, 0.0) for seconds in fit(steps)))
    length = recipe.run_length(batches.steps_per_epoch)
    if case.strategy == NO_EXCHANGE:
        training, step_fn = _make_independent_steps(recipe, towers, length, train)
    else:
        training = build.make_training(recipe, towers, case.precision, train, length, load_images=batches.load_images)
        step_fn = training.train_step
    image_size = schedules.ImageSizeSchedule(recipe.image_size_schedule, recipe.image_size).largest()
    mid_run_rates = training.state.optimizer.learning_rates(length.last // 2)  # when the whitening's bias is frozen
    with tf.device(HOST):
        rates = {name: tf.constant(rate, tf.float32) for name, rate in mid_run_rates.items()}
        constant_batch = batches.at(0)

    def step(batch: Batch = constant_batch) -> Any:
        return to_numpy(step_fn(batch, rates, image_size))

    source = iter(batches.stream(0, 1_000_000)) if case.input == "stream" else itertools.repeat(constant_batch)
    return PreparedCase(functools.partial(_time_steps, step, source), step)


def _time_steps(step: Callable, source: Iterator[Batch], steps: int) -> Iterator[tuple[float, float]]:
    for _ in range(steps):
        start = time.perf_counter()
        batch = next(source)
        input_seconds = time.perf_counter() - start
        step(batch)
        yield time.perf_counter() - start, input_seconds


def _make_independent_steps(
    recipe: TrainConfig, towers: list[Tower], length: schedules.RunLength, train: Split
) -> tuple[build.TrainSetup, Callable]:
    """The first tower's training, and one graph of K steps, each on its tower's device with variables of its own."""
    recipe = dataclasses.replace(recipe, batch_size=recipe.batch_size // len(towers))
    trainings = []
    for tower in towers:
        with custom_placement(lambda _, pinned_to, device=tower.device: device):
            trainings.append(build.make_training(recipe, [tower], recipe.precision, train, length))

    @tf.function(autograph=False)
    def step(batch, rates, image_size):
        shards = split_batch(batch, towers)
        return [each.train_step(shard, rates, image_size) for each, shard in zip(trainings, shards, strict=True)]

    return trainings[0], step
