"""The processes that prepare and time cases on request; `open_process` is the end that asks, `serve` the other one.

Threads per operation and logical devices are fixed for a process, so every number of towers has a process of its own.
All others are idle while one works.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, cast

import keras
import numpy as np
import tensorflow as tf

from cifar_towers import errors
from cifar_towers.benchmark.cases import KERAS, NO_EXCHANGE, UNPLACED, BenchmarkCase
from cifar_towers.config import TrainConfig, schedules
from cifar_towers.config.programs import BenchmarkConfig
from cifar_towers.data import sources
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch, Batches
from cifar_towers.data.dataset import Split
from cifar_towers.devices import choose_precision, setup_towers
from cifar_towers.errors import RunError, UsageError, error_text
from cifar_towers.models.stock_layers import to_stock_layers
from cifar_towers.reporting.profiler import profile_step
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import on_gpus
from cifar_towers.towers.placement import HOST
from cifar_towers.training import build
from cifar_towers.training.results import to_numpy
from cifar_towers.training.state import TrainState
from cifar_towers.training.tuning import recommend_placement

EXPECTED_ERRORS = (ValueError, NotImplementedError, MemoryError, tf.errors.OpError, RunError)  # of a single case
NUM_FED_BATCHES = 3  # distinct batches that Keras `fit` gets, repeated
RunSteps = Callable[[int], Iterator[tuple[float, float]]]  # (steps) -> each step's seconds, and those of its input


@contextlib.contextmanager
def open_process(command: Sequence[str], stderr: IO[str] | None = None) -> Iterator[Callable[..., Any]]:
    """Start a process that answers in lines of JSON, and yield a function that sends a request and returns the answer.

    The process should end with its standard input, because it receives no Ctrl-C. A RunError says that it cannot be
    started, answers with an error, or has ended.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, text=True, start_new_session=True, stdin=pipe, stdout=pipe, stderr=stderr)
    except OSError as error:
        raise RunError(f"{command[0]} cannot be started: {error.strerror}") from error
    requests, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

    def request(message: Any = None) -> Any:
        if message is not None:
            with contextlib.suppress(BrokenPipeError):  # the missing answer is the error
                print(json.dumps(message), file=requests, flush=True)
        if line := answers.readline():
            return check_answer(json.loads(line))
        raise RunError(f"its process has ended with exit code {process.wait()}")

    try:
        yield request
    finally:
        process.terminate()
        process.wait()
        answers.close()
        with contextlib.suppress(BrokenPipeError):  # unread requests
            requests.close()


def check_answer(answer: Any) -> Any:
    """Return the answer, or raise the error that it holds: the name of its class as `error`, and its `message`."""
    if isinstance(answer, dict) and "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer


def serve() -> None:
    """Answer requests on standard input until it ends: lines of JSON with a method of `Worker` and its arguments."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output free of what libraries print
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(worker.answer(*json.loads(line))), file=output, flush=True)


class Worker:
    """Towers, data and the cases that have been prepared on them. Cases come as lists, from JSON."""

    def __init__(self) -> None:
        self.prepared: dict[tuple, tuple[RunSteps, Callable[[], Any]]] = {}

    def answer(self, name: str, *arguments) -> Any:
        """Return what a method returns, or the error that it raises, as `open_process` reads it."""
        try:
            return getattr(self, name)(*arguments)
        except Exception as error:  # it concerns one case; the others can still be measured
            if not isinstance(error, EXPECTED_ERRORS):
                traceback.print_exc()
            if not isinstance(error, RunError):
                error = UsageError(error_text(error) or type(error).__name__)
            return {"error": type(error).__name__, "message": str(error)}

    def start(self, config: dict, num_towers: int) -> dict:
        """Open the towers and the data, and describe the physical devices under the towers and the data set."""
        recipe = TrainConfig(**config["recipe"])
        recipe = dataclasses.replace(recipe, micro_batches=recipe.micro_batches or 1)  # auto begins with one
        self.config = BenchmarkConfig(**config | {"recipe": recipe})
        self.towers = setup_towers(dataclasses.replace(recipe, num_gpus=num_towers))
        _, dataset = build.load_data(recipe, sources.find(recipe.dataset, recipe.data_dir))
        self.train = dataset.train
        kind = "GPU" if on_gpus(self.towers) else "CPU"
        physical = len(tf.config.get_visible_devices(kind)) if kind == "GPU" else 1
        return {"kind": kind, "physical": min(physical, num_towers), "dataset": dataset.name}

    def recommend_placement(self) -> str:
        """Say in one sentence which variable placement is fastest on these towers, or that it does not matter."""
        recipe = self.config.recipe
        length = recipe.run_length(build.make_batches(recipe, self.train).steps_per_epoch)
        precision = choose_precision(recipe.precision, self.towers)
        placement, matters, reason = recommend_placement(recipe, self.towers, precision, self.train, length)
        answer = f"Use --variable_placement={placement}" if matters else "Variable placement does not matter"
        return f"{answer} here: {reason}."

    def prepare(self, case: list) -> tuple[float, float]:
        """Build a case. Return the seconds of building and its first step, and those of the second step."""
        start = time.perf_counter()
        run_steps, step = prepare_case(self.config, BenchmarkCase(*case), self.towers, self.train)
        list(run_steps(1))
        self.prepared[tuple(case)] = run_steps, step
        first = time.perf_counter() - start
        ((second, _),) = run_steps(1)
        return first, second

    def run_steps(self, case: list, steps: int) -> list[tuple[float, float]]:
        """Return the seconds of each step, and the part of them waiting for input."""
        run_steps, _ = self.prepared[tuple(case)]
        return list(run_steps(steps))

    def profile(self, case: list) -> dict[str, float]:
        """Return each part's share of a step's work, summed over towers."""
        _, step = self.prepared[tuple(case)]
        return profile_step(step)


def prepare_case(
    config: BenchmarkConfig, case: BenchmarkCase, towers: list[Tower], train: Split
) -> tuple[RunSteps, Callable[[], Any]]:
    """Build the step of a case on these towers.

    Returns:
      A function that makes timed steps, and a function that makes one step, for a profile.
    """
    changes: dict[str, Any]
    if case.strategy == "mirrored":
        changes = {"strategy": "mirrored", "gradient_device": "variable", "all_reduce": config.all_reduce}
    else:
        changes = {"variable_placement": "cpu" if case.placement == UNPLACED else case.placement}
    recipe = dataclasses.replace(config.recipe, precision=case.precision, **changes)
    batches = build.make_batches(recipe, train, towers=() if case.strategy in (KERAS, NO_EXCHANGE) else towers)
    if case.strategy == KERAS:
        model = build.make_model(recipe, case.precision, train.info, train)
        arrays = make_arrays(batches, build.make_augmentation(recipe, train.info))
        fit = make_array_fit(model, towers, arrays["images"], arrays["labels"], batches.batch_size)
        return lambda steps: ((seconds, 0.0) for seconds in fit(steps)), lambda: list(fit(1))
    length = recipe.run_length(batches.steps_per_epoch)
    if case.strategy == NO_EXCHANGE:
        state, step_fn = _make_independent_steps(recipe, towers, length, train)
    else:
        state, step_fn, _ = build.make_training(
            recipe, towers, case.precision, train, length, load_images=batches.load_images
        )
    mid_run_rates = state.optimizer.learning_rates(length.last // 2)  # when the whitening's bias is frozen
    with tf.device(HOST):
        rates = {name: tf.constant(rate, tf.float32) for name, rate in mid_run_rates.items()}
        constant_batch = batches.at(0)

    def step(batch: Batch = constant_batch) -> Any:
        return to_numpy(step_fn(batch, rates, recipe.image_size))

    source = iter(batches.stream(0, 1_000_000)) if case.input == "stream" else itertools.repeat(constant_batch)
    return functools.partial(_time_steps, step, source), step


def _time_steps(step: Callable, source: Iterator[Batch], steps: int) -> Iterator[tuple[float, float]]:
    for _ in range(steps):
        start = time.perf_counter()
        batch = next(source)
        input_seconds = time.perf_counter() - start
        step(batch)
        yield time.perf_counter() - start, input_seconds


def _make_independent_steps(
    recipe: TrainConfig, towers: list[Tower], length: schedules.RunLength, train: Split
) -> tuple[TrainState, Callable]:
    """Return the first tower's state, and one graph of a step for each tower, which has variables of its own."""
    # with one tower, all variables are on its device
    recipe = dataclasses.replace(recipe, batch_size=recipe.batch_size // len(towers), variable_placement="round_robin")
    trainings = [build.make_training(recipe, [tower], recipe.precision, train, length) for tower in towers]

    @tf.function(autograph=False)
    def step(batch, rates, image_size):
        shards = split_batch(batch, towers)
        return [each(shard, rates, image_size) for (_, each, _), shard in zip(trainings, shards, strict=True)]

    return trainings[0][0], step


# Keras `fit` as a peer: the same model from stock layers, trained under a distribution strategy -----------------------


def make_arrays(batches: Batches, augmentation: Augmentation) -> dict[str, np.ndarray]:
    """Return the recipe's first batches: `images` as the model gets them, `labels`, and `raw` images."""
    first = [batches.at(step) for step in range(NUM_FED_BATCHES)]
    return {
        "images": np.concatenate([augmentation.augment(batch.images, batch.draws) for batch in first]),
        "labels": np.concatenate([batch.labels for batch in first]),
        "raw": np.concatenate([batch.images for batch in first]),
    }


def make_array_fit(
    model: keras.Model, towers: Sequence[Tower], images: np.ndarray, labels: np.ndarray, batch_size: int
) -> Callable[[int], Iterator[float]]:
    """Prepare `fit` of a stock copy of `model` on the same images; with several towers, under MirroredStrategy.

    Return a function (steps) -> seconds of each, from one batch's end to the next, after an untimed step.
    """
    strategy = tf.distribute.MirroredStrategy([tower.device for tower in towers])
    with strategy.scope() if len(towers) > 1 else tf.device(towers[0].device):
        stock_model = to_stock_layers(model)
        stock_model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size, drop_remainder=True)
    data = batches.cache().repeat().prefetch(2)

    def time_steps(steps: int) -> Iterator[float]:
        ends: list[float] = []

        def record_end(batch: int, logs: dict) -> None:
            float(logs["loss"])  # waits for the step
            ends.append(time.perf_counter())

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=record_end)
        stock_model.fit(data, steps_per_epoch=steps + 1, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
        yield from np.diff(ends).tolist()

    return time_steps
