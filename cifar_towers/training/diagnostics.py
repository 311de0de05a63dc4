"""Diagnostics of a step: tensor statistics, norms and cosines, computed in the training graph on summary steps only.

All of it is behind `tf.cond` in the one graph that trains: it changes no bit of the training, and other steps pay
nothing for it. Statistics are computed on the device of their tensor; only the results travel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from cifar_towers.models import layers
from cifar_towers.towers.keras_parallel import first_call
from cifar_towers.training.results import (
    NUM_BUCKETS,
    ForwardDiagnostics,
    TensorStats,
    TowerGradientStats,
    UpdateDiagnostics,
)

NUM_EXAMPLES = 64  # of the final tower's shard, whose activations are measured
NUM_IMAGES = 16  # of these, that are returned
NONLINEAR = tuple(
    getattr(keras.layers, name) for name in ("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax")
)


def activation_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers whose outputs are measured: those that end in a nonlinear function, and the last.

    Empty for a model that is not a graph of layers.
    """
    if not getattr(model, "inputs", None) or not hasattr(model, "operations"):
        return []

    def nonlinear(layer) -> bool:
        activation = getattr(layer, "activation", None)
        return isinstance(layer, (*NONLINEAR, layers.Activation)) or activation not in (None, keras.activations.linear)

    measured = [layer for layer in model.layers[:-1] if nonlinear(layer)] + model.layers[-1:]
    return [layer for layer in measured if not isinstance(layer, keras.Model)]  # a nested model has a graph of its own


def stateless_call_with_activations(model: keras.Model) -> Callable:
    """`model.stateless_call` in training that also returns the output of each of `activation_layers`:
    (weights, non_trainable, images) -> (logits, new non-trainable values, [losses added by the model], [outputs])."""
    measured = activation_layers(model)
    outputs = [first_call(model, layer).output_tensors[0] for layer in measured]
    with_activations = keras.Model(model.input, [model.output, *outputs]) if measured else model

    def call(weights, non_trainable, images):
        outputs, new_values, losses = with_activations.stateless_call(
            weights, non_trainable, images, training=True, return_losses=True
        )
        logits, *activations = outputs if measured else [outputs]
        return logits, new_values, losses, activations

    return call


def cond_or_zeros(condition: tf.Tensor, compute: Callable[[], Any], specs: Any) -> Any:
    """`compute()`, a structure of these `tf.TensorSpec`s, where `condition` ([] bool) holds at run time; else zeros."""

    def computed():
        return tf.nest.map_structure(lambda spec, value: tf.ensure_shape(value, spec.shape), specs, compute())

    def zeros():
        return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)

    return tf.cond(condition, computed, zeros)


def forward_diagnostics(
    collect: tf.Tensor, images: tf.Tensor, labels: tf.Tensor, activations: Sequence[tf.Tensor]
) -> ForwardDiagnostics:
    """Of a tower's input and the outputs of its `activation_layers`, each [B, ...], over its first examples."""
    count = min(NUM_IMAGES, images.shape[0])

    def compute():
        return tf.cast(images[:count], tf.float32), tensor_stats([a[:NUM_EXAMPLES] for a in activations])

    with tf.name_scope("diagnostics"):
        specs = tf.TensorSpec([count, *images.shape[1:]]), _stats_specs(len(activations))
        inputs, stats = cond_or_zeros(collect, compute, specs)
        return ForwardDiagnostics(inputs, labels[:count], stats)


def update_diagnostics(collect: tf.Tensor, gradients: Sequence[tuple], updates: Sequence[tuple]) -> UpdateDiagnostics:
    """Of N x (mean gradient, variable) and (variable, new value). Call it before the variables are assigned."""
    new_values = {id(variable): value for variable, value in updates}
    values = [tf.convert_to_tensor(variable) for _, variable in gradients]
    devices = [variable.device for _, variable in gradients]

    def compute():
        dense, norms = [], []
        for (gradient, variable), value in zip(gradients, values, strict=True):
            with tf.device(variable.device):
                dense.append(tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient))
                norms.append(tf.cast(tf.norm(new_values.get(id(variable), value) - value), tf.float32))
        return UpdateDiagnostics(tensor_stats(values, devices), tensor_stats(dense, devices), tf.stack(norms))

    with tf.name_scope("diagnostics"):
        count = len(gradients)
        specs = UpdateDiagnostics(_stats_specs(count), _stats_specs(count), tf.TensorSpec([count]))
        return cond_or_zeros(collect, compute, specs)


def tower_gradient_stats(
    collect: tf.Tensor, tower_gradients: Sequence[Sequence[tuple]], mean_gradients: Sequence[tuple]
) -> TowerGradientStats:
    """Of K x N x (gradient, variable) and N x (mean gradient, variable)."""

    def compute():
        stats = [_norm_and_cosine(gradients, mean_gradients) for gradients in tower_gradients]
        return TowerGradientStats(*map(tf.stack, zip(*stats, strict=True)))

    with tf.name_scope("diagnostics"):
        spec = tf.TensorSpec([len(tower_gradients)])
        return cond_or_zeros(collect, compute, TowerGradientStats(spec, spec))


def _norm_and_cosine(gradients: Sequence[tuple], mean_gradients: Sequence[tuple]) -> tuple[tf.Tensor, tf.Tensor]:
    """A gradient's norm over all variables and its cosine to the mean; products are taken beside each variable."""
    products = []
    for (own, variable), (mean, _) in zip(gradients, mean_gradients, strict=True):
        if own is not None and mean is not None:
            with tf.device(variable.device):
                own, mean = (tf.cast(tf.convert_to_tensor(g), tf.float32) for g in (own, mean))
                products.append(tf.stack([tf.reduce_sum(a * b) for a, b in ((own, own), (own, mean), (mean, mean))]))
    own_own, own_mean, mean_mean = tf.unstack(tf.add_n(products))
    return tf.sqrt(own_own), tf.math.divide_no_nan(own_mean, tf.sqrt(own_own) * tf.sqrt(mean_mean))


def tensor_stats(tensors: Sequence[tf.Tensor], devices: Sequence[str] = ()) -> TensorStats:
    """Statistics of each of N tensors, computed on the device of the same index if there are `devices`."""
    packed = []
    for index, tensor in enumerate(tensors):
        with tf.device(devices[index] if devices else ""):
            packed.append(_packed_stats(tf.cast(tf.reshape(tensor, [-1]), tf.float32)))
    rows = tf.stack(packed) if packed else tf.zeros([0, 4 + NUM_BUCKETS])
    return TensorStats(*tf.unstack(rows[:, :4], axis=1), counts=rows[:, 4:])


@tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)])
def _packed_stats(values: tf.Tensor) -> tf.Tensor:
    """The fields of `TensorStats` as one [4 + NUM_BUCKETS] tensor: one copy between devices, and one trace for all."""
    values = tf.where(tf.math.is_finite(values), values, 0.0)
    low, high = tf.reduce_min(values), tf.reduce_max(values)
    end = tf.where(high > low, high, low + tf.maximum(1.0, tf.abs(low)))
    counts = tf.histogram_fixed_width(values, tf.stack([low, end]), NUM_BUCKETS)
    zeros = tf.reduce_mean(tf.cast(tf.equal(values, 0.0), tf.float32))
    return tf.concat([tf.stack([low, high, zeros, tf.norm(values)]), tf.cast(counts, tf.float32)], 0)


def _stats_specs(count: int) -> TensorStats:
    """The shapes of `tensor_stats` of `count` tensors."""
    each = tf.TensorSpec([count])
    return TensorStats(each, each, each, each, tf.TensorSpec([count, NUM_BUCKETS]))
