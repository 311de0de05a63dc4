"""The synchronization point: average the gradients of K towers, and their other tensors.

The gradient of a mean is the mean of the gradients. If each tower's loss is a mean over its shard,
the mean of the towers' gradients, weighted by the sizes of uneven shards, is therefore the gradient
of the mean loss of the batch.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
Variable: TypeAlias = tf.Variable | keras.Variable


def average_gradients(
    tower_grads: Sequence[Iterable[tuple[Gradient, Variable]]],
    weights: Sequence[float | tf.Tensor] | None = None,
) -> list[tuple[Gradient, Variable]]:
    """Average each variable's gradient over the towers, on the variable's device.

    Args:
      tower_grads: K x N x (gradient, variable): for each tower, the pairs of all N variables in one
        order, as `zip(tape.gradient(loss, variables), variables)` gives them.
      weights: [K] numbers or scalar tensors, the weight of each tower, usually its number of
        examples; equal if not given.

    Returns:
      N x (mean gradient, variable). With one tower, its pairs unchanged. A variable that no tower
      has a gradient for keeps `None`; where only some towers have one, the others count as zeros.
      The mean is sparse if no tower's gradient is dense.

    Raises:
      ValueError: towers that disagree on their variables or their order, or not one weight per
        tower.
    """
    towers = [list(pairs) for pairs in tower_grads]
    if len(towers) == 1:
        return towers[0]
    if weights is None:
        weights = [1] * len(towers)
    total = sum(weights)
    fractions = [weight / total for weight in weights]
    averaged = []
    with tf.name_scope("average_gradients"):
        for pairs in zip(*towers, strict=True):  # of one variable
            _check_same_variable(pairs)
            _, variable = pairs[0]
            gradients = [gradient for gradient, _ in pairs]
            mean = weighted_sum(gradients, fractions, _device(variable))
            averaged.append((mean, variable))
    return averaged


def _check_same_variable(pairs: Sequence[tuple[Gradient, Variable]]) -> None:
    """Raise ValueError unless all towers have the pair of one variable."""
    _, variable = pairs[0]
    for tower, (_, other) in enumerate(pairs):
        if other is not variable:
            raise ValueError(
                f"tower_{tower} has {_name(other)} where tower_0 has {_name(variable)}; all towers "
                "need pairs of (gradient, variable), with the same variables in the same order"
            )


def average_tensors(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the mean of tensors of one shape."""
    return tensors[0] if len(tensors) == 1 else tf.add_n(list(tensors)) / len(tensors)


def add_gradients(one: Gradient, other: Gradient) -> Gradient:
    """Return the sum of two gradients, where None is zero. It is sparse if both are."""
    return weighted_sum([one, other], [1.0, 1.0])


def scale_gradient(gradient: Gradient, factor: float) -> Gradient:
    """Return a gradient times a factor; None stays None, and a sparse gradient sparse."""
    return weighted_sum([gradient], [factor])


def weighted_sum(
    gradients: Sequence[Gradient], fractions: Sequence[float | tf.Tensor], device: str = ""
) -> Gradient:
    """Return sum(fraction_k * gradient_k), where None is zero, on `device`; None if all are.

    If all are sparse, so is the sum.
    """
    present = []
    factors = []
    for gradient, fraction in zip(gradients, fractions, strict=True):
        if gradient is not None:
            present.append(gradient)
            factors.append(fraction)
    if not present:
        return None

    with tf.device(device):  # the gradients travel to this device; the sum waits for all of them
        factors = [_as_factor(f, g.dtype) for f, g in zip(factors, present, strict=True)]
        if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
            values = [g.values * factor for g, factor in zip(present, factors, strict=True)]
            indices = [gradient.indices for gradient in present]
            shape = present[0].dense_shape
            return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shape)

        dense = [tf.convert_to_tensor(gradient) for gradient in present]
        return tf.add_n([g * factor for g, factor in zip(dense, factors, strict=True)])


def _as_factor(fraction: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return a number or a scalar tensor in the type of a gradient."""
    if tf.is_tensor(fraction):
        return tf.cast(fraction, dtype)
    return tf.constant(fraction, dtype)


def _device(variable: Variable) -> str:
    """Return the device of a variable; a Keras variable has a `tf.Variable` as its value."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).device


def _name(variable: Variable) -> str:
    return f"{getattr(variable, 'path', variable.name)!r} of shape {variable.shape}"
