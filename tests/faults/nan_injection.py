"""NaN and infinity in a run's input, weights and gradients: no checkpoint ever holds one."""

import functools
import itertools
import random
import re
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar_towers import trainer
from cifar_towers.checkpointing.checkpoint import list_checkpoints, read_variables
from cifar_towers.data.batches import Batches
from cifar_towers.training import step
from tests.faults import runs
from tests.faults.harness import Experiment, Outcome, in_child
from tests.faults.subjects import OURS

PLACES = ("input", "weights", "gradient")
MOST_IN_A_ROW = 3  # the program's default
FLAGS = ("--brightness=1e-30", "--checkpoint_every_steps=1", "--keep_checkpoints=100")


def poison(_: str, number: int, rng: random.Random, scratch: Path) -> Outcome:
    """Poisons one to four steps in a row of a whole run, one in three of them with rollback."""
    place, tower = PLACES[number % len(PLACES)], rng.randrange(2)
    first, count = rng.randrange(2, runs.STEPS - 5), rng.choice((1, 1, 2, 3, 4))
    value, rollback = rng.choice((np.nan, np.inf, -np.inf)), rng.random() < 1 / 3
    what = f"{value} in the {place} of tower_{tower}, steps {first} to {first + count - 1}"
    prepare = functools.partial(_prepare, place, tower, set(range(first, first + count)), value)
    flags = (*FLAGS, "--rollback_on_divergence") if rollback else FLAGS
    with runs.Run(OURS, scratch, flags=flags, prepare=prepare) as run:
        run.wait()
    held = in_child(_not_finite, run.directory)
    if held:
        return Outcome(what, f"saved {held}", False)
    if not list_checkpoints(run.directory):
        return Outcome(what, "nothing saved", False)
    told = re.search(rf"step {first} made no update \(1 in a row.*", run.output)
    named = told and (place == "weights" or f"tower_{tower} is not finite" in told[0])
    lasting = place == "weights" or count >= MOST_IN_A_ROW
    expected = 4 if lasting and not rollback else 0
    what += (", with rollback: " if rollback else ": ") + (told[0] if told else "nothing told")
    outcome = {0: "went on", 4: "ended with 4"}.get(run.code, f"ended with {run.code}")
    return Outcome(what, outcome, bool(named) and run.code == expected)


def _prepare(place: str, tower: int, steps: set[int], value: float) -> None:
    """Has the program, in this process, meet `value` in these updates; each once, however often it comes to them."""
    if place == "input":
        _poison_input(tower, steps, value)
    elif place == "weights":
        _before_step(steps, lambda state: _poison_weight(state, tower, value))
    else:
        _poison_gradient(tower, steps, value)


def _poison_input(tower: int, steps: set[int], value: float) -> None:
    stream = Batches.stream

    def poisoned(self, first_step, last_step):
        for number, batch in enumerate(stream(self, first_step, last_step), first_step + 1):
            if number in steps:
                steps.remove(number)
                rows = [[self.batch_size // 2 * tower + 3]]
                brightness = tf.tensor_scatter_nd_update(batch.draws.brightness, rows, [value])
                batch = batch._replace(draws=batch.draws._replace(brightness=brightness))
            yield batch

    Batches.stream = poisoned


def _poison_weight(state, index: int, value: float) -> None:
    weight = state.weights[(7 * index + 1) % len(state.weights)]
    values = weight.numpy()
    values.flat[values.size // 2] = value
    weight.assign(values)


def _poison_gradient(tower: int, steps: set[int], value: float) -> None:
    average, towers, added = step.average_gradients, itertools.count(), []

    def poisoned(gradients, **options):  # each tower averages its own parts first, in order; then all meet
        averaged = average(gradients, **options)
        if next(towers) == tower:
            (gradient, variable), *rest = averaged
            averaged = [(gradient + added[0], variable), *rest]
        return averaged

    step.average_gradients = poisoned
    _before_step(steps, lambda _: added[0].assign(value), lambda poisons: _add(added, poisons))


def _add(added: list, poisons: bool) -> None:
    """Makes, before the step is traced, what is added to a gradient; nothing, unless this step is poisoned."""
    added[:] = added or [tf.Variable(0.0)]
    if not poisons:
        added[0].assign(0.0)


def _before_step(steps: set[int], do, prepare=lambda poisons: None) -> None:
    call = trainer.Trainer._step

    def poisoned(self, *arguments):
        number = int(self.state.step.numpy()) + 1
        prepare(number in steps)
        if number in steps:
            steps.remove(number)
            do(self.state)
        return call(self, *arguments)

    trainer.Trainer._step = poisoned


def _not_finite(directory: Path) -> str:
    """The first value in any checkpoint that is not finite, by step and name."""
    for checkpoint in list_checkpoints(directory):
        for name, value in read_variables(checkpoint).items():
            if not np.isfinite(value).all():
                return f"{checkpoint.name} {name}"
    return ""


EXPERIMENTS = [Experiment("NaN, infinity", (OURS,), 6, 60, poison)]
