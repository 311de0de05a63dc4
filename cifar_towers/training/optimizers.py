"""Optimizers: update rules over parameter groups, from mean gradients to new values, which the
caller assigns.

An optimizer is a pair of update rules, and its name one of `registry.OPTIMIZERS`. A parameter group
has a role: kernels, biases or the head.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar_towers.config import schedules
from cifar_towers.config.train_config import OptimizerSettings
from cifar_towers.towers.placement import pin_to_device

Updates = list[tuple[tf.Variable, tf.Tensor]]  # (variable, new value)


class Momentum:
    """SGD with momentum: m <- mu m + d, w <- w - learning_rate m, where d = g + weight_decay w.

    Nesterov's form subtracts d + mu m instead of m. As in PyTorch, and unlike in Keras, m does not
    contain the learning rate, so a new rate acts at once.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ):
        self.variables = list(variables)
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.slots = {
            "momentum": [make_slot(v, "momentum") for v in self.variables] if momentum else []
        }

    def compute_update(
        self, index: int, gradient: tf.Tensor, learning_rate: tf.Tensor, step: tf.Tensor
    ) -> Updates:
        variable = self.variables[index]
        direction = gradient
        if self.weight_decay:
            # minus, as TensorFlow makes an AddN of three summands, in an order that depends on what
            # is ready first
            direction -= -self.weight_decay * variable
        updates: Updates = []
        if self.momentum:
            buffer = self.slots["momentum"][index]
            new_buffer = self.momentum * buffer + direction
            updates.append((buffer, new_buffer))
            direction = direction + self.momentum * new_buffer if self.nesterov else new_buffer
        return [*updates, (variable, variable - tf.cast(learning_rate, variable.dtype) * direction)]


class AdamW:
    """Adam with decoupled weight decay: w <- w - learning_rate (m^ / (sqrt(v^) + eps) +
    weight_decay w).

    Source: I. Loshchilov and F. Hutter, arXiv 1711.05101.
    """

    BETA1 = 0.9
    BETA2 = 0.999
    EPSILON = 1e-8

    def __init__(self, variables: Sequence[tf.Variable], weight_decay: float = 0.0):
        self.variables = list(variables)
        self.weight_decay = weight_decay
        self.slots = {
            "mean": [make_slot(v, "mean") for v in self.variables],
            "square": [make_slot(v, "square") for v in self.variables],
        }

    def compute_update(
        self, index: int, gradient: tf.Tensor, learning_rate: tf.Tensor, step: tf.Tensor
    ) -> Updates:
        """Return new values of one variable and its two averages; `step` corrects the bias of the
        first steps.

        `step` counts skipped steps too.
        """
        variable = self.variables[index]
        mean = self.slots["mean"][index]
        square = self.slots["square"][index]
        count = tf.cast(step + 1, variable.dtype)
        new_mean = self.BETA1 * mean + (1 - self.BETA1) * gradient
        new_square = self.BETA2 * square + (1 - self.BETA2) * tf.square(gradient)
        unbiased_mean = new_mean / (1 - tf.pow(tf.constant(self.BETA1, count.dtype), count))
        unbiased_square = new_square / (1 - tf.pow(tf.constant(self.BETA2, count.dtype), count))
        direction = (
            unbiased_mean / (tf.sqrt(unbiased_square) + self.EPSILON) + self.weight_decay * variable
        )
        new_value = variable - tf.cast(learning_rate, variable.dtype) * direction
        return [(mean, new_mean), (square, new_square), (variable, new_value)]


class Muon:
    """Momentum whose direction is made nearly orthogonal, for kernels of convolutions [height,
    width, C_in, C_out] and of dense layers [C_in, C_out].

    m <- mu m + g; w <- w (1 - learning_rate weight_decay) - learning_rate orthogonal(g + mu m).
    Every floor(2 + 15 step / total_steps) steps a kernel is first rescaled to norm sqrt(C_out),
    unless it is zero.
    Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024, and the 2025
    CIFAR-10 record.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        momentum: float,
        total_steps: int,
        weight_decay: float = 0.0,
    ):
        self.variables = list(variables)
        self.momentum = momentum
        self.total_steps = total_steps
        self.weight_decay = weight_decay
        self.slots = {"momentum": [make_slot(v, "momentum") for v in self.variables]}

    def compute_update(
        self, index: int, gradient: tf.Tensor, learning_rate: tf.Tensor, step: tf.Tensor
    ) -> Updates:
        variable = self.variables[index]
        buffer = self.slots["momentum"][index]
        new_buffer = self.momentum * buffer + gradient
        period = 2 + 15 * tf.cast(step, tf.int64) // self.total_steps
        is_due = tf.equal(tf.cast(step, tf.int64) % period, 0)
        learning_rate = tf.cast(learning_rate, variable.dtype)
        target = tf.constant(variable.shape[-1] ** 0.5, variable.dtype)
        norm = tf.norm(variable)
        scale = tf.where(tf.logical_and(is_due, norm > 0), target / norm, 1.0)
        scale *= 1 - learning_rate * self.weight_decay
        direction = orthogonalize(gradient + self.momentum * new_buffer)
        return [(buffer, new_buffer), (variable, scale * variable - learning_rate * direction)]


# An update rule has `variables`, and `slots` by name: a list with one slot for each variable, or an
# empty list. `compute_update` returns new values of one variable and its slots, computed on its
# device; `step` counts from 0.
UpdateRule = Momentum | AdamW | Muon


def orthogonalize(kernel: tf.Tensor) -> tf.Tensor:
    """Bring the singular values of a kernel [..., C_out], reshaped to a matrix [rest, C_out], near
    to 1.

    Three Newton-Schulz steps X <- (a I + b A + c A A) X with A = X X^T, from X = kernel / |kernel|,
    with the shorter side first. Each factor is a polynomial of the first A, so all of them commute.
    They are multiplied with each other first, and with X once, which takes half as many operations
    for a 3x3 convolution.
    """
    a = 3.4576
    b = -4.7391
    c = 2.0843
    matrix = tf.reshape(kernel, [-1, kernel.shape[-1]])
    tall = matrix.shape[0] > matrix.shape[1]
    x = tf.transpose(matrix) if tall else matrix
    x /= tf.norm(x) + 1e-7
    identity = tf.eye(x.shape[0], dtype=x.dtype)

    def factor_of(gram: tf.Tensor) -> tf.Tensor:
        return a * identity + b * gram + c * tf.matmul(gram, gram)

    gram = tf.matmul(x, x, transpose_b=True)
    factor = factor_of(gram)
    product = factor
    for _ in range(2):
        gram = tf.matmul(tf.matmul(factor, gram), factor)  # the next A
        factor = factor_of(gram)
        product = tf.matmul(factor, product)

    x = tf.matmul(product, x)
    return tf.reshape(tf.transpose(x) if tall else x, kernel.shape)


class ParamGroup(NamedTuple):
    """Variables that share an update rule and a learning rate."""

    name: str
    rule: UpdateRule
    peak_rate: float


class Optimizer:
    """All parameter groups of a run, in a fixed order.

    Args:
      rate_factor: function from a step to the factor of all peak rates.
    """

    def __init__(self, groups: Sequence[ParamGroup], rate_factor: Callable[[int], float]):
        self.groups = [group for group in groups if group.rule.variables]
        self.rate_factor = rate_factor

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each group in the update from `step` to `step + 1`."""
        factor = self.rate_factor(step)
        return {group.name: group.peak_rate * factor for group in self.groups}

    def compute_updates(
        self, gradients: Sequence[tuple], learning_rates: Mapping[str, tf.Tensor], step: tf.Tensor
    ) -> Updates:
        """Return new values from pairs (gradient, variable) in any order.

        A variable has no new value if it has no gradient or no pair.
        """
        gradient_of = {id(variable): gradient for gradient, variable in gradients}
        updates: Updates = []
        for group in self.groups:
            for index, variable in enumerate(group.rule.variables):
                gradient = gradient_of.get(id(variable))
                if gradient is not None:
                    with tf.device(variable.device):
                        gradient = tf.convert_to_tensor(gradient)
                        updates += group.rule.compute_update(
                            index, gradient, learning_rates[group.name], step
                        )
        return updates

    def slots(self) -> dict[str, tf.Variable]:
        """Return every slot by its name in checkpoints."""
        named = {}
        for group in self.groups:
            for slot, variables in group.rule.slots.items():
                for index, variable in enumerate(variables):
                    named[f"{group.name}.{slot}.{index}"] = variable
        return named


def make_optimizer(
    settings: OptimizerSettings, model: keras.Model, length: schedules.RunLength
) -> Optimizer:
    """Return the optimizer of a run, with a parameter group for each role.

    `weight_decay` is that at `learning_rate`. A role with another peak rate gets weight_decay x
    learning_rate / its peak, so that all weights of one update rule decay by the same fraction
    per step.
    """
    sgd = functools.partial(Momentum, momentum=settings.momentum, nesterov=settings.nesterov)
    muon = functools.partial(Muon, momentum=settings.muon_momentum, total_steps=length.total)
    # optimizer -> (rule of kernels but the head's, rule of all other variables)
    rules: dict[str, tuple[Callable[..., UpdateRule], Callable[..., UpdateRule]]]
    rules = {"momentum": (sgd, sgd), "muon": (muon, sgd), "adamw": (AdamW, AdamW)}
    of_kernels, of_others = rules[settings.optimizer]

    peak_rates = {
        "kernels": settings.learning_rate,
        "biases": settings.bias_learning_rate or settings.learning_rate,
        "head": settings.head_learning_rate or settings.learning_rate,
    }
    variables = split_by_role(model)
    groups = []
    for role, peak_rate in peak_rates.items():
        decay = 0.0
        if peak_rate:
            decay = settings.weight_decay * settings.learning_rate / peak_rate
        make_rule = of_kernels if role == "kernels" else of_others
        rule = make_rule(variables[role], weight_decay=decay)
        groups.append(ParamGroup(role, rule, peak_rate))

    shape, points = schedules.parse_rate_schedule(settings.learning_rate_schedule)
    rate_factor = functools.partial(
        schedules.RATE_SHAPES[shape], steps=points.steps(length), values=points.values
    )
    return Optimizer(groups, rate_factor)


def main_rate(rates: Mapping[str, float]) -> float:
    """Return the learning rate that stands for those of all groups: that of the kernels, or else of
    the head, or else of the first group.
    """
    for role in ("kernels", "head"):
        if role in rates:
            return rates[role]
    return next(iter(rates.values()))


def split_by_role(model: keras.Model) -> dict[str, list[tf.Variable]]:
    """Return the trained variables of each role. A variable of at most one axis is a bias.

    The head is the last kernel with an output for each class. In a net with a `call` of its own,
    the last kernel may belong to any layer.
    """
    kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
    heads = [v for v in kernels if v.shape[-1] == model.output_shape[-1]] or kernels
    head = heads[-1] if heads else None
    roles: dict[str, list[tf.Variable]] = {"kernels": [], "biases": [], "head": []}
    for variable in model.trainable_variables:
        if variable is head:
            role = "head"
        elif len(variable.shape) > 1:
            role = "kernels"
        else:
            role = "biases"
        roles[role].append(variable.value)
    return roles


def make_slot(variable: tf.Variable, name: str, value: tf.Tensor | None = None) -> tf.Variable:
    """Return a new variable on the device of another variable and named after it, as
    `conv1/kernel/momentum`.

    Args:
      value: the initial value; default: zeros.
    """
    value = tf.zeros(variable.shape, variable.dtype) if value is None else value
    # the variable's name includes its scopes already
    with tf.name_scope(""), pin_to_device(variable.device):
        return tf.Variable(value, trainable=False, name=f"{variable_name(variable)}/{name}")


def variable_name(variable: tf.Variable) -> str:
    """Return a variable's name with its scopes, as `conv1/kernel`."""
    return variable.name.removesuffix(":0")
