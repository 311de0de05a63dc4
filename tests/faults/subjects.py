"""The three ways to save that are compared: ours, TensorFlow's and Keras's, each as its documentation uses it.

Each saves a small state in which every value is the step, so that a recovered state can be checked. `recover` returns
the (step, weights) with which a restarted run continues.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.checkpointing.checkpoint import latest_checkpoint, read_metadata
from cifar_towers.checkpointing.manager import CheckpointManager

OURS, MANAGER, BACKUP = "cifar_towers", "CheckpointManager", "BackupAndRestore"
ALL = (OURS, MANAGER, BACKUP)
SHAPES = {"kernel": (12, 40), "bias": (40,), "head": (40, 10)}
MAX_TO_KEEP = 3


class TowersCheckpoint:
    """`CheckpointManager`: what a run does to save, and what a start of the program does."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}
        self.variables["step"] = tf.Variable(0, dtype=tf.int64)
        self.manager = CheckpointManager(directory, self, 0, MAX_TO_KEEP, lambda line: None)

    def named_variables(self) -> dict[str, tf.Variable]:
        """As `TrainState`."""
        return self.variables

    def first_nonfinite_variable(self) -> str:
        """As `TrainState`."""
        return ""

    def save(self, step: int) -> None:
        _assign(self.variables.values(), step)
        if not self.manager.save(step, {"accuracy": None}):
            raise OSError(f"step {step} was not saved")

    def recover(self) -> tuple[int, list[np.ndarray]]:
        self.manager.quarantine_damaged()
        newest = latest_checkpoint(self.directory)
        if not newest:
            return 0, []
        self.manager.restore(newest)
        return read_metadata(newest)["step"], _values(self.variables.values())


class Manager:
    """`tf.train.CheckpointManager` with `restore_or_initialize`, as TensorFlow's guide has it."""

    def __init__(self, directory: Path):
        self.step = tf.Variable(0, dtype=tf.int64)
        self.weights = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}
        state = tf.train.Checkpoint(step=self.step, **self.weights)
        self.manager = tf.train.CheckpointManager(state, str(directory), max_to_keep=MAX_TO_KEEP)

    def save(self, step: int) -> None:
        _assign((self.step, *self.weights.values()), step)
        self.manager.save(checkpoint_number=step)

    def recover(self) -> tuple[int, list[np.ndarray]]:
        self.manager.restore_or_initialize()
        return int(self.step.numpy()), _values(self.weights.values())


class Backup:
    """`keras.callbacks.BackupAndRestore` at its safest setting, one epoch per step."""

    def __init__(self, directory: Path):
        self.model = keras.Sequential([keras.layers.Dense(40), keras.layers.Dense(10, use_bias=False)])
        self.model.build((None, 12))
        self.model.compile("sgd", "mse")
        self.callback = backup_callback(directory)
        self.callback.set_model(self.model)

    def save(self, step: int) -> None:
        for variable in self.model.trainable_variables:
            variable.assign(np.full(variable.shape, step))
        self.callback.on_epoch_end(step - 1)

    def recover(self) -> tuple[int, list[np.ndarray]]:
        self.model._initial_epoch = 0
        self.callback.on_train_begin()
        return self.model._initial_epoch, _values(self.model.trainable_variables)


def backup_callback(directory: Path) -> keras.callbacks.BackupAndRestore:
    """The callback with two backups that are kept at the end of training."""
    return keras.callbacks.BackupAndRestore(
        str(directory), save_freq="epoch", double_checkpoint=True, delete_checkpoint=False
    )


def _assign(variables, step: int) -> None:
    for variable in variables:
        variable.assign(tf.fill(variable.shape, tf.cast(step, variable.dtype)))


def _values(variables) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables]


SUBJECTS = {OURS: TowersCheckpoint, MANAGER: Manager, BACKUP: Backup}


def save(subject: str, directory: Path, *steps: int) -> None:
    """Saves these steps one after another, as one run would."""
    saver = SUBJECTS[subject](directory)
    for step in steps:
        saver.save(step)


def recover(subject: str, directory: Path) -> tuple[int, str]:
    """What a restarted run finds: (step, `intact` | `wrong weights`)."""
    step, weights = SUBJECTS[subject](directory).recover()
    values = {float(value) for array in weights for value in np.unique(array)}
    intact = values == {float(step)} if step else not values or 0 in values
    return step, "intact" if intact else "wrong weights"
