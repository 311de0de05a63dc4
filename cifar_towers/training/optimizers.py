"""Update rules over groups of variables. They know nothing of towers: a mean gradient comes in, variables move.

A rule owns its variables' slots. `rule.move(index, gradient, rate, step)` tells the next values of one variable and its
slots, without assigning them. The optimizer calls it on the variable's device, where its slots are too.
"""

import math
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.towers.placement import pin_to_device

Updates = list[tuple[tf.Variable, tf.Tensor]]  # each with the value it is to have


class Momentum:
    """SGD with momentum: m <- mu m + d, w <- w - rate m, where d = g + weight_decay w.

    Nesterov's form moves by d + mu m instead of m. The rate stays outside the buffer, so a changing rate acts at
    once (Keras keeps it inside).
    """

    def __init__(self, variables, momentum: float = 0.9, nesterov: bool = False, weight_decay: float = 0.0):
        self.variables = list(variables)
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.slots = {"momentum": [_zeros_like(v, "momentum") for v in self.variables] if momentum else []}

    def move(self, index: int, gradient: tf.Tensor, rate: tf.Tensor, step: tf.Tensor) -> Updates:
        """One variable and its buffer after a step by its gradient."""
        variable, change = self.variables[index], gradient
        if self.weight_decay:
            change += self.weight_decay * variable
        moves: Updates = []
        if self.momentum:
            buffer = self.slots["momentum"][index]
            moved = self.momentum * buffer + change
            moves.append((buffer, moved))
            change = change + self.momentum * moved if self.nesterov else moved
        return [*moves, (variable, variable - tf.cast(rate, variable.dtype) * change)]


class AdamW:
    """Adam with decoupled weight decay: w <- w - rate (m^ / (sqrt(v^) + eps) + weight_decay w).

    Source: I. Loshchilov and F. Hutter, arXiv 1711.05101.
    """

    BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, variables, weight_decay: float = 0.0):
        self.variables, self.weight_decay = list(variables), weight_decay
        self.slots = {name: [_zeros_like(v, name) for v in self.variables] for name in ("mean", "square")}

    def move(self, index: int, gradient: tf.Tensor, rate: tf.Tensor, step: tf.Tensor) -> Updates:
        """One variable and its two averages after a step; `step` counts from 0 and corrects the first steps' bias.

        Steps that made no update count too: where the very first are such, as when a loss scale is sought, the next are
        the shorter for it.
        """
        variable, mean, square = self.variables[index], self.slots["mean"][index], self.slots["square"][index]
        count = tf.cast(step + 1, variable.dtype)
        new_mean = self.BETA1 * mean + (1 - self.BETA1) * gradient
        new_square = self.BETA2 * square + (1 - self.BETA2) * tf.square(gradient)
        unbiased_mean = new_mean / (1 - tf.pow(tf.constant(self.BETA1, count.dtype), count))
        unbiased_square = new_square / (1 - tf.pow(tf.constant(self.BETA2, count.dtype), count))
        direction = unbiased_mean / (tf.sqrt(unbiased_square) + self.EPSILON) + self.weight_decay * variable
        moved = variable - tf.cast(rate, variable.dtype) * direction
        return [(mean, new_mean), (square, new_square), (variable, moved)]


class Muon:
    """Momentum whose direction is made nearly orthogonal, for convolution kernels [height, width, C_in, C_out].

    m <- mu m + g; w <- w (1 - rate weight_decay) - rate orthogonal(g + mu m). Now and then, every
    2 + 15 x (step / total_steps) steps, a kernel is rescaled to norm sqrt(C_out) before it moves.
    Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024, and the 2025 CIFAR-10 record.
    """

    def __init__(self, variables, momentum: float, total_steps: int, weight_decay: float = 0.0):
        self.variables = list(variables)
        self.momentum, self.total_steps, self.weight_decay = momentum, total_steps, weight_decay
        self.slots = {"momentum": [_zeros_like(v, "momentum") for v in self.variables]}

    def move(self, index: int, gradient: tf.Tensor, rate: tf.Tensor, step: tf.Tensor) -> Updates:
        """One kernel and its buffer after a step by its gradient."""
        variable, buffer = self.variables[index], self.slots["momentum"][index]
        moved = self.momentum * buffer + gradient
        period = 2 + 15 * tf.cast(step, tf.int64) // self.total_steps
        rescale = tf.equal(tf.cast(step, tf.int64) % period, 0)
        rate_here = tf.cast(rate, variable.dtype)
        target = tf.constant(variable.shape[-1] ** 0.5, variable.dtype)
        scale = tf.where(rescale, target / tf.norm(variable), 1.0) * (1 - rate_here * self.weight_decay)
        direction = orthogonalize(gradient + self.momentum * moved)
        return [(buffer, moved), (variable, scale * variable - rate_here * direction)]


def orthogonalize(kernel: tf.Tensor) -> tf.Tensor:
    """Brings the singular values of [..., C_out], seen as a [rest, C_out] matrix, near to 1.

    Three Newton-Schulz steps X <- a X + (b A + c A A) X with A = X X^T, from X = kernel / |kernel|, on the shorter
    side.
    """
    a, b, c = 3.4576, -4.7391, 2.0843
    matrix = tf.reshape(kernel, [-1, kernel.shape[-1]])
    tall = matrix.shape[0] > matrix.shape[1]
    x = tf.transpose(matrix) if tall else matrix
    x /= tf.norm(x) + 1e-7
    for _ in range(3):
        gram = tf.matmul(x, x, transpose_b=True)
        x = a * x + tf.matmul(b * gram + c * tf.matmul(gram, gram), x)
    return tf.reshape(tf.transpose(x) if tall else x, kernel.shape)


class Group(NamedTuple):
    """Variables that one rule moves at one rate: `rate(step)` gives it on the host, step counted from 0. From step
    `until` on they rest for good, and their gradients need not be taken."""

    name: str
    rule: Momentum | AdamW | Muon
    rate: Callable[[int], float]
    until: float = math.inf


class Optimizer:
    """All groups of a run, in one order."""

    def __init__(self, groups: Sequence[Group]):
        self.groups = [group for group in groups if group.rule.variables]

    def rates(self, step: int, factor: float = 1.0) -> dict[str, float]:
        """Group name -> rate, times `factor`, of the update that makes step `step` into `step + 1`; without the groups
        that rest."""
        return {group.name: factor * group.rate(step) for group in self.groups if step < group.until}

    def moving(self, rates: Container[str]) -> list[tf.Variable]:
        """The variables of the groups that have a rate."""
        return [variable for group in self.groups if group.name in rates for variable in group.rule.variables]

    def moves(self, gradients: Sequence[tuple], rates: dict[str, tf.Tensor], step: tf.Tensor) -> Updates:
        """What N x (gradient, variable), in any order, make of variables and slots, each by its group's rule; what has
        no gradient, or no rate, stays."""
        gradient_of = {id(variable): gradient for gradient, variable in gradients}
        moves: Updates = []
        for group in self.groups:
            for index, variable in enumerate(group.rule.variables):
                gradient = gradient_of[id(variable)]
                if gradient is not None and group.name in rates:
                    with tf.device(variable.device):
                        moves += group.rule.move(index, tf.convert_to_tensor(gradient), rates[group.name], step)
        return moves

    def slots(self) -> dict[str, tf.Variable]:
        """Every slot by a lasting name, for checkpoints."""
        return {
            f"{group.name}.{slot}.{index}": variable
            for group in self.groups
            for slot, variables in group.rule.slots.items()
            for index, variable in enumerate(variables)
        }


def _zeros_like(variable: tf.Variable, name: str) -> tf.Variable:
    return make_slot(variable, name, tf.zeros(variable.shape, variable.dtype))


def make_slot(variable: tf.Variable, what: str, value: tf.Tensor) -> tf.Variable:
    """A variable that lives beside another and is named after it: `conv1/kernel/momentum`."""
    with tf.name_scope(""), pin_to_device(variable.device):  # the variable's name has its scopes in it already
        return tf.Variable(value, trainable=False, name=f"{variable.name.removesuffix(':0')}/{what}")
