"""One training step: split, run, average, apply, report."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

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
from cifar_towers.towers.gradients import weighted_mean, weighted_sum
from cifar_towers.towers.keras_parallel import first_call, to_scalar
from cifar_towers.towers.pipeline import Stage, staged_call
from cifar_towers.towers.placement import HOST
from cifar_towers.training.diagnostics import activation_layers, forward_diagnostics, tower_gradient_stats
from cifar_towers.training.results import PROXY, HardExamples, StepDiagnostics, StepMetrics
from cifar_towers.training.state import TrainState, UpdateResult, first_nonfinite_index

Update = Callable[..., StepMetrics]  # (batch, learning_rates, image_size=0, collect_diagnostics=None) -> metrics


class TowerResult(NamedTuple):
    """The result of a tower on its shard, or on one micro-batch of the shard."""

    losses: dict[str, tf.Tensor]  # scalars by term
    gradients: list[tf.Tensor | None]  # N, of the scaled loss, in the order of `TrainState.weights`
    non_trainable: list[tf.Tensor | None]  # new values; None for an unchanged one
    num_correct: tf.Tensor
    nonfinite_index: tf.Tensor | None = None  # of a shard: first non-finite of (*losses, *reversed(gradients)), or -1
    diagnostics: Any = None  # as `forward_diagnostics` returns them
    example_losses: tf.Tensor | None = None  # one for each example, if there is an `example_loss`


def make_update(
    state: TrainState,
    towers: Sequence[Tower],
    loss_fn: Callable,
    augmentation: Augmentation,
    *,
    micro_batches: int = 1,
    batch_statistics: str = "mean",
    gradient_device: str = "",
    stages: Sequence[Stage] = (),
    example_loss: Callable | None = None,
    load_images: Callable[[Batch, str], Batch] | None = None,
) -> Update:
    """Return the function of one step on `state`: (batch, learning_rates, image_size=0, collect_diagnostics=None).

    As a `tf.function` it is traced once for each set of active parameter groups and each image size.

    Args of the returned function:
      learning_rates: by active parameter group; no gradients are taken for the other groups.
      image_size: a Python number of pixels that images are downsampled to; 0 leaves them as they are.
      collect_diagnostics: [] bool; without it the graph has no diagnostics.
      repeat: (owner, other), indices of towers. The variables stay unchanged: tower `other` computes the shard of tower
        `owner`. Returns the result's bytes and a dummy number, which keeps the graph from being pruned.
      expected: (owner, bytes that `repeat` gave). The step is skipped unless `owner` computes the same bytes.

    Args:
      micro_batches: number of parts that each tower takes its shard in.
      batch_statistics: `mean` over the towers, the `final` tower's, or `synchronized`: computed over all towers in
        each norm. With `synchronized`, other non-trainable values are reduced as with `mean`.
      gradient_device: device on which gradients are averaged; beside each variable if empty.
      stages: the model cut over several devices, for one tower; they work on different micro-batches at a time.
      example_loss: (labels, logits) -> [B] losses to return in the metrics.
      load_images: `Batches.load_images`, for batches without images.
    """
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches, stages, example_loss, load_images)
    synchronized = batch_statistics == "synchronized"
    devices = [variable.device for variable in state.non_trainable]

    def update(batch: Batch, learning_rates, image_size: int = 0, collect_diagnostics=None, repeat=(), expected=None):
        def on_tower(tower: Tower, shard: Batch, owner: Tower | None = None) -> TowerResult:
            collect = collect_diagnostics if (owner or tower) == towers[-1] else None
            return tower_fn(tower, shard, learning_rates.keys(), image_size, collect)

        if repeat:
            return repeat_shard(on_tower, towers, repeat, batch)
        run = run_on_towers_synchronized if synchronized else run_on_towers
        results = run(on_tower, towers, split_batch(batch, towers))

        tower_grads = [zip(r.gradients, state.weights, strict=True) for r in results]
        gradients = average_gradients(tower_grads, device=gradient_device)  # the towers meet here

        tower_stats = None
        if collect_diagnostics is not None:
            tower_stats = tower_gradient_stats(collect_diagnostics, [r.gradients for r in results], gradients)
        non_trainable = reduce_batch_stats([r.non_trainable for r in results], batch_statistics, devices)
        losses, finite, original = results[-1].losses, all_finite(results), None
        if expected is not None:
            original = tf.switch_case(expected[0], [functools.partial(to_bytes, result) for result in results])
            finite = tf.logical_and(finite, tf.reduce_all(original == expected[1]))
        updated = state.apply(gradients, non_trainable, losses, learning_rates, finite, collect_diagnostics)
        metrics = make_step_metrics(results, updated, tower_stats, batch.labels.shape[0])
        return metrics._replace(original=original)

    return update


def repeat_shard(
    on_tower: Callable[..., TowerResult],
    towers: Sequence[Tower],
    repeat: tuple[int, int],
    batch: Batch,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the shard of one tower on another, for `repeat` (owner, other); return its bytes and a dummy number.

    See `make_update`.
    """
    owner, other = (towers[index] for index in repeat)
    with tf.device(other.device), tf.name_scope("repetition"):
        result = on_tower(other, split_batch(batch, towers)[owner.index], owner)
        # use every result, as a normal step does: TensorFlow optimizes an operation together with its consumers
        rest = [tf.reduce_sum(tf.cast(t, tf.float32)) for t in tf.nest.flatten(result[2:]) if t is not None]
        return to_bytes(result), tf.add_n(rest)


def to_bytes(result: TowerResult) -> tf.Tensor:
    """Return the bits of a tower's losses and gradients as strings; empty where there is no gradient."""
    tensors = [*result.losses.values(), *result.gradients]
    with tf.device(HOST):
        return tf.stack(["" if tensor is None else tf.io.serialize_tensor(tensor) for tensor in tensors])


def make_tower_fn(
    state: TrainState,
    loss_fn: Callable,
    augmentation: Augmentation,
    micro_batches: int = 1,
    stages: Sequence[Stage] = (),
    example_loss: Callable | None = None,
    load_images: Callable[[Batch, str], Batch] | None = None,
) -> Callable[..., TowerResult]:
    """Return the function (tower, shard, active_groups, image_size=0, collect_diagnostics=None) of every tower.

    The function takes the gradients of the parameter groups in `active_groups`. It only reads variables.
    """
    forward = staged_call(stages, state.model) if stages else stateless_call_with_activations(state.model)

    def tower_fn(
        tower: Tower, shard: Batch, active_groups: Collection[str], image_size: int = 0, collect_diagnostics=None
    ) -> TowerResult:
        weights, old_values = state.read_variables()  # once for all micro-batches: they travel to the tower
        active = {id(variable) for variable in state.optimizer.active_variables(active_groups)}
        sums: list = []  # of the gradients so far: those of one part at a time are in memory besides

        def on_part(part: Batch) -> TowerResult:
            """Compute losses, gradients and new values from a micro-batch."""
            part = load_images(part, tower.device) if load_images else part
            non_trainable = state.with_layer_seeds(old_values, part.draws)
            images, labels = augmentation.augment_with_labels(part.images, part.labels, part.draws, image_size)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                pairs = zip(weights, state.weights, strict=True)
                tape.watch([weight for weight, variable in pairs if id(variable) in active])
                logits, new_values, activations, *model_losses = forward(weights, non_trainable, images)
                losses = loss_fn(labels, logits, weights, model_losses)
                scaled_loss = state.loss_scale.scale_loss(losses["total_loss"])
            with tf.name_scope("backward"):
                gradients = tape.gradient(scaled_loss, weights)
                if micro_batches > 1 and not stages:
                    pairs = zip(sums or [None] * len(weights), gradients, strict=True)
                    gradients = [weighted_sum(pair, (1.0, 1.0), tower.device) for pair in pairs]
                    sums[:] = gradients
            diagnostics = None
            if collect_diagnostics is not None:
                diagnostics = forward_diagnostics(collect_diagnostics, images, part.labels, activations)
            classes = labels if labels.shape.rank == 1 else tf.argmax(labels, -1)  # the most likely ones
            changes = zip(new_values, non_trainable, state.is_seed, strict=True)
            return TowerResult(
                losses=losses,
                gradients=gradients,
                non_trainable=[None if seed or new is old else new for new, old, seed in changes],
                num_correct=tf.reduce_sum(tf.cast(tf.equal(classes, tf.argmax(logits, -1)), tf.float32)),
                diagnostics=diagnostics,
                example_losses=example_loss(labels, logits) if example_loss else None,
            )

        results = run_micro_batches(on_part, shard, micro_batches, sequential=not stages)
        return _combine_micro_batches(results, state.weights, tower.device, pipelined=bool(stages))

    return tower_fn


def stateless_call_with_activations(model: keras.Model) -> Callable:
    """Return a training call of the model that also returns the outputs of its `activation_layers`.

    The call is (weights, non_trainable, images) -> (logits, new non-trainable values, list of outputs, *losses), with
    the losses that the model adds.
    """
    measured = activation_layers(model)
    outputs = [first_call(model, layer).output_tensors[0] for layer in measured]
    with_activations = keras.Model(model.input, [model.output, *outputs]) if measured else model
    trainable, frozen = with_activations.trainable_variables, with_activations.non_trainable_variables

    def call(weights, non_trainable, images):
        values = zip([*trainable, *frozen], [*weights, *non_trainable], strict=True)
        losses: list[tf.Tensor] = []
        with keras.StatelessScope(values, collect_losses=True) as scope:
            scope.add_loss = losses.append  # each call of a layer removes those of its last call from `scope.losses`
            outputs = with_activations.call(images, training=True)
            losses += with_activations.losses  # of weights
        logits, *activations = outputs if measured else [outputs]
        new_values = [scope.get_current_value(variable) for variable in frozen]
        return logits, new_values, activations, *map(to_scalar, losses)

    return call


def _combine_micro_batches(
    results: Sequence[TowerResult], weights: Sequence[tf.Variable], device: str, pipelined: bool
) -> TowerResult:
    """Combine the results of a tower's micro-batches on `device`.

    With stages, gradients are averaged beside the variables. Otherwise the last result has their sum.
    """
    losses = {term: weighted_mean([r.losses[term] for r in results]) for term in results[0].losses}
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
        diagnostics=results[-1].diagnostics,
        example_losses=_concat_example_losses(results),
    )


def all_finite(results: Sequence[TowerResult]) -> tf.Tensor:
    """Return whether all losses and gradients of K towers are finite."""
    return tf.reduce_all(tf.stack([r.nonfinite_index for r in results]) < 0)


def reduce_batch_stats(
    tower_values: Sequence[Sequence[tf.Tensor | None]],
    batch_statistics: str = "mean",
    devices: Sequence[str] = (),
) -> list[tf.Tensor | None]:
    """Reduce K lists of new values for the same S non-trainable variables to one list; None where none changed.

    A float value becomes the mean. An integer value becomes the final tower's, as does every value with
    `batch_statistics="final"`. If `devices` are given, mean i is computed on `devices[i]`.
    """
    if batch_statistics == "final":
        return list(tower_values[-1])
    reduced = []
    with tf.name_scope("average_statistics"):
        for index, values in enumerate(zip(*tower_values, strict=True)):
            with tf.device(devices[index] if devices else ""):
                averaged = values[-1] is not None and values[-1].dtype.is_floating
                reduced.append(weighted_mean(values) if averaged else values[-1])
    return reduced


def make_step_metrics(
    results: Sequence[TowerResult],
    update: UpdateResult,
    tower_stats: tuple[tf.Tensor, tf.Tensor] | None,
    num_examples: int,
) -> StepMetrics:
    """Return the metrics of a step over `num_examples` examples.

    They have no diagnostics without `tower_stats`, which `tower_gradient_stats` returns.
    """
    diagnostics = None
    if tower_stats is not None:
        diagnostics = StepDiagnostics._make([*results[-1].diagnostics, *tower_stats, *update.diagnostics])
    with tf.name_scope("metrics"):
        metrics = StepMetrics(
            loss=weighted_mean([r.losses["cross_entropy"] for r in results]),
            accuracy=tf.add_n([r.num_correct for r in results]) / num_examples,
            gradient_norm=update.gradient_norm,
            tower_losses=tf.stack([r.losses["total_loss"] for r in results]),
            losses=results[-1].losses,
            smoothed_losses=update.smoothed_losses,
            updated=update.updated,
            nonfinite_towers=tf.stack([r.nonfinite_index for r in results]),
            nonfinite_update=update.nonfinite_index,
            loss_scale=update.loss_scale,
            example_losses=_concat_example_losses(results),
        )
        with tf.device(HOST):  # the graph copies them; otherwise reading would copy them from a GPU one by one
            metrics = tf.nest.map_structure(lambda value: None if value is None else tf.identity(value), metrics)
    return metrics._replace(diagnostics=diagnostics)


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

    def update_both(batch: Batch, learning_rates, image_size: int = 0, collect_diagnostics=None) -> StepMetrics:
        with tf.name_scope(PROXY):
            proxy = proxy_update(batch, learning_rates, image_size)
        with tf.name_scope("hardest"), tf.device(HOST):
            rows = tf.sort(tf.math.top_k(proxy.example_losses, count, sorted=False).indices)
            selected = gather_rows(batch, rows)
        metrics = update(selected, learning_rates, image_size, collect_diagnostics)
        return metrics._replace(hard_examples=HardExamples(rows, proxy._replace(example_losses=None)))

    return update_both


def gather_rows(batch: Batch, rows: tf.Tensor) -> Batch:
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)
