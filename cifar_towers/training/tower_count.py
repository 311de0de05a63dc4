"""Whether fewer towers would be faster, as where a tower's share of the batch is too small for its GPU."""

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from cifar_towers.data.dataset import Split
from cifar_towers.towers.devices import on_gpus
from cifar_towers.training.run_setup import RunSetup
from cifar_towers.training.trial_steps import STEPS, make_trial_step, time_steps

FASTER = 0.05  # a smaller difference is not worth a sentence, nor one that a step in four lacks


def advise_fewer_towers(setup: RunSetup, train: Split, log: Callable[[str], None]) -> None:
    """Logs a sentence with the measured times if half the towers would be faster. It compiles two steps.

    Nothing is measured where towers share the CPU, where they do not share the batch, or where memory is short.
    """
    config, count = setup.config, len(setup.towers)
    shares_batch = config.strategy == "towers" and config.parallelism == "data" and not config.hard_example_pool
    if not (count > 1 and shares_batch and not config.tower_shares and on_gpus(setup.towers)):
        return
    few, _ = config.default_num_towers(count // 2)
    seconds: dict[str, list[float]] = {}
    with contextlib.suppress(tf.errors.OpError):
        steps = {}
        for towers in (setup.towers, setup.towers[:few]):
            trial = dataclasses.replace(config, num_gpus=len(towers))
            steps[str(len(towers))] = make_trial_step(trial, list(towers), setup.precision, train, setup.length)
        seconds = time_steps(steps)
    if not seconds or np.quantile(np.divide(seconds[str(few)], seconds[str(count)]), 0.75) > 1 - FASTER:
        return
    times = {name: f"{1000 * np.median(taken):.1f} ms" for name, taken in seconds.items()}
    log(
        f"{few} tower{'s' * (few > 1)} would be faster than {count}: a step of {config.batch_size} images takes "
        f"{times[str(few)]} there, {times[str(count)]} here (medians of {STEPS}); give --num_gpus={few}"
    )
