"""The same net as most people would train it: stock Keras layers, `fit`, a distribution strategy."""

import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batches
from cifar_towers.models.layers import LocalResponseNorm, PadChannels
from cifar_towers.models.speednet import Whitening
from cifar_towers.models.stock_layers import STOCK_EQUIVALENTS, Made, as_it_is, rebuild
from cifar_towers.towers import Tower

NUM_FED_BATCHES = 3  # different batches, fed again and again


def keras_fit(
    model: keras.Model, towers: Sequence[Tower], augmentation: Augmentation, batches: Batches
) -> Callable[[int], Iterator[tuple[float, float]]]:
    """`fit_arrays` with images that are augmented beforehand: a function (steps) -> (seconds, 0) for each of them."""
    first = [batches.at(step) for step in range(NUM_FED_BATCHES)]
    images = np.concatenate([augmentation.train(batch.images, batch.draws) for batch in first])
    labels = np.concatenate([batch.labels for batch in first])
    fit = fit_arrays(model, towers, images, labels, batches.batch_size)
    return lambda steps: ((seconds, 0.0) for seconds in fit(steps))


def fit_arrays(
    model: keras.Model, towers: Sequence[Tower], images: np.ndarray, labels: np.ndarray, batch_size: int
) -> Callable[[int], Iterator[float]]:
    """`fit` of a stock copy of `model` on the same images again and again, under MirroredStrategy where there are
    several towers.

    Returns a function (steps) -> seconds of each of them: the time from one batch's end to the next, without that of
    a first batch.
    """
    strategy = tf.distribute.MirroredStrategy([tower.device for tower in towers])
    with strategy.scope() if len(towers) > 1 else tf.device(towers[0].device):
        copy = stock(model)
        copy.compile(
            keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size, drop_remainder=True)
    data = data.cache().repeat().prefetch(2)

    def run(steps: int) -> Iterator[float]:
        ends: list[float] = []

        def end(batch: int, logs: dict) -> None:
            float(logs["loss"])  # it is there when the step is done
            ends.append(time.perf_counter())

        note = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        copy.fit(data, steps_per_epoch=steps + 1, epochs=1, verbose=0, shuffle=False, callbacks=[note])
        yield from np.diff(ends).tolist()

    return run


def stock(model: keras.Model) -> keras.Model:
    """A copy of `model` to train, of the layers as Keras ships them; what it has none for is as most would write it.

    A whitening rests, bias and all, as it does in most of a run.
    """
    made = {Whitening: _resting, LocalResponseNorm: _local_response_norm, PadChannels: as_it_is}
    return rebuild(model, STOCK_EQUIVALENTS | made)


def count_trained(model: keras.Model) -> int:
    """How many numbers a step over a net, or over its `stock` copy, trains where a whitening rests."""
    trained = [layer.trainable_variables for layer in model.layers if not isinstance(layer, Whitening)]
    return sum(variable.shape.num_elements() for variables in trained for variable in variables)


def _resting(layer: Whitening) -> Made:
    made, weights = STOCK_EQUIVALENTS[Whitening](layer)
    made.trainable = False
    return made, weights


def _local_response_norm(layer: LocalResponseNorm) -> Made:
    def norm(x):  # TensorFlow's operation knows float32 alone
        wide = tf.nn.local_response_normalization(
            tf.cast(x, tf.float32), layer.radius, layer.bias, layer.alpha, layer.beta
        )
        return tf.cast(wide, x.dtype)

    return keras.layers.Lambda(norm, name=layer.name, dtype=layer.dtype_policy), []
