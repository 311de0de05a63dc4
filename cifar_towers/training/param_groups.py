"""Parameter groups by role: kernels, biases, the head and whitening filters, and the learning rate of each."""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

FIRST_GROUP = "group1_"  # begins the names of its layers


class RoleSchedule(NamedTuple):
    """The learning rate of a role: `peak_rate` times a factor of the step, until it is frozen."""

    peak_rate: float
    factor: Callable[[int], float]
    frozen_from_step: float = math.inf

    def learning_rate(self, step: int) -> float:
        """The rate of the update from `step` to `step + 1`."""
        return self.peak_rate * self.factor(step)


def split_by_role(model: keras.Model, first_group: bool = False) -> dict[str, list[tf.Variable]]:
    """Role -> trained variables. The head is the last kernel, if any is trained; vectors count as biases. With
    `first_group` those of the first group of convolutions have roles of their own, `first_kernels` and `first_biases`.
    """
    head = next((v for v in reversed(model.trainable_variables) if len(v.shape) > 1), None)
    roles: dict[str, list[tf.Variable]] = {"kernels": [], "biases": [], "head": [], "whitening": []}
    if first_group:
        roles |= {"first_kernels": [], "first_biases": []}
    for variable in model.trainable_variables:
        if variable.path.startswith("whitening/"):
            role = "whitening"
        elif variable is head:
            role = "head"
        else:
            role = "kernels" if len(variable.shape) > 1 else "biases"
            role = f"first_{role}" if first_group and variable.path.startswith(FIRST_GROUP) else role
        roles[role].append(variable.value)
    return roles
