"""Benchmark cases: one recipe's step with different placements, strategies, precisions, tower counts and inputs."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar_towers.benchmark.baselines import make_array_fit, make_arrays
from cifar_towers.benchmark.rounds import Rates
from cifar_towers.benchmark.settings import BenchmarkConfig
from cifar_towers.config import TrainConfig, schedules
from cifar_towers.data.batches import Batch
from cifar_towers.data.dataset import Split
from cifar_towers.models.layers import BatchNorm
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.communication import VariableBytes
from cifar_towers.towers.placement import HOST, PLACEMENTS, custom_placement
from cifar_towers.training import build
from cifar_towers.training.results import to_numpy

NO_EXCHANGE, KERAS = "no exchange", "keras fit"
UNPLACED = "-"  # the placement where every device has a copy of the variables


class BenchmarkCase(NamedTuple):
    """One way to compute the step."""

    strategy: str  # towers, mirrored, `no exchange` (independent towers, an upper bound) or `keras fit`
    placement: str  # of the towers' variables, or `-`
    towers: int
    precision: str
    input: str = "constant"  # one batch again and again, or the recipe's input pipeline (`stream`)

    @property
    def trains(self) -> bool:
        """Whether a run can train this way, on a constant batch: one of these cases is recommended."""
        return self.strategy in ("towers", "mirrored") and self.input == "constant"

    def label(self) -> str:
        """For a table or a plot: `towers, cpu, stream`."""
        parts = [self.strategy, self.placement if self.placement != UNPLACED else "", self.input]
        return ", ".join(part for part in parts if part not in ("", "constant"))

    def __str__(self) -> str:
        return f"{self.towers} x {self.label()}, {self.precision}"


@dataclasses.dataclass(kw_only=True)
class CaseResult(Rates):
    """Measurements of one case."""

    case: BenchmarkCase
    compile_seconds: float = 0.0
    step_seconds: float = 0.0  # of the second step; plans the number of timed steps
    waits: list[float] = dataclasses.field(default_factory=list)  # fraction of each round spent waiting for input
    shares: dict[str, float] = dataclasses.field(default_factory=dict)  # of the step's work, by part
    efficiency: float = 0.0  # images/s over those of one tower times the physical devices

    @property
    def waiting(self) -> float:
        """Fraction of the time in which the step waited for its input."""
        return statistics.median(self.waits)


class PreparedCase(NamedTuple):
    """A case that is ready to run."""

    run_steps: Callable[[int], Iterator[tuple[float, float]]]  # (steps) -> each step's seconds, and those of its input
    step: Callable[[], Any] | None = None  # one step on the constant batch, for a profile; None for Keras
    variables: Sequence[VariableBytes] = ()  # of the model, in the order of creation
    example_bytes: int = 0


def make_cases(
    counts: Sequence[int], precisions: Sequence[str], with_peers: bool, on_gpus: bool = False
) -> list[BenchmarkCase]:
    """All cases worth measuring, without duplicates such as several placements for one tower on the CPU.

    The first precision is measured in every way, the others on the fewest and the most towers with variables on the
    CPU and mirrored. The recipe's own input and Keras `fit` are measured on the most towers.
    """
    fewest, most = counts[0], counts[-1]
    first, *others = precisions
    cases = []
    for count in counts:
        placements = tuple(PLACEMENTS) if count > 1 else ("cpu", "round_robin") if on_gpus else ("cpu",)
        cases += [BenchmarkCase("towers", placement, count, first) for placement in placements]
        if count > 1:
            cases += [BenchmarkCase(strategy, UNPLACED, count, first) for strategy in ("mirrored", NO_EXCHANGE)]
    cases.append(BenchmarkCase("towers", "cpu", most, first, "stream"))
    for precision in others:
        cases += [BenchmarkCase("towers", "cpu", count, precision) for count in sorted({fewest, most})]
        cases += [BenchmarkCase("mirrored", UNPLACED, most, precision)] if most > 1 else []
    if with_peers:
        cases += [BenchmarkCase(KERAS, UNPLACED, most, precision) for precision in precisions]
    return cases


def prepare_case(config: BenchmarkConfig, case: BenchmarkCase, towers: Sequence[Tower], train: Split) -> PreparedCase:
    """Builds the step of a case on the first `case.towers` towers.

    Raises:
      UsageError: this machine or this recipe does not support it.
    """
    towers = list(towers[: case.towers])
    if case.strategy == "mirrored":
        changes = {"strategy": "mirrored", "gradient_device": "variable", "all_reduce": config.all_reduce}
    else:
        changes = {"variable_placement": "cpu" if case.placement == UNPLACED else case.placement}
    recipe = dataclasses.replace(config.recipe, precision=case.precision, **changes)
    batches = build.make_batches(recipe, train)
    if case.strategy == KERAS:
        model = build.make_model(recipe, case.precision, train.info, train)
        arrays = make_arrays(batches, build.make_augmentation(recipe, train.info))
        fit = make_array_fit(model, towers, arrays["images"], arrays["labels"], batches.batch_size)
        return PreparedCase(lambda steps: ((seconds, 0.0) for seconds in fit(steps)))
    length = recipe.run_length(batches.steps_per_epoch)
    if case.strategy == NO_EXCHANGE:
        training, step_fn = _make_independent_steps(recipe, towers, length, train)
    else:
        training = build.make_training(recipe, towers, case.precision, train, length)
        step_fn = training.train_step
    image_size = schedules.ImageSizeSchedule(recipe.image_size_schedule, recipe.image_size).largest()
    mid_run_rates = training.state.optimizer.learning_rates(length.last // 2)  # when the whitening's bias is frozen
    with tf.device(HOST):
        rates = {name: tf.constant(rate, tf.float32) for name, rate in mid_run_rates.items()}
        constant_batch = batches.at(0)

    def step(batch: Batch = constant_batch) -> Any:
        return to_numpy(step_fn(batch, rates, image_size))

    stream = iter(batches.stream(0, 1_000_000)) if case.input == "stream" else None
    batch_bytes = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tf.nest.flatten(constant_batch))
    return PreparedCase(
        functools.partial(_time_steps, step, stream),
        step,
        variable_bytes(training.state.model),
        batch_bytes // batches.batch_size,
    )


def variable_bytes(model: keras.Model) -> list[VariableBytes]:
    """Size and role of a model's variables for the cost model, in the order of creation."""
    trainable = {id(variable) for variable in model.trainable_variables}
    sizes = []
    for layer in model.layers:
        other_role = "statistic" if isinstance(layer, BatchNorm) else "frozen"
        for variable in layer.variables:
            role = "weight" if id(variable) in trainable else other_role
            value = variable.value
            sizes.append(VariableBytes(value.shape.num_elements() * value.dtype.size, role))
    return sizes


def _time_steps(step: Callable, stream: Iterator | None, steps: int) -> Iterator[tuple[float, float]]:
    for _ in range(steps):
        start = time.perf_counter()
        batch = (next(stream),) if stream else ()
        input_seconds = time.perf_counter() - start if stream else 0.0
        step(*batch)
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
