"""The synchronization point: average the gradients of K towers, and their other tensors.

The gradient of a mean is the mean of the gradients. If each tower's loss is a mean over its shard, the mean of the
towers' gradients, weighted by the sizes of uneven shards, is therefore the gradient of the mean loss of the batch.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
Variable: TypeAlias = tf.Variable | keras.Variable


def average_gradients(
    tower_grads: Sequence[Iterable[tuple[Gradient, Variable]]],
    weights: Sequence[float | tf.Tensor] | None = None,
    device: str = "",
) -> list[tuple[Gradient, Variable]]:
    """Average each variable's gradient over the towers, on the variable's device unless another is given.

    Args:
      tower_grads: K x N x (gradient, variable): for each tower, the pairs of all N variables in one order, as
        `zip(tape.gradient(loss, variables), variables)` gives them.
      weights: [K] numbers or scalar tensors, the weight of each tower, usually its number of examples; equal if not
        given.
      device: computes all means, as `/CPU:0`; the device of each variable if empty.

    Returns:
      N x (mean gradient, variable). With one tower, its pairs unchanged. A variable that no tower has a gradient for
      keeps `None`; where only some towers have one, the others count as zeros. Gradients that are sparse on all towers
      stay sparse.

    Raises:
      ValueError: no towers, towers that disagree on their variables or their order, pairs of (variable, gradient), or
        weights that do not match the towers.
      tf.errors.InvalidArgumentError: when the graph runs, weights are negative or all zero.
    """
    towers = [list(pairs) for pairs in tower_grads]
    fractions = _fractions(len(towers), weights)
    _check_pairs(towers)
    if len(towers) == 1:
        return towers[0]
    with tf.name_scope("average_gradients"):
        return [
            (weighted_sum([gradient for gradient, _ in pairs], fractions, device or _device(pairs[0][1])), pairs[0][1])
            for pairs in zip(*towers, strict=True)
        ]


def weighted_mean(values: Sequence[tf.Tensor], weights: Sequence[int] | None = None) -> tf.Tensor:
    """Return the mean of K towers' tensors of one shape, weighted by numbers of examples if `weights` are given."""
    if len(values) == 1:
        return values[0]
    if not weights or len(set(weights)) == 1:
        return tf.add_n(list(values)) / len(values)
    return tf.add_n([value * (weight / sum(weights)) for value, weight in zip(values, weights, strict=True)])


def _fractions(num_towers: int, weights: Sequence[float | tf.Tensor] | None) -> list[float | tf.Tensor]:
    """Return each tower's weight as a fraction of their sum."""
    if not num_towers:
        raise ValueError(
            "average_gradients needs the gradients of at least one tower; pass a list with one entry per tower"
        )
    if weights is None:
        return [1 / num_towers] * num_towers
    values = [tf.get_static_value(weight) for weight in weights]
    rule = f"must be {num_towers} numbers, one a tower, none negative, not all zero"
    if len(weights) == num_towers and None in values:
        tensor = tf.stack([tf.cast(weight, tf.float64) for weight in weights])
        fractions = tensor / tf.abs(tf.reduce_sum(tensor))  # NaN if all are zero
        tf.debugging.assert_non_negative(fractions, f"weights {rule}")
        return tf.unstack(fractions)
    if len(weights) != num_towers or min(values) < 0 or sum(values) <= 0:
        raise ValueError(f"weights={list(weights)} {rule}")
    return [float(value / sum(values)) for value in values]


def weighted_sum(gradients: Sequence[Gradient], fractions: Sequence[float | tf.Tensor], device: str) -> Gradient:
    """Return sum(fraction_k * gradient_k) over the gradients that are not None, on `device`; None if all are.

    If all are sparse, so is the sum.
    """
    present = [(g, fraction) for g, fraction in zip(gradients, fractions, strict=True) if g is not None]
    if not present:
        return None
    with tf.device(device):  # the gradients travel to this device; the sum waits for all of them
        present = [(g, tf.cast(f, g.dtype) if tf.is_tensor(f) else tf.constant(f, g.dtype)) for g, f in present]
        if all(isinstance(g, tf.IndexedSlices) for g, _ in present):
            values = tf.concat([g.values * fraction for g, fraction in present], 0)
            return tf.IndexedSlices(values, tf.concat([g.indices for g, _ in present], 0), present[0][0].dense_shape)
        return tf.add_n([tf.convert_to_tensor(g) * fraction for g, fraction in present])


def _device(variable: Variable) -> str:
    """Return the device of a `tf.Variable`, or of the one that a Keras variable has as its value."""
    return getattr(variable, "device", None) or getattr(getattr(variable, "value", None), "device", "") or ""


def _check_pairs(towers: Sequence[Sequence[tuple[Gradient, Variable]]]) -> None:
    """Raise unless all towers have pairs of (gradient, variable), with the same variables in the same order."""
    for tower, pairs in enumerate(towers):
        for position, (gradient, _) in enumerate(pairs):
            if isinstance(gradient, tf.Variable | keras.Variable):
                raise ValueError(
                    f"pair {position} of tower_{tower} begins with a variable, {_name(gradient)}; write (gradient, "
                    "variable), as zip(gradients, variables) does"
                )
    for tower, pairs in enumerate(towers):
        for position, (expected, actual) in enumerate(itertools.zip_longest(towers[0], pairs, fillvalue=(None, None))):
            if expected[1] is not actual[1]:
                raise ValueError(
                    f"tower_{tower} and tower_0 disagree on variable {position}: tower_{tower} has {_name(actual[1])}, "
                    f"tower_0 has {_name(expected[1])}; all towers need the same variables in the same order"
                )


def _name(variable: Variable | None) -> str:
    if variable is None:
        return "none"
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or str(variable)
    return f"{name!r} of shape {getattr(variable, 'shape', 'none')}"
