"""What is measured: one recipe's step, placed, combined, computed and fed in several ways."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar_towers.benchmark import baselines
from cifar_towers.cli.tool_configs import BenchmarkConfig
from cifar_towers.config import TrainConfig, schedules
from cifar_towers.data.batches import Batch, Batches
from cifar_towers.data.dataset import Split
from cifar_towers.models.layers import BatchNorm
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.communication import VariableBytes
from cifar_towers.towers.placement import HOST, PLACEMENTS, custom_placement
from cifar_towers.training import build as setup
from cifar_towers.training.results import to_numpy

NO_EXCHANGE, KERAS = "no exchange", "keras fit"
UNPLACED = "-"  # a copy on each device, so there is nothing to place


class BenchmarkCase(NamedTuple):
    """One way to make the step."""

    strategy: str  # towers, mirrored, `no exchange` (towers that never meet) or `keras fit` (the peer)
    placement: str  # of the towers' variables, or `-`
    towers: int
    precision: str
    input: str = "constant"  # the same batch again and again, or the recipe's `stream`

    @property
    def trains(self) -> bool:
        """Whether it is the step of a run, on a constant batch: of these one is recommended."""
        return self.strategy in ("towers", "mirrored") and self.input == "constant"

    def told(self) -> str:
        """For a table or a plot: `towers, cpu, stream`."""
        parts = [self.strategy, self.placement if self.placement != UNPLACED else "", self.input]
        return ", ".join(part for part in parts if part not in ("", "constant"))


def grid(
    counts: Sequence[int], precisions: Sequence[str], with_peers: bool, on_gpus: bool = False
) -> list[BenchmarkCase]:
    """All that is worth measuring, without what is the same: placements for one tower on the CPU, or on its GPU or
    not; one mirrored replica.

    The first precision is measured in every way, with the recipe's own input for the most towers, which ask most of
    it; the others for the fewest and the most towers, on the CPU and mirrored. The peer stands beside the most.
    """
    fewest, most = counts[0], counts[-1]
    found = []
    for count in counts:
        placements = tuple(PLACEMENTS) if count > 1 else ("cpu", "round_robin") if on_gpus else ("cpu",)
        found += [BenchmarkCase("towers", placement, count, precisions[0]) for placement in placements]
        if count > 1:
            found.append(BenchmarkCase("mirrored", UNPLACED, count, precisions[0]))
            found.append(BenchmarkCase(NO_EXCHANGE, UNPLACED, count, precisions[0]))
    found.append(BenchmarkCase("towers", "cpu", most, precisions[0], "stream"))
    for precision in precisions[1:]:
        found += [BenchmarkCase("towers", "cpu", count, precision) for count in sorted({fewest, most})]
        found += [BenchmarkCase("mirrored", UNPLACED, most, precision)] if most > 1 else []
    if with_peers:
        found += [BenchmarkCase(KERAS, UNPLACED, most, precision) for precision in precisions]
    return found


class PreparedCase(NamedTuple):
    """A variation ready to run: `run(steps)` makes that many steps and yields, a step, (seconds, of them waiting for
    input)."""

    run: Callable[[int], Iterator[tuple[float, float]]]
    call: Callable[[], Any] | None  # one step on the constant batch, for a profile; None where there is no such thing
    variables: tuple[VariableBytes, ...] = ()  # of the model, in the order they were born
    example_bytes: int = 0  # what a tower gets of one example


def build(config: BenchmarkConfig, variation: BenchmarkCase, towers: Sequence[Tower], train: Split) -> PreparedCase:
    """Makes a variation of a recipe's step on the first of `towers`.

    Raises:
      UsageError: this machine or this recipe cannot have it so.
    """
    towers = list(towers[: variation.towers])
    changes = {"precision": variation.precision}
    if variation.strategy == "mirrored":
        changes |= {"strategy": "mirrored", "gradient_device": "variable"}
    else:
        changes |= {"variable_placement": variation.placement.replace(UNPLACED, "cpu"), "all_reduce": "auto"}
    config = config.replace_recipe(**changes)
    batches = setup.make_batches(config, train)
    if variation.strategy == KERAS:
        model = setup.make_model(config, variation.precision, train.info, train)
        return PreparedCase(
            baselines.keras_fit(model, towers, setup.make_augmentation(config, train.info), batches), None
        )
    variables: tuple[VariableBytes, ...] = ()
    if variation.strategy == NO_EXCHANGE:
        step, rates = _steps_apart(config, towers, batches, train)
    else:
        training = _training(config, towers, batches, train)
        step, rates = training.train_step, _usual_rates(training, config, batches)
        variables = tuple(variable_bytes(training.state.model))
    side = schedules.ImageSizeSchedule(config.image_size_schedule, config.image_size).largest()
    with tf.device(HOST):
        rates = {name: tf.constant(rate, tf.float32) for name, rate in rates.items()}
        batch = batches.at(0)

    def call(batch: Batch = batch) -> Any:
        return to_numpy(step(batch, rates, side))

    stream = iter(batches.stream(0, 1_000_000)) if variation.input == "stream" else None
    bytes_of = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tf.nest.flatten(batch))
    return PreparedCase(functools.partial(_timed, call, stream), call, variables, bytes_of // config.batch_size)


def variable_bytes(model: keras.Model) -> list[VariableBytes]:
    """What the cost model needs to know of a model's variables, in the order they were born."""
    trained = {id(v) for v in model.trainable_variables}
    found = []
    for layer in model.layers:
        for variable in layer.variables:
            moves = isinstance(layer, BatchNorm)
            role = "weight" if id(variable) in trained else "statistic" if moves else "frozen"
            value = variable.value
            found.append(VariableBytes(value.shape.num_elements() * value.dtype.size, role))
    return found


def _timed(call: Callable, stream: Iterator | None, steps: int) -> Iterator[tuple[float, float]]:
    for _ in range(steps):
        start = time.perf_counter()
        batch = (next(stream),) if stream else ()
        fed = time.perf_counter()
        call(*batch)
        yield time.perf_counter() - start, fed - start if stream else 0.0


def _training(config: TrainConfig, towers: list[Tower], batches: Batches, train: Split) -> setup.TrainSetup:
    return setup.make_training(config, towers, config.precision, train, config.run_length(batches.steps_per_epoch))


def _steps_apart(config: TrainConfig, towers: list[Tower], batches: Batches, train: Split):
    """One graph of K whole steps, each on its tower's device with variables of its own: the towers never meet."""
    alone = dataclasses.replace(config, batch_size=config.batch_size // len(towers))
    trainings = []
    for tower in towers:
        with custom_placement(lambda _, pinned_to, device=tower.device: device):
            trainings.append(_training(alone, [tower], batches, train))

    @tf.function(autograph=False)
    def step(batch, rates, side):
        shards = split_batch(batch, towers)
        return [training.train_step(shard, rates, side) for training, shard in zip(trainings, shards, strict=True)]

    return step, _usual_rates(trainings[0], alone, batches)


def _usual_rates(training: setup.TrainSetup, config: TrainConfig, batches: Batches) -> dict[str, float]:
    """Those of the middle of the run, where what is trained for some epochs alone, as a whitening's bias, rests."""
    return training.state.optimizer.rates(config.run_length(batches.steps_per_epoch).last // 2)
