"""The three ways to save that are tried: ours, and the two that TensorFlow and Keras bring, each as its users use it.

Each saves a small state whose every value tells the step it is of, so that what is recovered can be judged.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.checkpointing.checkpoint import latest_checkpoint, read_metadata
from cifar_towers.checkpointing.manager import CheckpointManager

OURS, MANAGER, BACKUP = "cifar_towers", "CheckpointManager", "BackupAndRestore"
EVERY = (OURS, MANAGER, BACKUP)
SHAPES = {"kernel": (12, 40), "bias": (40,), "head": (40, 10)}
KEPT = 3


class Ours:
    """`CheckpointManager`: save, and what a start does: quarantine what is damaged, restore the latest."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}
        self.variables["step"] = tf.Variable(0, dtype=tf.int64)
        self.manager = CheckpointManager(directory, self, 0, KEPT, lambda line: None)

    def named_variables(self) -> dict[str, tf.Variable]:
        """As `TrainState`."""
        return self.variables

    def first_nonfinite_variable(self) -> str:
        """As `TrainState`."""
        return ""

    def save(self, step: int) -> None:
        """The state after `step`."""
        for variable in self.variables.values():
            variable.assign(tf.fill(variable.shape, tf.cast(step, variable.dtype)))
        if not self.manager.save(step, {"accuracy": None}):
            raise OSError(f"step {step} was not saved")

    def recover(self) -> tuple[int, list[np.ndarray]]:
        """(the step that the run would go on from, the weights it would go on with)."""
        self.manager.quarantine_damaged()
        found = latest_checkpoint(self.directory)
        if not found:
            return 0, []
        self.manager.restore(found)
        step = read_metadata(found)["step"]
        return step, [variable.numpy() for variable in self.variables.values()]


class Manager:
    """`tf.train.CheckpointManager` with `restore_or_initialize`, as TensorFlow's guide has it."""

    def __init__(self, directory: Path):
        self.step = tf.Variable(0, dtype=tf.int64)
        self.weights = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}
        self.checkpoint = tf.train.Checkpoint(step=self.step, **self.weights)
        self.directory = directory
        self.manager: tf.train.CheckpointManager | None = None

    def save(self, step: int) -> None:
        """The state after `step`."""
        for variable in (self.step, *self.weights.values()):
            variable.assign(tf.fill(variable.shape, tf.cast(step, variable.dtype)))
        self._managed().save(checkpoint_number=step)

    def recover(self) -> tuple[int, list[np.ndarray]]:
        """(the step that the run would go on from, the weights it would go on with)."""
        self._managed().restore_or_initialize()
        return int(self.step.numpy()), [variable.numpy() for variable in self.weights.values()]

    def _managed(self) -> tf.train.CheckpointManager:
        if self.manager is None:  # its constructor reads the directory
            self.manager = tf.train.CheckpointManager(self.checkpoint, str(self.directory), max_to_keep=KEPT)
        return self.manager


class Backup:
    """`keras.callbacks.BackupAndRestore` at its safest setting, an epoch a step."""

    def __init__(self, directory: Path):
        self.model = keras.Sequential([keras.layers.Dense(40), keras.layers.Dense(10, use_bias=False)])
        self.model.build((None, 12))
        self.model.compile("sgd", "mse")
        self.callback = keras.callbacks.BackupAndRestore(
            str(directory), save_freq="epoch", double_checkpoint=True, delete_checkpoint=False
        )
        self.callback.set_model(self.model)

    def save(self, step: int) -> None:
        """The state after `step`."""
        for variable in self.model.trainable_variables:
            variable.assign(np.full(variable.shape, step))
        self.callback.on_epoch_end(step - 1)

    def recover(self) -> tuple[int, list[np.ndarray]]:
        """(the step that the run would go on from, the weights it would go on with)."""
        self.model._initial_epoch = 0
        self.callback.on_train_begin()
        return self.model._initial_epoch, [variable.numpy() for variable in self.model.trainable_variables]


SUBJECTS = {OURS: Ours, MANAGER: Manager, BACKUP: Backup}


def save(subject: str, directory: Path, *steps: int) -> None:
    """Saves these steps one after another, as one run would."""
    saver = SUBJECTS[subject](directory)
    for step in steps:
        saver.save(step)


def recover(subject: str, directory: Path) -> tuple[int, str]:
    """What a run that is started again finds: (step it goes on from, `whole` | `first weights` | `wrong weights`)."""
    step, weights = SUBJECTS[subject](directory).recover()
    values = {float(value) for array in weights for value in np.unique(array)}
    if step == 0:
        return 0, "first weights" if step in values or not values else "wrong weights"
    return step, "whole" if values == {float(step)} else "wrong weights"
