"""The results of a training step: named values, tensors in the graph and NumPy arrays after `to_numpy`."""

from typing import Any, NamedTuple

import tensorflow as tf

PROXY = "proxy"  # prefix of the proxy's variables, operations and metrics; see `step.select_hard_examples`


class StepMetrics(NamedTuple):
    """The numbers of one step, float32 unless noted: the final tower's losses by term, all else over all towers."""

    loss: Any  # mean cross entropy
    accuracy: Any  # of the training batch, as augmented
    gradient_norm: Any  # of the mean gradient over all variables, before weight decay
    tower_losses: Any  # [K] total loss
    losses: dict[str, Any]  # by term
    smoothed_losses: dict[str, Any]  # moving averages by term
    updated: Any  # bool: the variables were updated; otherwise the step was skipped
    nonfinite_towers: Any  # [K] int32: index of each tower's first non-finite value, as in `TowerResult`, or -1
    nonfinite_update: Any  # int32: index in `TrainState.update_names` of the first non-finite new value, or -1
    gradients: Any = ()  # N mean gradients, None for a variable without one
    tower_gradients: Any = ()  # for each tower of this process, its N gradients
    stop_signal: Any = None  # of several processes: the largest signal number that any of them passed in
    example_losses: Any = None  # [B], if the step was made with an `example_loss`
    hard_examples: "HardExamples | None" = None  # if only a part of the batch was trained on


class HardExamples(NamedTuple):
    """The part of a batch that was trained on."""

    rows: Any  # [count] indices into the batch, ascending
    proxy: StepMetrics  # of the proxy's step on the whole batch


def without_gradients(metrics: StepMetrics) -> StepMetrics:
    """Return the metrics without their gradients, which take the memory of several models."""
    return metrics._replace(gradients=(), tower_gradients=())


def to_numpy(values: Any) -> Any:
    """Return the same structure with NumPy arrays for tensors; None stays None."""
    return tf.nest.map_structure(lambda value: None if value is None else value.numpy(), values)
