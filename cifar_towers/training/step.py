"""One training step: split, run, average, apply, report."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import keras
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
from cifar_towers.towers.gradients import average_tensors, weighted_sum
from cifar_towers.towers.keras_parallel import to_scalar
from cifar_towers.towers.pipeline import Stage, staged_call
from cifar_towers.towers.placement import HOST
from cifar_towers.training.results import PROXY, HardExamples, StepMetrics, without_gradients
from cifar_towers.training.state import TrainState, UpdateResult, first_nonfinite_index

Update = Callable[..., StepMetrics]  # (batch, learning_rates, image_size=0) -> metrics


class TowerResult(NamedTuple):
    """The result of a tower on its shard, or on one micro-batch of the shard."""

    losses: dict[str, tf.Tensor]  # scalars by term
    gradients: list[tf.Tensor | None]  # N, in the order of `TrainState.weights`
    non_trainable: list[tf.Tensor | None]  # new values; None for an unchanged one
    num_correct: tf.Tensor
    nonfinite_index: tf.Tensor | None = None  # of a shard: first non-finite of (*losses, *reversed(gradients)), or -1
    example_losses: tf.Tensor | None = None  # one for each example, if there is an `example_loss`


def make_update(
    state: TrainState,
    towers: Sequence[Tower],
    loss_fn: Callable,
    augmentation: Augmentation,
    *,
    micro_batches: int = 1,
    synchronized: bool = False,
    stages: Sequence[Stage] = (),
    example_loss: Callable | None = None,
) -> Update:
    """Return the function of one step on `state`: (batch, learning_rates, image_size=0) -> metrics.

    As a `tf.function` it is traced once for each set of active parameter groups and each image size.

    Args of the returned function:
      learning_rates: by active parameter group; no gradients are taken for the other groups.
      image_size: a Python number of pixels that images are downsampled to; 0 leaves them as they are.

    Args:
      micro_batches: number of parts that each tower takes its shard in.
      synchronized: compute batch statistics over all towers in each norm, instead of over each tower's shard.
      stages: the model cut over several devices, for one tower; they work on different micro-batches at a time.
      example_loss: (labels, logits) -> [B] losses to return in the metrics.
    """
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches, stages, example_loss)
    run = run_on_towers_synchronized if synchronized else run_on_towers
    devices = [variable.device for variable in state.non_trainable]

    def update(batch: Batch, learning_rates, image_size: int = 0) -> StepMetrics:
        def on_tower(tower: Tower, shard: Batch) -> TowerResult:
            return tower_fn(tower, shard, learning_rates.keys(), image_size)

        results = run(on_tower, towers, split_batch(batch, towers))

        gradients = average_gradients([zip(r.gradients, state.weights, strict=True) for r in results])  # they meet here

        non_trainable = reduce_batch_stats([r.non_trainable for r in results], devices)
        updated = state.apply(gradients, non_trainable, results[-1].losses, learning_rates, all_finite(results))
        return make_step_metrics(results, gradients, updated, batch.labels.shape[0])

    return update


def make_tower_fn(
    state: TrainState,
    loss_fn: Callable,
    augmentation: Augmentation,
    micro_batches: int = 1,
    stages: Sequence[Stage] = (),
    example_loss: Callable | None = None,
) -> Callable[..., TowerResult]:
    """Return the function (tower, shard, active_groups, image_size=0) of every tower.

    The function takes the gradients of the parameter groups in `active_groups`. It only reads variables.
    """
    forward = staged_call(stages, state.model) if stages else training_call(state.model)

    def tower_fn(tower: Tower, shard: Batch, active_groups: Collection[str], image_size: int = 0) -> TowerResult:
        weights, old_values = state.read_variables()  # once for all micro-batches: they travel to the tower
        active = {id(variable) for variable in state.optimizer.active_variables(active_groups)}
        sums: list = []  # of the gradients so far: those of one part at a time are in memory besides

        def on_part(part: Batch) -> TowerResult:
            """Compute losses, gradients and new values from a micro-batch."""
            non_trainable = state.with_layer_seeds(old_values, part.draws)
            images, labels = augmentation.augment_with_labels(part.images, part.labels, part.draws, image_size)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                pairs = zip(weights, state.weights, strict=True)
                tape.watch([weight for weight, variable in pairs if id(variable) in active])
                logits, new_values, *model_losses = forward(weights, non_trainable, images)
                losses = loss_fn(labels, logits, weights, model_losses)
            with tf.name_scope("backward"):
                gradients = tape.gradient(losses["total_loss"], weights)
                if micro_batches > 1 and not stages:
                    pairs = zip(sums or [None] * len(weights), gradients, strict=True)
                    gradients = [weighted_sum(pair, (1.0, 1.0), tower.device) for pair in pairs]
                    sums[:] = gradients
            classes = labels if labels.shape.rank == 1 else tf.argmax(labels, -1)  # the most likely ones
            changes = zip(new_values, non_trainable, state.is_seed, strict=True)
            return TowerResult(
                losses=losses,
                gradients=gradients,
                non_trainable=[None if seed or new is old else new for new, old, seed in changes],
                num_correct=tf.reduce_sum(tf.cast(tf.equal(classes, tf.argmax(logits, -1)), tf.float32)),
                example_losses=example_loss(labels, logits) if example_loss else None,
            )

        results = run_micro_batches(on_part, shard, micro_batches, sequential=not stages)
        return _combine_micro_batches(results, state.weights, tower.device, pipelined=bool(stages))

    return tower_fn


def training_call(model: keras.Model) -> Callable:
    """Return a training call of the model, with the losses that the model adds.

    The call is (weights, non_trainable, images) -> (logits, new non-trainable values, *losses).
    """
    trainable, frozen = model.trainable_variables, model.non_trainable_variables

    def call(weights, non_trainable, images):
        values = zip([*trainable, *frozen], [*weights, *non_trainable], strict=True)
        losses: list[tf.Tensor] = []
        with keras.StatelessScope(values, collect_losses=True) as scope:
            scope.add_loss = losses.append  # each call of a layer removes those of its last call from `scope.losses`
            logits = model.call(images, training=True)
            losses += model.losses  # of weights
        return logits, [scope.get_current_value(variable) for variable in frozen], *map(to_scalar, losses)

    return call


def _combine_micro_batches(
    results: Sequence[TowerResult], weights: Sequence[tf.Variable], device: str, pipelined: bool
) -> TowerResult:
    """Combine the results of a tower's micro-batches on `device`.

    With stages, gradients are averaged beside the variables. Otherwise the last result has their sum.
    """
    losses = {term: average_tensors([r.losses[term] for r in results]) for term in results[0].losses}
    parts = [r.gradients for r in results]
    if not pipelined and len(parts) > 1:
        parts = [[weighted_sum([gradient], [1 / len(parts)], device) for gradient in parts[-1]]]
    part_grads = [list(zip(part, weights, strict=True)) for part in parts]
    gradients = [gradient for gradient, _ in average_gradients(part_grads)]  # which leaves a single list as it is
    devices = [variable.device if pipelined else device for variable in reversed(weights)]
    return TowerResult(
        losses=losses,
        gradients=gradients,
        non_trainable=reduce_batch_stats([r.non_trainable for r in results]),
        num_correct=tf.add_n([r.num_correct for r in results]),
        nonfinite_index=first_nonfinite_index(
            [*losses.values(), *reversed(gradients)], [device] * len(losses) + devices
        ),
        example_losses=_concat_example_losses(results),
    )


def all_finite(results: Sequence[TowerResult]) -> tf.Tensor:
    """Return whether all losses and gradients of K towers are finite."""
    return tf.reduce_all(tf.stack([r.nonfinite_index for r in results]) < 0)


def reduce_batch_stats(
    tower_values: Sequence[Sequence[tf.Tensor | None]], devices: Sequence[str] = ()
) -> list[tf.Tensor | None]:
    """Reduce K lists of new values for the same S non-trainable variables to one list; None where none changed.

    A float value becomes the mean. An integer value becomes the final tower's. If `devices` are given, mean i is
    computed on `devices[i]`.
    """
    reduced = []
    with tf.name_scope("average_statistics"):
        for index, values in enumerate(zip(*tower_values, strict=True)):
            with tf.device(devices[index] if devices else ""):
                averaged = values[-1] is not None and values[-1].dtype.is_floating
                reduced.append(average_tensors(values) if averaged else values[-1])
    return reduced


def make_step_metrics(
    results: Sequence[TowerResult], gradients: Sequence[tuple], update: UpdateResult, num_examples: int
) -> StepMetrics:
    """Return the metrics of a step over `num_examples` examples; `gradients` are N x (mean gradient, variable)."""
    with tf.name_scope("metrics"):
        metrics = StepMetrics(
            loss=average_tensors([r.losses["cross_entropy"] for r in results]),
            accuracy=tf.add_n([r.num_correct for r in results]) / num_examples,
            gradient_norm=update.gradient_norm,
            tower_losses=tf.stack([r.losses["total_loss"] for r in results]),
            losses=results[-1].losses,
            smoothed_losses=update.smoothed_losses,
            updated=update.updated,
            nonfinite_towers=tf.stack([r.nonfinite_index for r in results]),
            nonfinite_update=update.nonfinite_index,
            example_losses=_concat_example_losses(results),
        )
        with tf.device(HOST):  # the graph copies them; otherwise reading would copy them from a GPU one by one
            metrics = tf.nest.map_structure(lambda value: None if value is None else tf.identity(value), metrics)
    return metrics._replace(
        gradients=_as_tensors([gradient for gradient, _ in gradients]),
        tower_gradients=[_as_tensors(r.gradients) for r in results],
    )


def _as_tensors(gradients: Sequence) -> list[tf.Tensor | None]:
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def _concat_example_losses(results: Sequence[TowerResult]) -> tf.Tensor | None:
    losses = [r.example_losses for r in results]
    return None if losses[0] is None else tf.concat(losses, 0)


def select_hard_examples(update: Update, proxy_update: Update, count: int) -> Update:
    """Return an update on the `count` hardest examples of each batch: those with the highest losses by the proxy.

    The proxy is a small net that trains on the whole batch, on the same towers, before each step of the large net. K
    towers select the same examples as one tower does, except where losses are nearly equal, and except for batch norm,
    which sees one tower's share. Of equal losses the first counts as the highest. Both nets get the same learning
    rates, so a parameter group of the proxy that the large net lacks is frozen. `make_update` makes both updates, that
    of the proxy with an `example_loss`.

    Source: K. Jordan's CIFAR-10 records of 2024 (airbench96). There a separate run of the proxy selects the harder half
    of every batch first, and the proxy is updated at every fourth batch only.
    """

    def update_both(batch: Batch, learning_rates, image_size: int = 0) -> StepMetrics:
        with tf.name_scope(PROXY):
            proxy = proxy_update(batch, learning_rates, image_size)
        with tf.name_scope("hardest"), tf.device(HOST):
            rows = tf.sort(tf.math.top_k(proxy.example_losses, count, sorted=False).indices)
            selected = gather_rows(batch, rows)
        metrics = update(selected, learning_rates, image_size)
        return metrics._replace(
            hard_examples=HardExamples(rows, without_gradients(proxy._replace(example_losses=None)))
        )

    return update_both


def gather_rows(batch: Batch, rows: tf.Tensor) -> Batch:
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)
