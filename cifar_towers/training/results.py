"""The results of a training step: named values, tensors in the graph and NumPy arrays after `to_numpy`."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cifar_towers.multi_worker.cluster_spec import Workers

NUM_BUCKETS = 30  # of a histogram
PROXY = "proxy"  # prefix of the proxy's variables, operations and metrics; see `step.select_hard_examples`


class TensorStats(NamedTuple):
    """Statistics of N tensors, in which non-finite values count as 0."""

    min: Any  # [N]
    max: Any  # [N]
    zero_fraction: Any  # [N]
    norm: Any  # [N]
    counts: Any  # [N, NUM_BUCKETS] values in equal buckets from min to max


class StepDiagnostics(NamedTuple):
    """The diagnostics of a summary step. The graph returns zeros in other steps, and `StepRunner` drops them."""

    images: Any  # [n, S, S, 3] first images of the final tower, as the model sees them
    labels: Any  # [n] labels of these images
    activations: TensorStats  # of the L layers of `diagnostics.activation_layers`, on the final tower
    tower_gradient_norm: Any  # [K] norm of each tower's gradient, times the loss scale
    tower_gradient_cosine: Any  # [K] cosine between each tower's gradient and the mean gradient
    weights: TensorStats  # of the N trained variables, before the update
    gradients: TensorStats  # of the N mean gradients
    update_norm: Any  # [N] norm of each variable's change


class StepMetrics(NamedTuple):
    """Scalars of one step, float32 unless noted: the final tower's losses by term, everything else over all towers."""

    loss: Any  # mean cross entropy
    accuracy: Any  # of the training batch, as augmented
    gradient_norm: Any  # of the mean gradient over all variables, unscaled, before weight decay
    tower_losses: Any  # [K] total loss
    losses: dict[str, Any]  # by term
    smoothed_losses: dict[str, Any]  # moving averages by term
    updated: Any  # bool: the variables were updated; otherwise the step was skipped
    nonfinite_towers: Any  # [K] int32: index of each tower's first non-finite value, as in `TowerResult`, or -1
    nonfinite_update: Any  # int32: index in `TrainState.update_names` of the first non-finite new value, or -1
    loss_scale: Any  # of this step
    diagnostics: StepDiagnostics | None = None
    stop_signal: Any = None  # of several processes: the largest signal number that any of them passed in
    original: Any = None  # of a verified step: `step.to_bytes` of the tower whose work was repeated
    example_losses: Any = None  # [B], if the step was made with an `example_loss`
    hard_examples: "HardExamples | None" = None  # if only a part of the batch was trained on


class HardExamples(NamedTuple):
    """The part of a batch that was trained on."""

    rows: Any  # [count] indices into the batch, ascending
    proxy: StepMetrics  # of the proxy's step on the whole batch


def to_numpy(values: Any) -> Any:
    """Return the same structure with NumPy arrays for tensors; None stays None."""
    return tf.nest.map_structure(lambda value: None if value is None else value.numpy(), values)


def gather_diagnostics(workers: Workers, metrics: StepMetrics) -> StepMetrics:
    """Return a step's metrics with the diagnostics of all workers.

    They are the gradient statistics of every tower, and the forward pass of the final one.
    """
    if not metrics.diagnostics:
        return metrics
    own = metrics.diagnostics
    forward = (own.images, own.labels, own.activations) if workers.index == workers.size - 1 else None
    gathered = workers.gather((own.tower_gradient_norm, own.tower_gradient_cosine, forward))
    norms, cosines, forwards = zip(*gathered, strict=True)
    images, labels, activations = forwards[-1]
    diagnostics = own._replace(
        images=images,
        labels=labels,
        activations=activations,
        tower_gradient_norm=np.concatenate(norms),
        tower_gradient_cosine=np.concatenate(cosines),
    )
    return metrics._replace(diagnostics=diagnostics)
