"""The synchronization point: average the gradients of K towers."""

import itertools
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf


def average_gradients(
    tower_grads: Sequence[Iterable[tuple]], weights: Sequence[float] | None = None, device: str = ""
) -> list[tuple]:
    """Averages each variable's gradient over the towers, on the variable's device unless another is given.

    Args:
      tower_grads: K x N x (gradient, variable): for each tower, the pairs of all N variables in one order, as
        `zip(tape.gradient(loss, variables), variables)` gives them. A gradient is a tensor, `tf.IndexedSlices` or
        `None`; a variable is a `tf.Variable` or a Keras variable.
      weights: [K], the weight of each tower, usually its number of examples; equal if not given.
      device: computes all means, as `/CPU:0`; the device of each variable if empty.

    Returns:
      N x (mean gradient, variable). With one tower, its pairs unchanged. A variable that no tower has a gradient for
      keeps `None`; where only some towers have one, the others count as zeros. Gradients that are sparse on all towers
      stay sparse.

    Raises:
      ValueError: no towers, towers that disagree on their variables or their order, pairs of (variable, gradient), or
        weights that do not match the towers.
    """
    tower_grads = [list(pairs) for pairs in tower_grads]
    fractions = _fractions(tower_grads, weights)
    _check_gradients_first(tower_grads)
    _check_same_variables(tower_grads)
    if len(tower_grads) == 1:
        return tower_grads[0]
    with tf.name_scope("average_gradients"):
        return [
            (_mean([gradient for gradient, _ in pairs], device or _device(pairs[0][1]), fractions), pairs[0][1])
            for pairs in zip(*tower_grads, strict=True)
        ]


def _mean(gradients: list, device: str, fractions: list[float]):
    """sum(fraction_k * gradient_k) over the towers that have one, or None if none has."""
    present = [(g, fraction) for g, fraction in zip(gradients, fractions, strict=True) if g is not None]
    if not present:
        return None
    with tf.device(device):
        if all(isinstance(g, tf.IndexedSlices) for g, _ in present):
            values = tf.concat([g.values * tf.constant(fraction, g.dtype) for g, fraction in present], 0)
            return tf.IndexedSlices(values, tf.concat([g.indices for g, _ in present], 0), present[0][0].dense_shape)
        return tf.add_n([tf.convert_to_tensor(g) * tf.constant(fraction, g.dtype) for g, fraction in present])


def _device(variable) -> str:
    """Device of a `tf.Variable`, or of the one that a Keras variable has as its value."""
    return getattr(variable, "device", None) or getattr(getattr(variable, "value", None), "device", "") or ""


def _fractions(tower_grads, weights) -> list[float]:
    if not tower_grads:
        raise ValueError(
            "average_gradients needs the gradients of at least one tower; pass a list with one entry per tower"
        )
    if weights is None:
        return [1 / len(tower_grads)] * len(tower_grads)
    if len(weights) != len(tower_grads) or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(
            f"weights={list(weights)} must be {len(tower_grads)} numbers, one a tower, none negative, not all zero"
        )
    return [weight / sum(weights) for weight in weights]


def _check_gradients_first(tower_grads) -> None:
    for tower, pairs in enumerate(tower_grads):
        for position, (gradient, _) in enumerate(pairs):
            if isinstance(gradient, tf.Variable | keras.Variable):
                raise ValueError(
                    f"pair {position} of tower_{tower} begins with a variable, {_name(gradient)} of shape "
                    f"{_shape(gradient)}; write (gradient, variable), as zip(gradients, variables) does"
                )


def _check_same_variables(tower_grads) -> None:
    first = [variable for _, variable in tower_grads[0]]
    for tower, pairs in enumerate(tower_grads):
        variables = [variable for _, variable in pairs]
        for position, (expected, actual) in enumerate(itertools.zip_longest(first, variables)):
            if expected is actual:
                continue
            if sorted(map(id, variables)) == sorted(map(id, first)):
                in_first = next(index for index, variable in enumerate(first) if variable is actual)
                raise ValueError(
                    f"tower_{tower} has the same variables as tower_0 in another order: its pair {position} has "
                    f"{_name(actual)} of shape {_shape(actual)}, which is in pair {in_first} of tower_0"
                )
            raise ValueError(
                f"tower_{tower} and tower_0 disagree on variable {position}: "
                f"tower_{tower} has {_name(actual)}, tower_0 has {_name(expected)} "
                f"(pair {position} of each; shapes {_shape(actual)} and {_shape(expected)})"
            )


def _name(variable) -> str:
    if variable is None:
        return "none"
    return repr(getattr(variable, "path", None) or getattr(variable, "name", None) or str(variable))


def _shape(variable) -> str:
    return str(getattr(variable, "shape", "none"))
