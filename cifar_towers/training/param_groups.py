"""Parameter groups by role: kernels, biases, the head and whitening filters, and the learning rate of each."""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf


class RoleSchedule(NamedTuple):
    """The learning rate of a role: `peak_rate` times a factor of the step, until it is frozen."""

    peak_rate: float
    factor: Callable[[int], float]
    frozen_from_step: float = math.inf

    def learning_rate(self, step: int) -> float:
        """The rate of the update from `step` to `step + 1`."""
        return self.peak_rate * self.factor(step)


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
