"""Where NaN and infinity come from: the first tower, tensor, variable or layer."""

import contextlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.towers import Tower, run_micro_batches
from cifar_towers.towers.keras_parallel import first_call
from cifar_towers.training.results import StepMetrics


def describe_nonfinite(
    metrics: StepMetrics, towers: Sequence[Tower], weight_names: Sequence[str], update_names: Sequence[str]
) -> str:
    """The first non-finite number of a step, as `total_loss of tower_1 is not finite`.

    Args:
      metrics: as NumPy arrays.
      weight_names, update_names: those of the `TrainState`.
    """
    names = [*metrics.losses, *(f"the gradient of {name}" for name in reversed(weight_names))]
    for tower, index in zip(towers, np.atleast_1d(metrics.nonfinite_towers), strict=True):
        if index >= 0:
            return f"{names[index]} of {tower.name} is not finite"
    return f"the new value of {update_names[metrics.nonfinite_update]} is not finite"


def first_nonfinite_index(tensors: Sequence[tf.Tensor | None], devices: Sequence[str] = ()) -> tf.Tensor:
    """Index of the first of N tensors that holds a NaN or an infinity, as int32; -1 if none does.

    Each is checked on its own of N devices, if they are given. None and integers count as finite.
    """
    finite = []
    for index, tensor in enumerate(tensors):
        if tensor is None or not tensor.dtype.is_floating:
            finite.append(tf.constant(True))
            continue
        with tf.device(devices[index] if devices else ""):
            finite.append(tf.reduce_all(tf.math.is_finite(tensor)))
    finite = tf.stack(finite)
    return tf.where(tf.reduce_all(finite), -1, tf.argmin(finite, output_type=tf.int32))


def first_nonfinite_layer(model: keras.Model, images: tf.Tensor) -> str:
    """The first non-finite variable, input or layer output of a forward pass of `images` [B, height, width, 3], with
    batch norm over the images; empty if all is finite."""
    for variable in model.variables:
        if variable.dtype.startswith(("float", "bfloat")) and not _is_finite(variable.value):
            return f"variable {variable.path}"
    if not _is_finite(images):
        return "the images"
    layers = [layer for layer in model.layers if not isinstance(layer, (keras.layers.InputLayer, keras.Model))]
    by_layer = keras.Model(model.input, [first_call(model, layer).output_tensors for layer in layers])
    weights, non_trainable = (
        [v.value for v in variables] for variables in (by_layer.trainable_variables, by_layer.non_trainable_variables)
    )
    outputs, _ = by_layer.stateless_call(weights, non_trainable, images, training=True)
    for layer, tensors in zip(layers, outputs, strict=False):
        if not all(map(_is_finite, tensors)):
            return f"the output of {layer.name}"
    return ""


def locate_nonfinite(
    model: keras.Model, augmentation: Augmentation, tower: Tower, shard: Batch, image_size: int, micro_batches: int
) -> str:
    """The first non-finite tensor of a tower's forward pass over its shard, as an addition to `describe_nonfinite`;
    empty if there is none, or if it cannot be located, as where memory is short."""

    def locate(part):
        return first_nonfinite_layer(model, augmentation.augment(part.images, part.draws, image_size))

    tensors = []
    with contextlib.suppress(tf.errors.OpError, ValueError), tf.device(tower.device):
        tensors = list(filter(None, run_micro_batches(locate, shard, micro_batches, sequential=False)))
    return f"; first of its tensors: {tensors[0]}" if tensors else ""


def _is_finite(tensor: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(tensor))))
