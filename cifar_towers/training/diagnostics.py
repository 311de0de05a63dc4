"""Diagnostics: of a summary step, with NumPy, from the gradients that it returns; and why steps
were skipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.models import layers
from cifar_towers.models.keras_models import first_call, variable_values
from cifar_towers.towers import Tower
from cifar_towers.training.runner import FinishedStep
from cifar_towers.training.step import StepGradients, StepMetrics, augment_shard

NUM_EXAMPLES = 64  # whose activations are measured
NUM_IMAGES = 16  # of these, that are shown
MAX_SKIPPED_STEPS = 3  # in a row; then the run ends
NONLINEAR = tuple(
    getattr(keras.layers, name)
    for name in ("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax")
)


class StepDiagnostics(NamedTuple):
    """The diagnostics of a summary step."""

    # [n, S, S, 3] images of the final tower of this process, as the model sees them
    images: np.ndarray
    labels: np.ndarray  # [n] labels of these images
    # outputs of the `activation_layers` for the first examples of that tower
    activations: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]  # trained variables after the step
    gradients: dict[str, np.ndarray]  # mean gradients of these variables
    tower_gradient_norm: np.ndarray  # [K] norm of each tower's gradient
    # [K] cosine between each tower's gradient and the mean gradient
    tower_gradient_cosine: np.ndarray


class Diagnoser:
    """Computes the diagnostics of finished steps.

    Args:
      towers: the towers of this process.

    Attributes:
      is_compiled: whether a step was diagnosed, so that the next takes no time to be compiled.
    """

    def __init__(self, model: keras.Model, augmentation: Augmentation, towers: Sequence[Tower]):
        self.model = model
        self.augmentation = augmentation
        self.towers = towers
        self.is_compiled = False
        self._measured = activation_layers(model)
        outputs = [first_call(model, layer).output_tensors[0] for layer in self._measured]
        self._activations = keras.Model(model.input, outputs) if outputs else None

    def diagnose(self, finished: FinishedStep) -> StepDiagnostics:
        """Return the diagnostics of a step. Call it before the next step starts: it reads the
        weights.
        """
        self.is_compiled = True
        assert finished.gradients  # kept, as this is a summary step
        variables = self.model.trainable_variables
        pairs = zip(variables, finished.gradients.mean, strict=True)
        norms, cosines = tower_agreement(finished.gradients)
        shard = self._final_shard(finished)
        with tf.device(self.towers[-1].device):
            # the whole shard, as a user's function may mix its images
            augmented = augment_shard(self.augmentation, shard, finished.image_size)
        images = augmented.images[:NUM_EXAMPLES]
        activations = self._activations_of(images)
        return StepDiagnostics(
            images=_as_float32(images[:NUM_IMAGES]),
            labels=shard.labels.numpy()[:NUM_IMAGES],
            activations=activations,
            weights={variable.path: _as_float32(variable.value) for variable in variables},
            gradients={variable.path: g for variable, g in pairs if g is not None},
            tower_gradient_norm=norms,
            tower_gradient_cosine=cosines,
        )

    def _final_shard(self, finished: FinishedStep) -> Batch:
        """Return the shard of the final tower."""
        count = len(self.towers)
        start = len(finished.batch.labels) * (count - 1) // count
        return tf.nest.map_structure(lambda tensor: tensor[start:], finished.batch)

    def _activations_of(self, images: tf.Tensor) -> dict[str, np.ndarray]:
        """Return the outputs of the measured layers by name."""
        if not self._activations:
            return {}
        with tf.device(self.towers[-1].device):
            values = variable_values(self._activations)
            outputs, _ = self._activations.stateless_call(*values, images, training=True)
        outputs = tf.nest.flatten(outputs)  # a single output is no list
        pairs = zip(self._measured, outputs, strict=True)
        return {layer.name: _as_float32(output) for layer, output in pairs}


def activation_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the layers whose outputs are measured: each layer that ends in a nonlinear function,
    and the last layer.

    The list is empty for a model that is not a graph of layers.
    """
    if not getattr(model, "inputs", None) or not hasattr(model, "operations"):
        return []

    def nonlinear(layer) -> bool:
        activation = getattr(layer, "activation", None)
        return isinstance(layer, (*NONLINEAR, layers.Activation)) or activation not in (
            None,
            keras.activations.linear,
        )

    measured = [layer for layer in model.layers[:-1] if nonlinear(layer)] + model.layers[-1:]
    # a nested model has a graph of its own
    return [layer for layer in measured if not isinstance(layer, keras.Model)]


def tower_agreement(gradients: StepGradients) -> tuple[np.ndarray, np.ndarray]:
    """Return each tower's gradient norm [K], and the cosine [K] between its gradient and the mean
    gradient: 0 if one of them is 0, NaN if a number is not finite.
    """
    mean = _flatten(gradients.mean, gradients.mean)
    towers = [_flatten(tower, gradients.mean) for tower in gradients.towers]
    norms = np.array([np.linalg.norm(tower) for tower in towers])
    products = norms * np.linalg.norm(mean)
    cosines = np.array([tower @ mean for tower in towers])
    return norms, np.divide(cosines, products, out=np.zeros_like(products), where=products != 0)


def _flatten(
    gradients: Sequence[np.ndarray | None], means: Sequence[np.ndarray | None]
) -> np.ndarray:
    """Return a tower's gradients as one vector, with zeros where other towers alone have a
    gradient.
    """
    parts = []
    for gradient, mean in zip(gradients, means, strict=True):
        if mean is not None:
            present = np.zeros_like(mean) if gradient is None else gradient
            parts.append(np.ravel(present))
    return np.concatenate(parts).astype(float)


def _as_float32(values: tf.Tensor) -> np.ndarray:
    return tf.cast(values, tf.float32).numpy()


# Skipped steps ------------------------------------------------------------------------------------


class Health:
    """The number of steps that were skipped because a number was not finite.

    Attributes:
      skipped_steps: in all.
      skipped_in_a_row: the last ones.
    """

    def __init__(self, towers: Sequence[Tower]):
        self._towers = towers
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    @property
    def has_diverged(self) -> bool:
        """Whether so many steps in a row were skipped that the run ends."""
        return self.skipped_in_a_row >= MAX_SKIPPED_STEPS

    def metadata(self) -> dict[str, int]:
        """Return the counts, which checkpoints store."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's metadata."""
        self.skipped_steps = metadata["skipped_steps"]
        self.skipped_in_a_row = metadata["skipped_in_a_row"]

    def record(self, finished: FinishedStep) -> str:
        """Count a finished step; return the reason if it was skipped, otherwise an empty line."""
        if finished.metrics.updated:
            self.skipped_in_a_row = 0
            return ""
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        ends = f"{self.skipped_in_a_row} in a row; the run ends after {MAX_SKIPPED_STEPS}"
        reason = describe_nonfinite(finished.metrics, self._towers)
        return f"step {finished.step} was skipped ({ends}): {reason}"


def describe_nonfinite(metrics: StepMetrics, towers: Sequence[Tower]) -> str:
    """Name the towers whose loss is not finite in a skipped step, or the norm of its gradient."""
    losses = zip(towers, metrics.tower_losses, strict=True)
    names = [tower.name for tower, loss in losses if not np.isfinite(loss)]
    if not names:
        return "the norm of the mean gradient is not finite"
    return f"the loss of {' and '.join(names)} is not finite"
