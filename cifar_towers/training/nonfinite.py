"""Whether numbers are finite, and where the first that is not came from."""

import contextlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.models.user_model import graph_node
from cifar_towers.towers import Tower, run_micro_batches


def describe(metrics, towers: Sequence, terms: Sequence[str], weights: Sequence[str], moved: Sequence[str]) -> str:
    """Which numbers of a step were not finite, in words, as `total_loss of tower_1 is not finite`.

    Args:
      metrics: the step's `StepMetrics`, on the host.
      terms, weights: names of the loss terms and of the trained variables. moved: of what the update assigns.
    """
    names = [*terms, *(f"the gradient of {name}" for name in reversed(weights))]
    for tower, bad in zip(towers, np.atleast_1d(metrics.nonfinite_towers), strict=True):
        if bad >= 0:
            return f"{names[bad]} of {tower.name} is not finite"
    return f"the new value of {moved[metrics.nonfinite_update]} is not finite"


def first_nonfinite_index(tensors: Sequence[tf.Tensor | None], devices: Sequence[str] = ()) -> tf.Tensor:
    """Index of the first of N tensors that holds a NaN or an infinity, as int32; -1 if none does.

    Each is looked at on its own of N devices, if they are given. None counts as finite, and so do integers.
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
    """What in a forward pass of `images` [B, height, width, 3] is first not finite, in words; empty if all is.

    Looks at the model's variables, the images, and the output of each layer in turn, with batch norm over the images.
    """
    for variable in model.variables:
        if variable.dtype.startswith(("float", "bfloat")) and not _finite(variable.value):
            return f"variable {variable.path}"
    if not _finite(images):
        return "the images"
    layers = [layer for layer in model.layers if not isinstance(layer, (keras.layers.InputLayer, keras.Model))]
    until_each = keras.Model(model.input, [graph_node(model, layer).output_tensors for layer in layers])
    variables = [
        [v.value for v in kind] for kind in (until_each.trainable_variables, until_each.non_trainable_variables)
    ]
    outputs, _ = until_each.stateless_call(*variables, images, training=True)
    return next((f"the output of {layer.name}" for layer, of in zip(layers, outputs) if not all(map(_finite, of))), "")


def locate_nonfinite(
    model: keras.Model, augmentation: Augmentation, tower: Tower, shard: Batch, side: int, micro_batches: int
) -> str:
    """What in a tower's forward pass over its shard, in images of this side, is first not finite: an addition to what
    `describe` says, empty if all is, or if that cannot be found out."""

    def look(part):
        return first_nonfinite_layer(model, augmentation.train(part.images, part.draws, side))

    found = []
    with contextlib.suppress(tf.errors.OpError, ValueError), tf.device(tower.device):  # as where memory is short
        found = [first for first in run_micro_batches(look, shard, micro_batches, sequential=False) if first]
    return f"; first of its tensors: {found[0]}" if found else ""


def _finite(tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(tensor))))
