"""Everything of a run that is resolved before its first step."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.config import TrainConfig
from cifar_towers.config.schedules import ImageSizeSchedule, RunLength
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.data.dataset import Dataset
from cifar_towers.towers import Tower
from cifar_towers.training import auto_placement, build
from cifar_towers.training.diagnostics import activation_layers
from cifar_towers.training.state import TrainState
from cifar_towers.training.step_runner import StepRunner


class RunSetup(NamedTuple):
    """What the training loop works with."""

    config: TrainConfig  # with its variable placement resolved
    precision: str
    length: RunLength
    batches: Batches
    augmentation: Augmentation
    state: TrainState
    step_runner: StepRunner
    activation_layers: Sequence[str]  # names of the layers whose outputs the diagnostics have
    towers: Sequence[Tower]  # of the step; one where the devices hold stages of the model
    local_towers: Sequence[Tower]  # those of this process


def setup_run(
    config: TrainConfig,
    dataset: Dataset,
    precision: str,
    towers: Sequence[Tower],
    local_towers: Sequence[Tower],
    *,
    strategy: tf.distribute.Strategy | None = None,
    worker_index: int = 0,
    previous_placement: str | None = None,
) -> RunSetup:
    """Builds batches, model, state and step as the config asks for.

    Args:
      towers: those of all workers; local_towers: those of this process, which is number `worker_index`.
      strategy: that of a cluster.
      previous_placement: variable placement that the run had when it was last trained, if it was.

    Raises:
      UsageError: this machine, this model or this data set cannot be trained so.
    """
    rows = config.examples_drawn * len(local_towers) // len(towers)
    batches = build.make_batches(config, dataset.train, rows=(worker_index * rows, rows))
    length = config.run_length(batches.steps_per_epoch)
    config = auto_placement.resolve_placement(config, towers, precision, dataset.train, length, previous_placement)
    state, train_step, step_towers = build.make_training(config, towers, precision, dataset.train, length, strategy)
    image_size_at = ImageSizeSchedule(config.image_size_schedule, config.image_size).at(length)
    return RunSetup(
        config=config,
        precision=precision,
        length=length,
        batches=batches,
        augmentation=build.make_augmentation(config, dataset.info),
        state=state,
        step_runner=StepRunner(train_step, state.optimizer, image_size_at),
        activation_layers=[layer.name for layer in activation_layers(state.model)],
        towers=step_towers,
        local_towers=local_towers,
    )
