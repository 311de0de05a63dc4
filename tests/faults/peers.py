"""Whole runs of the two peers, each saved as its documentation has it, to be compared with ours.

As many steps, saves and weights as ours, momentum and a moving average too, and all that a user can do for a run that
can be repeated: a seed, deterministic operations, and an order of the data that follows from the step. They print what
ours prints: `going on from step N`, `saved step N`, `weights sha256 ...`.
"""

import hashlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data import synthetic
from tests.faults.subjects import BACKUP, KEPT, MANAGER

STEPS, SAVED_EVERY, BATCH_SIZE = 30, 3, 20


def run_manager(directory: Path) -> None:
    """A loop of one's own with `tf.train.CheckpointManager`; the batch of a step is drawn with the step as seed."""
    model, optimizer = _begin()
    split = synthetic.make(300, 0, 0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(step=step, optimizer=optimizer, model=model)
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=KEPT)
    manager.restore_or_initialize()
    print(f"going on from step {int(step)}", flush=True)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        step.assign_add(1)

    for number in range(int(step), STEPS):
        chosen = np.random.default_rng(number).choice(len(split.labels), BATCH_SIZE, replace=False)
        train_step(tf.constant(split.images[chosen]), tf.constant(split.labels[chosen]))
        if (number + 1) % SAVED_EVERY == 0:
            manager.save(checkpoint_number=number + 1)
            print(f"saved step {number + 1}", flush=True)
    _end(model, optimizer)


def run_backup(directory: Path) -> None:
    """`fit` with `keras.callbacks.BackupAndRestore`, which goes on from the beginning of an epoch only: so an epoch
    is as short as our time between saves, is saved at its end, and takes its batches in one order."""
    model, optimizer = _begin()
    split = synthetic.make(SAVED_EVERY * BATCH_SIZE, 0, 0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    backup = keras.callbacks.BackupAndRestore(
        str(directory), save_freq="epoch", double_checkpoint=True, delete_checkpoint=False
    )
    told = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: print(
            f"going on from step {SAVED_EVERY * (model._initial_epoch or 0)}", flush=True
        ),
        on_epoch_end=lambda epoch, logs: print(f"saved step {SAVED_EVERY * (epoch + 1)}", flush=True),
    )
    data = tf.data.Dataset.from_tensor_slices((split.images, split.labels)).batch(BATCH_SIZE)
    model.fit(data, epochs=STEPS // SAVED_EVERY, callbacks=[backup, told], verbose=0)
    _end(model, optimizer)


RUNS = {MANAGER: run_manager, BACKUP: run_backup}


def _begin() -> tuple[keras.Model, keras.optimizers.Optimizer]:
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


def _end(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    digest = hashlib.sha256()
    for variable in (*model.variables, *optimizer.variables):
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    print(f"weights sha256 {digest.hexdigest()}", flush=True)
