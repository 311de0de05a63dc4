"""A recipe's groups of parameters: which variables move by which rule, how fast, and for how long."""

import math

import keras

from cifar_towers.config import TrainConfig, schedules
from cifar_towers.training.optimizers import AdamW, Group, Momentum, Muon, Optimizer


def make_optimizer(config: TrainConfig, model: keras.Model, length: schedules.RunLength) -> Optimizer:
    """The groups of a recipe: kernels, biases (with norm shifts), head, and the bias of a whitening layer.

    Weight decay takes the same fraction of every weight a step: a group with another rate gets the coefficient that
    makes rate x coefficient the same.
    """
    kind, points = schedules.parse_rate(config.learning_rate_schedule)
    places = points.steps(length)
    shape = {"linear": schedules.piecewise_linear, "step": schedules.piecewise_constant}[kind]
    whitening_steps = math.ceil(schedules.to_steps(config.whitening_epochs, length.steps_per_epoch))

    def group(name, variables, peak, factor, rule, until=math.inf):
        decay = config.weight_decay * config.learning_rate / peak if peak else 0.0
        return Group(name, rule(variables, weight_decay=decay), lambda step: peak * factor(step), until)

    def momentum(variables, weight_decay):
        return Momentum(variables, config.momentum, config.nesterov, weight_decay)

    def muon(variables, weight_decay):
        return Muon(variables, config.muon_momentum, length.total, weight_decay)

    def adamw(variables, weight_decay):
        return AdamW(variables, weight_decay=weight_decay)

    def recipe_factor(step):
        return shape(step, places, points.values)

    def whitening_factor(step):
        return 1 - step / whitening_steps

    kernel_rule = {"momentum": momentum, "muon": muon, "adamw": adamw}[config.optimizer]
    rest_rule = adamw if config.optimizer == "adamw" else momentum
    bias_rate = config.bias_learning_rate or config.learning_rate
    whitening_rate = config.whitening_learning_rate or bias_rate
    head_rate = config.head_learning_rate or config.learning_rate
    roles = split_by_role(model)
    return Optimizer(
        [
            group("kernels", roles["kernels"], config.learning_rate, recipe_factor, kernel_rule),
            group("biases", roles["biases"], bias_rate, recipe_factor, rest_rule),
            group("head", roles["head"], head_rate, recipe_factor, rest_rule),
            group("whitening", roles["whitening"], whitening_rate, whitening_factor, rest_rule, whitening_steps),
        ]
    )


def split_by_role(model: keras.Model) -> dict[str, list]:
    """Role -> the `tf.Variable`s that have it. The head is the last kernel, if any is trained; vectors count as
    biases."""
    head = next((v for v in reversed(model.trainable_variables) if len(v.shape) > 1), None)
    roles = {"kernels": [], "biases": [], "head": [], "whitening": []}
    for variable in model.trainable_variables:
        if variable.path.startswith("whitening/"):
            role = "whitening"
        elif variable is head:
            role = "head"
        else:
            role = "kernels" if len(variable.shape) > 1 else "biases"
        roles[role].append(variable.value)
    return roles
