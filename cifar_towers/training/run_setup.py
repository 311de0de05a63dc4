"""Everything of a run that is resolved before its first step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cifar_towers.config import TrainConfig, parse_profile_steps
from cifar_towers.config.schedules import ImageSizeSchedule, RunLength
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.data.dataset import Dataset
from cifar_towers.errors import UsageError
from cifar_towers.towers import Tower
from cifar_towers.training import build
from cifar_towers.training.auto_placement import resolve_placement
from cifar_towers.training.devices import Devices
from cifar_towers.training.diagnostics import activation_layers
from cifar_towers.training.state import TrainState
from cifar_towers.training.step_runner import StepRunner
from cifar_towers.training.tower_shares import resolve_shares


class RunSetup(NamedTuple):
    """What the training loop works with."""

    requested: TrainConfig
    config: TrainConfig  # the same, with what measuring or memory choose
    precision: str
    length: RunLength
    batches: Batches
    augmentation: Augmentation
    state: TrainState
    step_runner: StepRunner
    profiled_steps: tuple[int, int] | None  # (first, end), counted from 0
    towers: Sequence[Tower]  # of the step; one where the devices hold stages of the model
    local_towers: Sequence[Tower]  # those of this process

    def description(self) -> dict[str, Any]:
        """What reports say of it, as the fields of `RunInfo`."""
        return {
            "config": self.config,
            "local_towers": self.local_towers,
            "towers": self.towers,
            "precision": self.precision,
            "length": self.length,
            "image_size_at": self.step_runner.image_size_at,
            "model": self.state.model,
            "variables": self.state.named_variables(),
            "activation_layers": [layer.name for layer in activation_layers(self.state.model)],
        }


def setup_run(
    config: TrainConfig,
    dataset: Dataset,
    precision: str,
    devices: Devices,
    worker_index: int = 0,
    previous: Mapping[str, Any] | None = None,
) -> RunSetup:
    """Builds batches, model, state and step as the config asks for.

    Args:
      worker_index: number of this process in a cluster.
      previous: what was chosen when the run was last trained, if it was, by setting.

    Raises:
      UsageError: this machine, this model or this data set cannot be trained so.
    """
    strategy, towers, local_towers = devices
    rows = config.examples_drawn * len(local_towers) // len(towers)
    batches = build.make_batches(config, dataset.train, rows=(worker_index * rows, rows), towers=towers)
    length = config.run_length(batches.steps_per_epoch)
    profiled_steps = parse_profile_steps(config.profile_steps)
    if profiled_steps and profiled_steps[0] >= length.last:
        raise UsageError(
            f"profile_steps={config.profile_steps}: this run ends with step {length.last}; give earlier steps"
        )
    requested, previous = config, previous or {}
    if not config.micro_batches:  # auto
        config = dataclasses.replace(config, micro_batches=previous.get("micro_batches") or 1)
    for resolve, setting in ((resolve_placement, "variable_placement"), (resolve_shares, "tower_shares")):
        config = resolve(config, towers, precision, dataset.train, length, previous.get(setting) or "")
    state, train_step, step_towers = build.make_training(
        config, towers, precision, dataset.train, length, strategy, batches.load_images
    )
    image_size_at = ImageSizeSchedule(config.image_size_schedule, config.image_size).at(length)
    return RunSetup(
        requested=requested,
        config=config,
        precision=precision,
        length=length,
        batches=batches,
        augmentation=build.make_augmentation(config, dataset.info),
        state=state,
        profiled_steps=profiled_steps,
        step_runner=StepRunner(train_step, state.optimizer, image_size_at),
        towers=step_towers,
        local_towers=local_towers,
    )
