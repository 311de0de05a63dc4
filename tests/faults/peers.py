"""Whole runs with TensorFlow's and Keras's ways to save, for comparison with ours.

They have as many steps, saves and weights as ours, momentum and a moving average, and all that makes a run repeatable:
a seed, deterministic operations, and an order of the data that follows from the step. Messages and result are as ours.
"""

import hashlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data import synthetic
from cifar_towers.files import run_files
from tests.faults.subjects import BACKUP, MANAGER, MAX_TO_KEEP, backup_callback

STEPS, SAVED_EVERY, BATCH_SIZE = 30, 3, 20


def run_manager(directory: Path) -> None:
    """A custom loop with `tf.train.CheckpointManager`; the step seeds the choice of its batch."""
    model, optimizer = _build()
    split = synthetic.make(300, 0, 0)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(step=step, optimizer=optimizer, model=model)
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=MAX_TO_KEEP)
    manager.restore_or_initialize()
    _log(f"resuming from step {int(step)}")

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        step.assign_add(1)

    for number in range(int(step), STEPS):
        chosen = np.random.default_rng(number).choice(len(split.labels), BATCH_SIZE, replace=False)
        train_step(tf.constant(split.images[chosen]), tf.constant(split.labels[chosen]))
        if (number + 1) % SAVED_EVERY == 0:
            manager.save(checkpoint_number=number + 1)
            _log(f"saved step {number + 1}")
    _write_result(directory, model, optimizer)


def run_backup(directory: Path) -> None:
    """`fit` with `keras.callbacks.BackupAndRestore`, which resumes only at the start of an epoch: an epoch is as short
    as our interval between saves, and takes its batches in one order."""
    model, optimizer = _build()
    split = synthetic.make(SAVED_EVERY * BATCH_SIZE, 0, 0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    log = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: _log(f"resuming from step {SAVED_EVERY * (model._initial_epoch or 0)}"),
        on_epoch_end=lambda epoch, logs: _log(f"saved step {SAVED_EVERY * (epoch + 1)}"),
    )
    data = tf.data.Dataset.from_tensor_slices((split.images, split.labels)).batch(BATCH_SIZE)
    model.fit(data, epochs=STEPS // SAVED_EVERY, callbacks=[backup_callback(directory), log], verbose=0)
    _write_result(directory, model, optimizer)


RUNS = {MANAGER: run_manager, BACKUP: run_backup}


def _build() -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """A net of about as many weights as ours, with batch norm, and its optimizer."""
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    layers = [keras.Input((32, 32, 3)), keras.layers.Rescaling(1 / 255)]
    for filters in (32, 96, 256):
        layers += [
            keras.layers.Conv2D(filters, 3, use_bias=False),
            keras.layers.MaxPooling2D(2),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    layers += [keras.layers.Flatten(), keras.layers.Dense(256), keras.layers.Dense(10)]
    return keras.Sequential(layers), keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, use_ema=True)


def _log(line: str) -> None:
    print(line, flush=True)


def _write_result(directory: Path, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    weights = b"".join(variable.numpy().tobytes() for variable in (*model.variables, *optimizer.variables))
    run_files.write_json(directory / run_files.RESULT, {"weights_sha256": hashlib.sha256(weights).hexdigest()})
