"""The training step of K towers: split, run, average, apply, report.

Until `average_gradients` the towers are independent, except in synchronized norms. Everything after
it happens once a step.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.towers import (
    Tower,
    average_gradients,
    run_micro_batches,
    run_on_towers,
    run_on_towers_synchronized,
    split_batch,
)
from cifar_towers.towers.gradients import Gradient, average_tensors, weighted_sum
from cifar_towers.towers.placement import HOST
from cifar_towers.training.state import TrainState, xla_compiled


class StepMetrics(NamedTuple):
    """The numbers of one step. They are tensors in the graph, and NumPy arrays once the step has
    finished.
    """

    loss: Any  # mean of the user's loss, or of the cross entropy, over the whole batch
    accuracy: Any  # of the training batch, as augmented
    gradient_norm: Any  # of the mean gradient of the active groups, before weight decay
    tower_losses: Any  # [K] total loss
    losses: dict[str, Any]  # by term, of the final tower only
    updated: Any  # bool: the gradients were applied; otherwise the step was skipped
    gradients: Any = ()  # N mean gradients, None for a variable without one
    tower_gradients: Any = ()  # for each tower of this process, its N gradients
    stop_signal: Any = None  # of several processes: the largest signal number that any passed in


class TowerResult(NamedTuple):
    """The result of a forward and backward pass over a tower's shard, or over a part of it."""

    losses: dict[str, tf.Tensor]  # means over the examples, by term
    gradients: list[tf.Tensor | None]  # N, of the total loss, in the order of `TrainState.weights`
    statistics: list[tf.Tensor | None]  # new non-trainable values; None for an unchanged one
    num_correct: tf.Tensor


Update = Callable[..., StepMetrics]  # (batch, rates, image_size) -> metrics


def make_update(
    state: TrainState,
    towers: Sequence[Tower],
    loss_fn: Callable,
    augmentation: Augmentation,
    *,
    micro_batches: int = 1,
    synchronized: bool = False,
) -> Update:
    """Return the function of one step: (batch, rates, image_size) -> metrics.

    Its `rates` are the learning rates of the active parameter groups; no gradients are taken for
    the other groups. Its `image_size` is a Python number of pixels that images are downsampled to;
    0 leaves them as they are. As a `tf.function` it is traced once for each set of groups and each
    image size.

    Args:
      loss_fn: function (labels, logits, weights, layer losses) -> losses by term.
      micro_batches: number of parts that each tower takes its shard in.
      synchronized: compute batch statistics over all towers in each norm, instead of over each
        tower's shard.
    """
    train_on_tower = make_tower_fn(state, loss_fn, augmentation, micro_batches)
    run_towers = run_on_towers_synchronized if synchronized else run_on_towers

    def update(batch: Batch, rates: Mapping[str, tf.Tensor], image_size: int = 0) -> StepMetrics:
        def on_tower(tower: Tower, shard: Batch) -> TowerResult:
            return train_on_tower(shard, tuple(rates), image_size)

        results = run_towers(on_tower, towers, split_batch(batch, towers))

        tower_grads = [zip(r.gradients, state.weights, strict=True) for r in results]
        gradients = average_gradients(tower_grads)  # the towers meet here

        statistics = average_statistics([r.statistics for r in results], state.non_trainable)
        losses = stack_losses(results)
        updated, gradient_norm = state.apply(gradients, statistics, rates, all_finite(losses))

        num_correct = tf.add_n([result.num_correct for result in results])
        accuracy = num_correct / batch.labels.shape[0]
        metrics = make_step_metrics(losses, accuracy, updated, gradient_norm)
        return metrics._replace(
            gradients=as_tensors([gradient for gradient, _ in gradients]),
            tower_gradients=[as_tensors(result.gradients) for result in results],
        )

    return update


# A tower's part: it only reads variables ----------------------------------------------------------


def make_tower_fn(
    state: TrainState, loss_fn: Callable, augmentation: Augmentation, micro_batches: int
) -> Callable[..., TowerResult]:
    """Return the function (shard, groups, image_size) -> TowerResult of every tower.

    With `state.jit_compile`, XLA compiles it. If the augmentation has a function of the user's,
    which may use operations that XLA lacks, all of the augmentation runs before, uncompiled.
    """

    def train_on_tower(shard: Batch, groups: Collection[str], image_size: int) -> TowerResult:
        weights, statistics = state.read_variables()
        if augmentation.own:
            shard = augment_shard(augmentation, shard, image_size)
            train = functools.partial(train_on_images, groups=groups)
        else:
            train = functools.partial(augment_and_train, groups=groups, image_size=image_size)
        return xla_compiled(train, state.jit_compile)(shard, weights, statistics)

    def augment_and_train(
        shard: Batch, weights: list, statistics: list, groups: Collection[str], image_size: int
    ) -> TowerResult:
        shard = augment_shard(augmentation, shard, image_size)
        return train_on_images(shard, weights, statistics, groups)

    def train_on_images(
        shard: Batch, weights: list, statistics: list, groups: Collection[str]
    ) -> TowerResult:
        def on_part(part: Batch) -> TowerResult:
            return forward_backward(state, loss_fn, groups, part, weights, statistics)

        total = run_micro_batches(on_part, shard, micro_batches, add_results)
        if micro_batches == 1:
            return total
        return mean_of_results(total, micro_batches)

    return train_on_tower


def augment_shard(augmentation: Augmentation, shard: Batch, image_size: int) -> Batch:
    """Return a shard with augmented images. The augmentation may change the labels too."""
    images, labels = augmentation.augment_with_labels(
        shard.images, shard.labels, shard.draws, image_size
    )
    return shard._replace(images=images, labels=labels)


def forward_backward(
    state: TrainState,
    loss_fn: Callable,
    groups: Collection[str],
    part: Batch,
    weights: list[tf.Tensor],
    statistics: list[tf.Tensor],
) -> TowerResult:
    """Compute losses, gradients and new statistics from augmented examples: a pure function.

    Gradients are taken for the weights of the given parameter groups only.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(state.weights_of_groups(weights, groups))
        logits, new_statistics, layer_losses = state.call(weights, statistics, part)
        losses = loss_fn(part.labels, logits, weights, layer_losses)
    with tf.name_scope("backward"):
        gradients = tape.gradient(losses["total_loss"], weights)

    labels = part.labels
    classes = labels if labels.shape.rank == 1 else tf.argmax(labels, -1)  # the most likely ones
    correct = tf.equal(classes, tf.argmax(logits, -1))
    num_correct = tf.reduce_sum(tf.cast(correct, tf.float32))
    return TowerResult(losses, gradients, new_statistics, num_correct)


# Gradient accumulation: the sum of the results of micro-batches, and their mean -------------------


def add_results(total: TowerResult, result: TowerResult) -> TowerResult:
    """Add the result of a micro-batch to the sum so far. Integer statistics keep the last value."""
    losses = {term: total.losses[term] + loss for term, loss in result.losses.items()}
    gradients = []
    for old, new in zip(total.gradients, result.gradients, strict=True):
        gradients.append(add_gradients(old, new))
    statistics = []
    for old, new in zip(total.statistics, result.statistics, strict=True):
        statistics.append(old + new if is_float(old) and is_float(new) else new)
    return TowerResult(losses, gradients, statistics, total.num_correct + result.num_correct)


def mean_of_results(total: TowerResult, count: int) -> TowerResult:
    """Return the result over a shard from the sum over its `count` micro-batches."""
    losses = {term: loss / count for term, loss in total.losses.items()}
    gradients = [weighted_sum([sums], [1 / count], device="") for sums in total.gradients]
    statistics = [value / count if is_float(value) else value for value in total.statistics]
    return TowerResult(losses, gradients, statistics, total.num_correct)


def add_gradients(old: Gradient, new: Gradient) -> Gradient:
    """Return the sum of two gradients, each of which may be None or sparse."""
    return weighted_sum((old, new), (1.0, 1.0), device="")


def is_float(value: tf.Tensor | None) -> TypeGuard[tf.Tensor]:
    """Return whether a value is there and floating."""
    return value is not None and value.dtype.is_floating


# What the towers' results become ------------------------------------------------------------------


def average_statistics(
    tower_values: Sequence[Sequence[tf.Tensor | None]], variables: Sequence[tf.Variable]
) -> list[tf.Tensor | None]:
    """Average the new values of S non-trainable variables over the towers, on the variable's
    device. Integers keep the final tower's value; None stands for an unchanged one.
    """
    averaged: list[tf.Tensor | None] = []
    with tf.name_scope("average_statistics"):
        for variable, *values in zip(variables, *tower_values, strict=True):
            if not is_float(values[-1]):
                averaged.append(values[-1])
                continue
            with tf.device(variable.device):
                averaged.append(average_tensors(values))
    return averaged


def stack_losses(results: Sequence[TowerResult]) -> dict[str, tf.Tensor]:
    """Return the losses [K] of the towers by term."""
    with tf.name_scope("metrics"):
        return {
            term: tf.stack([result.losses[term] for result in results])
            for term in results[0].losses
        }


def all_finite(losses: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Return whether the total losses [K] of all towers are finite."""
    return tf.reduce_all(tf.math.is_finite(losses["total_loss"]))


def make_step_metrics(
    losses: Mapping[str, tf.Tensor],
    accuracy: tf.Tensor,
    updated: tf.Tensor,
    gradient_norm: tf.Tensor,
) -> StepMetrics:
    """Return the metrics of a step, without gradients, from the losses [K] by term."""
    with tf.name_scope("metrics"):
        metrics = StepMetrics(
            loss=tf.reduce_mean(losses["cross_entropy"]),
            accuracy=accuracy,
            gradient_norm=gradient_norm,
            tower_losses=losses["total_loss"],
            losses={term: values[-1] for term, values in losses.items()},
            updated=updated,
        )
    return copy_to_host(metrics)


def copy_to_host(metrics: StepMetrics) -> StepMetrics:
    """Copy all metrics except gradients to the host in the graph. Without this, reading each of
    them would be a separate copy from the GPU.
    """
    scalars = without_gradients(metrics)
    with tf.name_scope("metrics"), tf.device(HOST):
        copies = tf.nest.map_structure(
            lambda value: None if value is None else tf.identity(value), scalars
        )
    return copies._replace(gradients=metrics.gradients, tower_gradients=metrics.tower_gradients)


def without_gradients(metrics: StepMetrics) -> StepMetrics:
    """Return the metrics without their gradients, which take the memory of several models."""
    return metrics._replace(gradients=(), tower_gradients=())


def as_tensors(gradients: Sequence[Any]) -> list[tf.Tensor | None]:
    """Return gradients as dense tensors."""
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def compile_whole(update: Update) -> Update:
    """Return an update as one function compiled by XLA. There must be one tower, with all variables
    on its device.
    """
    compiled = xla_compiled(update, jit_compile=True)

    def compiled_update(
        batch: Batch, rates: Mapping[str, tf.Tensor], image_size: int = 0
    ) -> StepMetrics:
        return copy_to_host(compiled(batch, rates, image_size))

    return compiled_update
