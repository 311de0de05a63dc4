"""NaN and infinity in the input, weights or gradients of a run: no checkpoint ever holds one."""

import functools
import re
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from cifar_towers.runs.checkpoint import first_nonfinite, list_checkpoints, read_checkpoint
from cifar_towers.training.diagnostics import MAX_SKIPPED_STEPS
from tests.faults import hooks, runs
from tests.faults.harness import Experiment, Trial, check
from tests.faults.subjects import OURS

FLAGS = ("--brightness=1e-30", "--checkpoint_every_steps=1", "--keep_checkpoints=100")


def inject(trial: Trial) -> str:
    """Inject a non-finite value in one to four consecutive steps; the third in a row ends the
    run.
    """
    place = list(INJECTORS)[trial.index % len(INJECTORS)]
    tower = trial.rng.randrange(2)
    first = trial.rng.randrange(2, runs.STEPS - 5)
    count = trial.rng.choice((1, 1, 2, 3, 4))
    value = trial.rng.choice((np.nan, np.inf, -np.inf))
    trial.details = f"{value} in the {place} of tower_{tower}, steps {first} to {first + count - 1}"
    prepare = functools.partial(INJECTORS[place], tower, range(first, first + count), value)
    with runs.train(OURS, trial.scratch, flags=FLAGS, prepare=prepare) as run:
        run.wait()
    checkpoints = list_checkpoints(run.directory)
    check(checkpoints, "nothing saved")
    for path in checkpoints:
        check(not first_nonfinite(read_checkpoint(path)[0]), f"saved: {path.name}")
    message = re.search(hooks.SKIPPED.format(first), run.output)
    trial.details += f": {message[0] if message else 'no message'}"
    culprit = "gradient" if place == "gradient" else f"tower_{tower}"
    named = message and re.search(rf"{culprit}\b.* is not finite", message[0])
    lasting = place == "weights" or count >= MAX_SKIPPED_STEPS
    outcome = "finished" if run.exit_code == 0 else f"ended with {run.exit_code}"
    check(named and run.exit_code == (4 if lasting else 0), outcome)
    return outcome


def _inject_into_input(tower: int, steps: Sequence[int], value: float) -> None:
    def wrapper(update):
        def wrapped(run, step, batch):
            if step + 1 in steps:
                rows = [[batch.labels.shape[0] // 2 * tower + 3]]
                brightness = tf.tensor_scatter_nd_update(batch.draws.brightness, rows, [value])
                batch = batch._replace(draws=batch.draws._replace(brightness=brightness))
            return update(run, step, batch)

        return wrapped

    hooks.wrap("update", wrapper)


def _inject_into_weights(tower: int, steps: Sequence[int], value: float) -> None:
    def change(run, step, *_):
        if step + 1 in steps:
            weights = run.state.weights
            weight = weights[(7 * tower + 1) % len(weights)]
            values = weight.numpy()
            values.flat[values.size // 2] = value
            weight.assign(values)

    hooks.before("update", change)


def _inject_into_gradient(tower: int, steps: Sequence[int], value: float) -> None:
    added = []

    def wrapper(average):
        def wrapped(tower_grads):
            tower_grads = [list(pairs) for pairs in tower_grads]
            (gradient, variable), *rest = tower_grads[tower]
            tower_grads[tower] = [(gradient + added[0], variable), *rest]
            return average(tower_grads)

        return wrapped

    def change(_, step, *__):
        added[:] = added or [tf.Variable(0.0)]  # made before the step is traced
        added[0].assign(value if step + 1 in steps else 0.0)

    hooks.wrap("averaging", wrapper)
    hooks.before("update", change)


# Each changes the program in this process: the value comes up in each of the steps
INJECTORS = {
    "input": _inject_into_input,
    "weights": _inject_into_weights,
    "gradient": _inject_into_gradient,
}
EXPERIMENTS = [Experiment("NaN, infinity", (OURS,), 6, 60, inject)]
