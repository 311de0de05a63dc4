"""The training step of K towers: split, run, average, apply, report.

Until `average_gradients` the towers are independent, except in synchronized norms. Everything after
it happens once a step.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.models.keras_models import variable_values
from cifar_towers.towers import (
    Tower,
    average_gradients,
    run_micro_batches,
    run_on_towers,
    run_on_towers_synchronized,
    split_batch,
)
from cifar_towers.towers.gradients import Gradient, add_gradients, average_tensors, scale_gradient
from cifar_towers.towers.placement import HOST
from cifar_towers.training.losses import EXAMPLE_LOSS
from cifar_towers.training.state import TrainState
from cifar_towers.xla import xla_compiled


class StepMetrics(NamedTuple):
    """The numbers of one step. They are tensors in the graph, and NumPy arrays once the step has
    finished.
    """

    loss: Any  # mean of the user's loss, or of the cross entropy, over the whole batch
    accuracy: Any  # of the training batch, as augmented
    gradient_norm: Any  # of the mean gradient
    tower_losses: Any  # [K] total loss of each tower
    losses: dict[str, Any]  # of the final tower: each term of its loss, and their total
    updated: Any  # bool: the gradients were applied; otherwise the step was skipped
    stop_signal: Any = None  # of several processes: the largest signal number that any passed in


class StepGradients(NamedTuple):
    """The gradients of one step, dense; None for a variable without one."""

    mean: list  # [N] means over all towers
    towers: list[list]  # [towers of this process][N]


Value: TypeAlias = Gradient  # of a result: a gradient, or another tensor
# (batch, rates, image_size), and under `tf.distribute` on a cluster also a signal
Update: TypeAlias = Callable[..., tuple[StepMetrics, StepGradients]]


class TowerResult(NamedTuple):
    """The result of a forward and backward pass over a tower's shard, or over a part of it."""

    losses: dict[str, tf.Tensor]  # by term; see `losses.make_loss`
    gradients: list[Gradient]  # N, of the total loss, in the order of `TrainState.weights`
    non_trainable: list[tf.Tensor | None]  # S new values; None for an unchanged one
    num_correct: tf.Tensor


def make_update(
    state: TrainState,
    towers: Sequence[Tower],
    loss_fn: Callable,
    augmentation: Augmentation,
    *,
    micro_batches: int = 1,
    synchronized: bool = False,
) -> Update:
    """Return the function of one step: (batch, rates, image_size) -> (metrics, gradients).

    `rates` maps the name of each parameter group to its learning rate. `image_size` is a Python
    number of pixels that images are downsampled to, unless they are cropped; 0 leaves them as they
    are. As a `tf.function` a step is traced once for each image size.

    Args:
      loss_fn: function (labels, logits, weights, model losses) -> losses by term.
      micro_batches: number of parts that each tower takes its shard in.
      synchronized: compute batch statistics over all towers in each norm, instead of over each
        tower's shard.
    """
    tower_step = TowerStep(state, loss_fn, augmentation, micro_batches)
    run_towers = run_on_towers_synchronized if synchronized else run_on_towers

    def update(
        batch: Batch, rates: Mapping[str, tf.Tensor], image_size: int = 0
    ) -> tuple[StepMetrics, StepGradients]:
        def on_tower(tower: Tower, shard: Batch) -> TowerResult:
            return tower_step(shard, image_size)

        shards = split_batch(batch, towers)
        results = run_towers(on_tower, towers, shards)

        tower_grads = [zip(result.gradients, state.weights, strict=True) for result in results]
        averaged = average_gradients(tower_grads)  # the towers meet here

        non_trainable = average_non_trainable(results, state.non_trainable)
        tower_losses = [result.losses["total_loss"] for result in results]
        updated, gradient_norm = state.apply(averaged, non_trainable, rates, tower_losses)

        losses, num_correct = stack_results(results)
        num_examples = batch.labels.shape[0]
        metrics = make_step_metrics(losses, num_correct, num_examples, updated, gradient_norm)
        mean_gradients = [gradient for gradient, _ in averaged]
        return metrics, dense_gradients(mean_gradients, results)

    return update


# A tower's part: it only reads variables ----------------------------------------------------------


class TowerStep:
    """A tower's part of the step: augment its shard, then compute losses, gradients and new
    non-trainable values.

    With `state.jit_compile`, XLA compiles the augmentation, and the forward and backward pass. An
    augmentation that ends with a function of the user's is not compiled as a whole, as that
    function may use operations that XLA lacks.
    """

    def __init__(
        self, state: TrainState, loss_fn: Callable, augmentation: Augmentation, micro_batches: int
    ):
        self.state = state
        self.loss_fn = loss_fn
        self.augmentation = augmentation
        self.micro_batches = micro_batches

    def __call__(self, shard: Batch, image_size: int) -> TowerResult:
        """Return the result of a shard."""

        def augment(shard: Batch) -> Batch:
            return augment_shard(self.augmentation, shard, image_size)

        def accumulate(shard: Batch, weights: list, non_trainable: list) -> TowerResult:
            def on_part(part: Batch) -> TowerResult:
                return self.forward_backward(part, weights, non_trainable)

            total = run_micro_batches(on_part, shard, self.micro_batches, add_results)
            return mean_of_results(total, self.micro_batches)

        weights, non_trainable = variable_values(self.state.model)
        compile_augment = self.state.jit_compile and not self.augmentation.user_function
        augment = xla_compiled(augment, compile_augment)
        accumulate = xla_compiled(accumulate, self.state.jit_compile)

        augmented = augment(shard)
        return accumulate(augmented, weights, non_trainable)

    def forward_backward(
        self, part: Batch, weights: list[tf.Tensor], non_trainable: list[tf.Tensor]
    ) -> TowerResult:
        """Compute the result for augmented examples: a pure function."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            logits, new_values, model_losses = self.state.call(weights, non_trainable, part)
            losses = self.loss_fn(part.labels, logits, weights, model_losses)

        with tf.name_scope("backward"):
            # None for weights that the loss does not depend on
            gradients = tape.gradient(losses["total_loss"], weights)
        return TowerResult(losses, gradients, new_values, count_correct(part.labels, logits))


def augment_shard(augmentation: Augmentation, shard: Batch, image_size: int) -> Batch:
    """Return a shard with augmented images. The augmentation may change the labels too."""
    images, labels = augmentation.augment_with_labels(
        shard.images, shard.labels, shard.draws, image_size
    )
    return shard._replace(images=images, labels=labels)


def count_correct(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Return the number of examples whose largest logit is at their class; of mixed labels, at the
    class with the largest share.
    """
    classes = labels if labels.shape.rank == 1 else tf.argmax(labels, -1)
    correct = tf.equal(classes, tf.argmax(logits, -1))
    return tf.reduce_sum(tf.cast(correct, tf.float32))


# Gradient accumulation: the sum of the results of micro-batches, and their mean -------------------


def add_results(total: TowerResult, result: TowerResult) -> TowerResult:
    """Add the result of a micro-batch to the sum so far."""

    def add(old: Value, new: Value) -> Value:
        if is_integer(new):
            return new  # a counter or a seed keeps its last value
        return add_gradients(old, new)

    return tf.nest.map_structure(add, total, result)


def mean_of_results(total: TowerResult, count: int) -> TowerResult:
    """Return the result over a shard from the sum over its `count` micro-batches."""
    if count == 1:
        return total

    def divide(value: Value) -> Value:
        if is_integer(value):
            return value
        return scale_gradient(value, 1 / count)

    means = tf.nest.map_structure(divide, total)
    return means._replace(num_correct=total.num_correct)  # which is a count, no mean


def is_integer(value: Value) -> bool:
    """Return whether a value is an integer tensor; None is not."""
    return value is not None and not value.dtype.is_floating


# What the towers' results become ------------------------------------------------------------------


def average_non_trainable(
    results: Sequence[TowerResult], variables: Sequence[tf.Variable]
) -> list[tf.Tensor | None]:
    """Average the new values of S non-trainable variables over the towers, each on its variable's
    device. Integers keep the final tower's value; None stands for an unchanged one.
    """
    averaged: list[tf.Tensor | None] = []
    with tf.name_scope("average_statistics"):
        for index, variable in enumerate(variables):
            values = [result.non_trainable[index] for result in results]
            final = values[-1]
            if final is None or is_integer(final):
                averaged.append(final)
                continue
            with tf.device(variable.device):
                averaged.append(average_tensors(values))
    return averaged


def stack_results(results: Sequence[TowerResult]) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Return the losses [K] of the towers by term, and their numbers of correct examples [K]."""
    with tf.name_scope("stack_results"):
        losses = {}
        for term in results[0].losses:
            losses[term] = tf.stack([result.losses[term] for result in results])
        return losses, tf.stack([result.num_correct for result in results])


def make_step_metrics(
    losses: Mapping[str, tf.Tensor],
    num_correct: tf.Tensor,
    num_examples: int,
    updated: tf.Tensor,
    gradient_norm: tf.Tensor,
) -> StepMetrics:
    """Return the metrics of a step on so many examples, from the towers' losses [K] by term and
    their numbers of correct examples [K].
    """
    with tf.name_scope("metrics"):
        return StepMetrics(
            loss=tf.reduce_mean(losses[EXAMPLE_LOSS]),
            accuracy=tf.reduce_sum(num_correct) / num_examples,
            gradient_norm=gradient_norm,
            tower_losses=losses["total_loss"],
            losses={term: values[-1] for term, values in losses.items()},
            updated=updated,
        )


def dense_gradients(
    mean_gradients: Sequence[Gradient], results: Sequence[TowerResult]
) -> StepGradients:
    """Return the mean gradients and the towers', sparse ones as dense tensors."""

    def dense(gradients: Sequence[Gradient]) -> list[tf.Tensor | None]:
        return [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    towers = [dense(result.gradients) for result in results]
    return StepGradients(mean=dense(mean_gradients), towers=towers)


# The function that is traced ----------------------------------------------------------------------


def as_tf_function(update: Update, compile_whole: bool = False) -> Any:
    """Return an update as the `tf.function` of a step, whose metrics are copied to the host.

    With `compile_whole`, XLA compiles all of the update. This is for one tower, whose device has
    all variables.
    """
    compiled = xla_compiled(update, compile_whole)

    @functools.wraps(update)  # `tf.function` has its arguments by the signature
    def train_step(*args, **kwargs) -> tuple[StepMetrics, StepGradients]:
        metrics, gradients = compiled(*args, **kwargs)
        return copy_to_host(metrics), gradients

    return tf.function(train_step, autograph=False)


def copy_to_host(metrics: StepMetrics) -> StepMetrics:
    """Copy metrics to the host in the graph. Without this, reading each of them would be a separate
    copy from the GPU.
    """

    def copy(value: tf.Tensor | None) -> tf.Tensor | None:
        return None if value is None else tf.identity(value)

    with tf.name_scope("copy_to_host"), tf.device(HOST):
        return tf.nest.map_structure(copy, metrics)
