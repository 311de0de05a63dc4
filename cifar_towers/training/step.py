"""One update: split, run, average, apply, follow, report."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.towers import Tower, average_gradients, run_on_towers, split_batch
from cifar_towers.training.state import TrainState


class TowerResult(NamedTuple):
    """What one tower hands over: scalars {term: loss}, N x (gradient, variable), new
    statistics (None where one did not change), examples it got right."""

    losses: dict[str, tf.Tensor]
    gradients: list[tuple]
    statistics: list[tf.Tensor | None]
    correct: tf.Tensor


class StepMetrics(NamedTuple):
    """What a step says of itself. `losses` and `averages` are the final tower's, the rest is of all towers."""

    loss: tf.Tensor  # mean cross entropy
    accuracy: tf.Tensor  # of the training batch, as augmented
    gradient_norm: tf.Tensor  # of the mean gradient, all variables together
    tower_losses: tf.Tensor  # [K] total loss
    losses: dict[str, tf.Tensor]
    averages: dict[str, tf.Tensor]


def make_train_step(
    state: TrainState, towers: Sequence[Tower], loss_fn: Callable, augmentation: Augmentation
) -> Callable[..., StepMetrics]:
    """The function (batch, rates, side) -> metrics that moves `state` by one step.

    `side` is the Python number of pixels the images are shrunk to; each side is traced once.
    """

    def on_tower(side: int, tower: Tower, shard: Batch) -> TowerResult:
        images = augmentation.train(shard.images, shard.draws, side)
        weights, statistics = state.read()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            logits, new_statistics = state.model.stateless_call(weights, statistics, images, training=True)
            losses = loss_fn(shard.labels, logits, weights)
            scaled = state.loss_scale.scale_loss(losses["total_loss"])
        gradients = list(zip(tape.gradient(scaled, weights), state.weights, strict=True))
        changed = [None if new is old else new for new, old in zip(new_statistics, statistics, strict=True)]
        return TowerResult(losses, gradients, changed, count_correct(shard.labels, logits))

    @tf.function(autograph=False)
    def train_step(batch: Batch, rates: dict[str, tf.Tensor], side: int = 32) -> StepMetrics:
        shards = split_batch(batch, towers)
        results = run_on_towers(functools.partial(on_tower, side), towers, shards)

        gradients = average_gradients([r.gradients for r in results])  # the towers meet here

        gradients = state.loss_scale.unscale(gradients)
        state.apply(gradients, average_statistics([r.statistics for r in results]), rates)
        averages = state.loss_averages.update(results[-1].losses)  # the final tower speaks
        return metrics(results, gradients, averages, examples=batch.labels.shape[0])

    return train_step


def metrics(results: Sequence[TowerResult], gradients: list[tuple], averages: dict, examples: int) -> StepMetrics:
    """What K towers' results and their mean gradient say of a step over `examples` examples."""
    with tf.name_scope("metrics"):
        return StepMetrics(
            loss=tf.add_n([r.losses["cross_entropy"] for r in results]) / len(results),
            accuracy=tf.add_n([r.correct for r in results]) / examples,
            gradient_norm=tf.linalg.global_norm([g for g, _ in gradients if g is not None]),
            tower_losses=tf.stack([r.losses["total_loss"] for r in results]),
            losses=results[-1].losses,
            averages=averages,
        )


def average_statistics(tower_statistics: Sequence[Sequence[tf.Tensor | None]]) -> list[tf.Tensor | None]:
    """K lists of the same S statistics -> their S means over the towers, None where none changed."""
    with tf.name_scope("average_statistics"):
        return [
            None if of_one[0] is None else tf.add_n(list(of_one)) / len(of_one)
            for of_one in zip(*tower_statistics, strict=True)
        ]


def count_correct(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """How many of B examples have their largest logit at their label, as float32."""
    return tf.reduce_sum(tf.cast(tf.equal(labels, tf.argmax(logits, -1)), tf.float32))
