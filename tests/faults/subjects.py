"""The three ways to save that are compared: ours, TensorFlow's and Keras's, each as its
documentation uses it.

Each saves a small state in which every value is the step. TensorFlow's and Keras's also save whole
runs, which have as many steps, saves and weights as ours, momentum and a moving average, and all
that makes a run repeatable.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar_towers import files
from cifar_towers.config import TrainConfig
from cifar_towers.config.train_config import recipe_fields
from cifar_towers.data import synthetic
from cifar_towers.errors import DataError
from cifar_towers.runs.directory import RunDirectory, open_run

OURS = "cifar_towers"
MANAGER = "CheckpointManager"
BACKUP = "BackupAndRestore"
ALL = (OURS, MANAGER, BACKUP)
MAX_TO_KEEP = 3
SHAPES = {"kernel": (60, 40), "bias": (40,), "head": (40, 10)}
# as in `runs`
RUN_STEPS = 30
SAVE_EVERY_STEPS = 3
BATCH_SIZE = 20
# save a step; restore, which returns the step of the state
Saver = tuple[Callable[[int], object], Callable[[], int]]


def manager_saver(directory: Path, model: keras.Model) -> Saver:
    """`tf.train.CheckpointManager` with `restore_or_initialize`, as TensorFlow's guide has it."""
    step = tf.Variable(0, dtype=tf.int64)
    state = tf.train.Checkpoint(step=step, optimizer=model.optimizer, model=model)
    manager = tf.train.CheckpointManager(state, str(directory), max_to_keep=MAX_TO_KEEP)

    def save(number: int) -> None:
        step.assign(number)
        manager.save(checkpoint_number=number)

    def restore() -> int:
        manager.restore_or_initialize()
        return int(step.numpy())

    return save, restore


def backup_saver(directory: Path, model: keras.Model) -> Saver:
    """`keras.callbacks.BackupAndRestore` at its safest setting, one epoch per step."""
    callback = keras.callbacks.BackupAndRestore(
        str(directory), save_freq="epoch", double_checkpoint=True, delete_checkpoint=False
    )
    callback.set_model(model)

    def restore() -> int:
        model._initial_epoch = 0
        callback.on_train_begin()
        return model._initial_epoch

    return lambda step: callback.on_epoch_end(step - 1), restore


PEERS = {MANAGER: manager_saver, BACKUP: backup_saver}


def make_save(subject: str, directory: Path) -> Callable[[int], None]:
    """Return the function by which a run of a subject saves a step."""
    if subject == OURS:
        files.make(directory)
        config = _config(directory)
        run = RunDirectory(config)
        metadata = {"recipe": recipe_fields(config), "failed_saves": 0}
    else:
        model = _small_model()
        save_model, _ = PEERS[subject](directory, model)

    def save(step: int) -> None:
        if subject == OURS:
            values = {name: np.full(shape, step, np.float32) for name, shape in SHAPES.items()}
            if not run.save(step, values, metadata):
                raise OSError(f"step {step} was not saved")
            return
        for variable in model.trainable_variables:
            variable.assign(np.full(variable.shape, step))
        save_model(step)

    return save


def recover(subject: str, directory: Path) -> tuple[int, str]:
    """Return what a restarted run begins with: (step, `intact` | `wrong weights` | `refused: ...` |
    `crashed: ...`).
    """
    try:
        if subject == OURS:
            with open_run(_config(directory)) as run:
                values, metadata = run.saved or ({}, {"step": 0})
                step = metadata["step"]
                arrays = list(values.values())
        else:
            model = _small_model()
            _, restore = PEERS[subject](directory, model)
            step = restore()
            arrays = [variable.numpy() for variable in model.trainable_variables]
    except Exception as error:
        is_foreseen = subject != OURS or isinstance(error, DataError)
        return 0, f"{'refused' if is_foreseen else 'crashed'}: {type(error).__name__}"

    found = set()
    for array in arrays:
        found |= {float(value) for value in np.unique(array)}
    if step:
        shapes = {array.shape for array in arrays}
        intact = found == {float(step)} and shapes == set(SHAPES.values())
    else:
        intact = not arrays or 0 in found  # Keras begins with a bias of 0
    return step, "intact" if intact else "wrong weights"


def _config(directory: Path) -> TrainConfig:
    return TrainConfig(train_dir=str(directory), keep_checkpoints=MAX_TO_KEEP)


def _small_model() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((60,)), keras.layers.Dense(40), keras.layers.Dense(10, use_bias=False)]
    )
    model.compile("sgd", "mse")
    return model


def train_peer(subject: str, directory: Path) -> None:
    """Make a whole run; messages and result are as ours."""
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    layers = [keras.layers.Rescaling(1 / 255)]
    for filters in (32, 96, 256):  # about as many weights as ours
        layers += [keras.layers.Conv2D(filters, 3, use_bias=False), keras.layers.MaxPooling2D(2)]
        layers += [keras.layers.BatchNormalization(), keras.layers.ReLU()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(256), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *layers])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, use_ema=True)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)
    save, restore = PEERS[subject](directory, model)
    start = restore()
    print(f"resuming from step {start}", flush=True)
    data = synthetic.make(300, 0, 0)
    for step in range(start + 1, RUN_STEPS + 1):
        batch = np.random.default_rng(step).choice(len(data.labels), BATCH_SIZE, replace=False)
        model.train_on_batch(data.images[batch], data.labels[batch])
        if step % SAVE_EVERY_STEPS == 0:
            save(step)
            print(f"saved step {step}", flush=True)

    variables = [*model.variables, *optimizer.variables]
    weights = b"".join(variable.numpy().tobytes() for variable in variables)
    result = {"weights_sha256": hashlib.sha256(weights).hexdigest()}
    files.write_json(directory / files.RESULT, result)
