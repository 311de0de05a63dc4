"""Parameter groups by role, as kernels and biases, and the update rule that each optimizer gives a role."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cifar_towers.training.optimizers import AdamW, Momentum, Muon, Optimizer, ParamGroup, UpdateRule


class Hyperparameters(NamedTuple):
    """Settings of the update rules."""

    learning_rate: float  # that the weight decay is given for
    weight_decay: float
    momentum: float
    nesterov: bool
    muon_momentum: float
    total_steps: int


class RoleSchedule(NamedTuple):
    """The learning rate of a role: `peak_rate` times a factor of the step, until it is frozen."""

    peak_rate: float
    factor: Callable[[int], float]
    frozen_from_step: float = math.inf


def _momentum(variables: Sequence[tf.Variable], weight_decay: float, settings: Hyperparameters) -> UpdateRule:
    return Momentum(variables, settings.momentum, settings.nesterov, weight_decay)


def _adamw(variables: Sequence[tf.Variable], weight_decay: float, settings: Hyperparameters) -> UpdateRule:
    return AdamW(variables, weight_decay)


def _muon(variables: Sequence[tf.Variable], weight_decay: float, settings: Hyperparameters) -> UpdateRule:
    return Muon(variables, settings.muon_momentum, settings.total_steps, weight_decay)


RULES = {  # optimizer, one of `registry.OPTIMIZERS` -> role -> update rule; Muon's is for convolution kernels alone
    "momentum": {"kernels": _momentum, "biases": _momentum, "head": _momentum, "whitening": _momentum},
    "muon": {"kernels": _muon, "biases": _momentum, "head": _momentum, "whitening": _momentum},
    "adamw": {"kernels": _adamw, "biases": _adamw, "head": _adamw, "whitening": _adamw},
}


def make_optimizer(
    name: str, model: keras.Model, schedules: Mapping[str, RoleSchedule], settings: Hyperparameters
) -> Optimizer:
    """One parameter group for each role of `schedules`.

    Weight decay takes the same fraction of every weight a step: a role with another rate gets the coefficient that
    makes rate x coefficient the same.

    Raises:
      ValueError: there is no such optimizer.
    """
    if name not in RULES:
        raise ValueError(f"optimizer={name} is not one of {', '.join(RULES)}")
    variables = split_by_role(model)
    groups = []
    for role, (peak, factor, frozen_from_step) in schedules.items():
        weight_decay = settings.weight_decay * settings.learning_rate / peak if peak else 0.0
        rule = RULES[name][role](variables[role], weight_decay, settings)
        groups.append(ParamGroup(role, rule, _learning_rate(peak, factor), frozen_from_step))
    return Optimizer(groups)


def _learning_rate(peak: float, factor: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: peak * factor(step)


def split_by_role(model: keras.Model) -> dict[str, list[tf.Variable]]:
    """Role -> trained variables. The head is the last kernel, if any is trained; vectors count as biases."""
    head = next((v for v in reversed(model.trainable_variables) if len(v.shape) > 1), None)
    roles: dict[str, list[tf.Variable]] = {"kernels": [], "biases": [], "head": [], "whitening": []}
    for variable in model.trainable_variables:
        if variable.path.startswith("whitening/"):
            role = "whitening"
        elif variable is head:
            role = "head"
        else:
            role = "kernels" if len(variable.shape) > 1 else "biases"
        roles[role].append(variable.value)
    return roles
