"""Diagnostics of a step: tensor statistics, norms and cosines, computed in the training graph on summary steps only.

They stand behind `tf.cond` in the graph that trains: they change no bit of the training, and other steps pay nothing
for them. Statistics are computed on the device of their tensor; only the results travel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from cifar_towers.models import layers
from cifar_towers.training.results import NUM_BUCKETS, TensorStats

NUM_EXAMPLES = 64  # of the final tower's shard, whose activations are measured
NUM_IMAGES = 16  # of these, that are returned
NONLINEAR = tuple(
    getattr(keras.layers, name) for name in ("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax")
)


def activation_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the layers whose outputs are measured: each layer that ends in a nonlinear function, and the last layer.

    The list is empty for a model that is not a graph of layers.
    """
    if not getattr(model, "inputs", None) or not hasattr(model, "operations"):
        return []

    def nonlinear(layer) -> bool:
        activation = getattr(layer, "activation", None)
        return isinstance(layer, (*NONLINEAR, layers.Activation)) or activation not in (None, keras.activations.linear)

    measured = [layer for layer in model.layers[:-1] if nonlinear(layer)] + model.layers[-1:]
    return [layer for layer in measured if not isinstance(layer, keras.Model)]  # a nested model has a graph of its own


def cond_or_zeros(condition: tf.Tensor, compute: Callable[[], Any], specs: Any) -> Any:
    """Return `compute()`, a structure of these `tf.TensorSpec`s, if `condition` ([] bool) holds, otherwise zeros."""

    def computed():
        return tf.nest.map_structure(lambda spec, value: tf.ensure_shape(value, spec.shape), specs, compute())

    def zeros():
        return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)

    with tf.name_scope("diagnostics"):
        return tf.cond(condition, computed, zeros)


def forward_diagnostics(
    collect: tf.Tensor, images: tf.Tensor, labels: tf.Tensor, activations: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, TensorStats]:
    """Return the first three fields of `StepDiagnostics`: images, labels, and statistics of activations [B, ...]."""
    count = min(NUM_IMAGES, images.shape[0])

    def compute():
        return tf.cast(images[:count], tf.float32), tensor_stats([a[:NUM_EXAMPLES] for a in activations])

    specs = tf.TensorSpec([count, *images.shape[1:]]), _stats_specs(len(activations))
    inputs, stats = cond_or_zeros(collect, compute, specs)
    return inputs, labels[:count], stats


def update_diagnostics(
    collect: tf.Tensor, gradients: Sequence[tuple], updates: Sequence[tuple]
) -> tuple[TensorStats, TensorStats, tf.Tensor]:
    """Return the last three fields of `StepDiagnostics`: statistics of weights and gradients, and norms of the updates.

    Call this function before the variables are assigned.

    Args:
      gradients: N x (mean gradient, variable). updates: pairs (variable, new value).
    """
    new_values = {id(variable): value for variable, value in updates}
    values = [tf.convert_to_tensor(variable) for _, variable in gradients]
    devices = [variable.device for _, variable in gradients]

    def compute():
        dense, norms = [], []
        for (gradient, variable), value in zip(gradients, values, strict=True):
            with tf.device(variable.device):
                dense.append(tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient))
                norms.append(tf.cast(tf.norm(new_values.get(id(variable), value) - value), tf.float32))
        return tensor_stats(values, devices), tensor_stats(dense, devices), tf.stack(norms)

    stats = _stats_specs(len(gradients))
    return cond_or_zeros(collect, compute, (stats, stats, tf.TensorSpec([len(gradients)])))


def tower_gradient_stats(
    collect: tf.Tensor, tower_gradients: Sequence[Sequence[tf.Tensor | None]], mean_gradients: Sequence[tuple]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return each tower's gradient norm [K], and the cosine [K] between its gradient and the mean gradient.

    Args:
      tower_gradients: K x N gradients. mean_gradients: N x (mean gradient, variable).
    """

    def compute():
        stats = [_norm_and_cosine(gradients, mean_gradients) for gradients in tower_gradients]
        return tuple(map(tf.stack, zip(*stats, strict=True)))

    spec = tf.TensorSpec([len(tower_gradients)])
    return cond_or_zeros(collect, compute, (spec, spec))


def _norm_and_cosine(
    gradients: Sequence[tf.Tensor | None], mean_gradients: Sequence[tuple]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a gradient's norm and its cosine to the mean, over all variables; products are taken beside each."""
    products = []
    for own, (mean, variable) in zip(gradients, mean_gradients, strict=True):
        if own is not None and mean is not None:
            with tf.device(variable.device):
                own, mean = (tf.cast(tf.convert_to_tensor(g), tf.float32) for g in (own, mean))
                products.append(tf.stack([tf.reduce_sum(a * b) for a, b in ((own, own), (own, mean), (mean, mean))]))
    own_own, own_mean, mean_mean = tf.unstack(tf.add_n(products))
    return tf.sqrt(own_own), tf.math.divide_no_nan(own_mean, tf.sqrt(own_own) * tf.sqrt(mean_mean))


def tensor_stats(tensors: Sequence[tf.Tensor], devices: Sequence[str] = ()) -> TensorStats:
    """Return statistics of N tensors, each computed on its own of N `devices` if they are given."""
    packed = []
    for index, tensor in enumerate(tensors):
        with tf.device(devices[index] if devices else ""):
            packed.append(_packed_stats(tf.cast(tf.reshape(tensor, [-1]), tf.float32)))
    rows = tf.stack(packed) if packed else tf.zeros([0, 4 + NUM_BUCKETS])
    return TensorStats._make([*tf.unstack(rows[:, :4], axis=1), rows[:, 4:]])


@tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)])
def _packed_stats(values: tf.Tensor) -> tf.Tensor:
    """Return the fields of `TensorStats` as one [4 + NUM_BUCKETS] tensor: one copy between devices, one trace."""
    values = tf.where(tf.math.is_finite(values), values, 0.0)
    low, high = tf.reduce_min(values), tf.reduce_max(values)
    end = tf.where(high > low, high, low + tf.maximum(1.0, tf.abs(low)))
    counts = tf.histogram_fixed_width(values, tf.stack([low, end]), NUM_BUCKETS)
    zeros = tf.reduce_mean(tf.cast(tf.equal(values, 0.0), tf.float32))
    return tf.concat([tf.stack([low, high, zeros, tf.norm(values)]), tf.cast(counts, tf.float32)], 0)


def _stats_specs(count: int) -> TensorStats:
    """Return the shapes of `tensor_stats` for `count` tensors."""
    each = tf.TensorSpec([count])
    return TensorStats(each, each, each, each, tf.TensorSpec([count, NUM_BUCKETS]))
