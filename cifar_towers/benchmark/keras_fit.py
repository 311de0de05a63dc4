"""Keras `fit` as a peer: the same model from stock layers, trained under a distribution strategy."""

import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.models.layers import LocalResponseNorm, PadChannels
from cifar_towers.models.speednet import Whitening
from cifar_towers.models.stock_layers import STOCK_EQUIVALENTS, LayerAndWeights, clone_layer, replace_layers
from cifar_towers.towers import Tower

NUM_FED_BATCHES = 3  # distinct batches, repeated


def make_arrays(batches: Batches, augmentation: Augmentation) -> dict[str, np.ndarray]:
    """Return the recipe's first batches: `images` as the model gets them, `labels`, and `raw` images."""
    first = [batches.at(step) for step in range(NUM_FED_BATCHES)]
    return {
        "images": np.concatenate([augmentation.augment(batch.images, batch.draws) for batch in first]),
        "labels": np.concatenate([batch.labels for batch in first]),
        "raw": np.concatenate([batch.images for batch in first]),
    }


def make_array_fit(
    model: keras.Model, towers: Sequence[Tower], images: np.ndarray, labels: np.ndarray, batch_size: int
) -> Callable[[int], Iterator[float]]:
    """Prepare `fit` of a stock copy of `model` on the same images; with several towers, under MirroredStrategy.

    Return a function (steps) -> seconds of each, from one batch's end to the next, after an untimed step.
    """
    strategy = tf.distribute.MirroredStrategy([tower.device for tower in towers])
    with strategy.scope() if len(towers) > 1 else tf.device(towers[0].device):
        stock_model = to_stock_model(model)
        stock_model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size, drop_remainder=True)
    data = batches.cache().repeat().prefetch(2)

    def time_steps(steps: int) -> Iterator[float]:
        ends: list[float] = []

        def record_end(batch: int, logs: dict) -> None:
            float(logs["loss"])  # waits for the step
            ends.append(time.perf_counter())

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=record_end)
        stock_model.fit(data, steps_per_epoch=steps + 1, epochs=1, verbose=0, shuffle=False, callbacks=[callback])
        yield from np.diff(ends).tolist()

    return time_steps


def to_stock_model(model: keras.Model) -> keras.Model:
    """Return a trainable copy of `model` with Keras's own layers, or the usual code if Keras has no such layer.

    Whitening layers are frozen with their bias, as they are in most of a run.
    """

    def whitening(layer: Whitening) -> LayerAndWeights:
        stock_layer, weights = STOCK_EQUIVALENTS[Whitening](layer)
        stock_layer.trainable = False
        return stock_layer, weights

    def response_norm(layer: LocalResponseNorm) -> LayerAndWeights:
        def norm(x):  # TensorFlow's operation takes float32 only
            x32 = tf.cast(x, tf.float32)
            normalized = tf.nn.local_response_normalization(x32, layer.radius, layer.bias, layer.alpha, layer.beta)
            return tf.cast(normalized, x.dtype)

        return keras.layers.Lambda(norm, name=layer.name, dtype=layer.dtype_policy), []

    made = {Whitening: whitening, LocalResponseNorm: response_norm, PadChannels: clone_layer}
    return replace_layers(model, STOCK_EQUIVALENTS | made)
