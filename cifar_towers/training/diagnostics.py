"""What a step tells of itself when somebody looks closely, every so often.

All of it is in the one graph that trains, behind `tf.cond`: the step that is looked at is the step that trains, to the
bit, and one that is not looked at pays nothing for it. Large tensors are counted where they are; only counts travel.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.models import layers
from cifar_towers.models.user_model import graph_node

BUCKETS = 30
EXAMPLES = 64  # of the final tower's shard, whose activations are counted
IMAGES = 16  # of these, that are shown
NONLINEAR = tuple(
    getattr(keras.layers, name) for name in ("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax")
)


class TensorStats(NamedTuple):
    """How the values of a tensor are spread; those that are not finite count as 0."""

    low: float
    high: float
    zeros: float  # share of the values that are 0
    norm: float  # root of the sum of squares
    counts: np.ndarray  # [30] values in equal buckets from low to high

    @classmethod
    def of(cls, row: np.ndarray) -> "TensorStats":
        """From a row that `count` made."""
        return cls(*map(float, row[:4]), row[4:])


class ForwardDiagnostics(NamedTuple):
    """What one tower's forward pass adds to its result."""

    images: tf.Tensor  # [n, side, side, 3] as the net sees them
    labels: tf.Tensor  # [n]
    activations: tf.Tensor  # [L, 34] a row of `count` for each watched layer


class StepDiagnostics(NamedTuple):
    """What a step adds to its metrics: the final tower's look, and what all towers come to; else all zeros."""

    look: ForwardDiagnostics
    towers: tf.Tensor  # [K, 2] norm of the tower's gradient, times the loss scale; cosine between it and the mean
    update: tf.Tensor  # [N, 69] what `update_diagnostics` says of each trained variable
    loss_scale: tf.Tensor  # that the step was made with


def activation_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers whose outputs are activations: those that end in a nonlinear function, and the last.

    Empty for a model that is not made of a graph of layers.
    """
    if not getattr(model, "inputs", None) or not hasattr(model, "operations"):
        return []

    def nonlinear(layer) -> bool:
        activation = getattr(layer, "activation", None)
        return isinstance(layer, (*NONLINEAR, layers.Activation)) or activation not in (None, keras.activations.linear)

    found = [layer for layer in model.layers[:-1] if nonlinear(layer)] + model.layers[-1:]
    return [layer for layer in found if not isinstance(layer, keras.Model)]  # a model's output is that of its own graph


def stateless_call_with_activations(model: keras.Model) -> Callable:
    """`model.stateless_call` in training, that also gives each watched layer's output:
    (weights, statistics, images) -> (logits, new statistics, [losses that the net adds], [outputs])."""
    watched = activation_layers(model)
    whole = (
        keras.Model(model.input, [model.output, *(graph_node(model, layer).output_tensors[0] for layer in watched)])
        if watched
        else model
    )

    def call(weights, statistics, images):
        outputs, new_statistics, losses = whole.stateless_call(
            weights, statistics, images, training=True, return_losses=True
        )
        logits, *seen = outputs if watched else [outputs]
        return logits, new_statistics, losses, seen

    return call


def when(look: tf.Tensor, make: Callable[[], tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
    """`make()`, of this shape and float32, where `look` ([] bool) is true when the graph runs; zeros elsewhere."""

    def made():
        return tf.ensure_shape(make(), shape)

    return tf.cond(look, made, lambda: tf.zeros(shape))


def forward_diagnostics(
    look: tf.Tensor, images: tf.Tensor, labels: tf.Tensor, activations: Sequence[tf.Tensor]
) -> ForwardDiagnostics:
    """A tower's input and its watched layers' outputs, each [B, ...], of its first examples."""
    shown = min(IMAGES, images.shape[0])
    with tf.name_scope("close_up"):
        return ForwardDiagnostics(
            when(look, lambda: tf.cast(images[:shown], tf.float32), [shown, *images.shape[1:]]),
            labels[:shown],
            when(
                look,
                lambda: tf.stack([count(a[:EXAMPLES]) for a in activations]) if activations else tf.zeros([0, 34]),
                [len(activations), 4 + BUCKETS],
            ),
        )


def update_diagnostics(look: tf.Tensor, gradients: Sequence[tuple], moves: Sequence[tuple]) -> tf.Tensor:
    """[N, 69] of N x (mean gradient, variable) and (variable, value it is to have): rows of values and gradients as
    `count` makes them, and the norm of the change. Call it before the variables move."""
    next_values = {id(variable): value for variable, value in moves}
    values = [tf.convert_to_tensor(variable) for _, variable in gradients]

    def made():
        rows = []
        for (gradient, variable), old in zip(gradients, values, strict=True):
            with tf.device(variable.device):
                gradient = tf.zeros_like(old) if gradient is None else tf.convert_to_tensor(gradient)
                moved = tf.cast(tf.norm(next_values.get(id(variable), old) - old), tf.float32)
                rows.append(tf.concat([count(old), count(gradient), moved[None]], 0))
        return tf.stack(rows)

    with tf.name_scope("close_up"):
        return when(look, made, [len(gradients), 2 * (4 + BUCKETS) + 1])


def tower_gradient_stats(
    look: tf.Tensor, tower_gradients: Sequence[Sequence[tuple]], means: Sequence[tuple]
) -> tf.Tensor:
    """[K, 2] of K x N x (gradient, variable) and N x (mean gradient, variable): the norm of each tower's gradient, all
    variables together, and the cosine between it and the mean."""

    def made():
        rows = []
        for gradients in tower_gradients:
            sums = []
            for (own, variable), (mean, _) in zip(gradients, means, strict=True):
                if own is not None and mean is not None:
                    with tf.device(variable.device):
                        own, mean = (tf.cast(tf.convert_to_tensor(g), tf.float32) for g in (own, mean))
                        sums.append(
                            tf.stack([tf.reduce_sum(a * b) for a, b in ((own, own), (own, mean), (mean, mean))])
                        )
            own, along, mean = tf.unstack(tf.add_n(sums))
            rows.append(tf.stack([tf.sqrt(own), tf.math.divide_no_nan(along, tf.sqrt(own) * tf.sqrt(mean))]))
        return tf.stack(rows)

    with tf.name_scope("close_up"):
        return when(look, made, [len(tower_gradients), 2])


def count(values: tf.Tensor) -> tf.Tensor:
    """[34] float32: lowest and highest value, share of zeros, norm, and how many are in each of 30 equal buckets."""
    return _count(tf.cast(tf.reshape(values, [-1]), tf.float32))


@tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)])
def _count(values: tf.Tensor) -> tf.Tensor:
    """`count`, traced once for all tensors of a device and not for each."""
    values = tf.where(tf.math.is_finite(values), values, 0.0)
    low, high = tf.reduce_min(values), tf.reduce_max(values)
    end = tf.where(high > low, high, low + tf.maximum(1.0, tf.abs(low)))
    counts = tf.histogram_fixed_width(values, tf.stack([low, end]), BUCKETS)
    zeros = tf.reduce_mean(tf.cast(tf.equal(values, 0.0), tf.float32))
    return tf.concat([tf.stack([low, high, zeros, tf.norm(values)]), tf.cast(counts, tf.float32)], 0)
