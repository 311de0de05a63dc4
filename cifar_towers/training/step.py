"""One training step: split, run, average, apply, report."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
from cifar_towers.towers.collectives import mean_of_towers
from cifar_towers.towers.pipeline import Stage, staged_call
from cifar_towers.towers.placement import HOST
from cifar_towers.towers.sharding import share_out
from cifar_towers.training.diagnostics import forward_diagnostics, stateless_call_with_activations, tower_gradient_stats
from cifar_towers.training.nonfinite import first_nonfinite_index
from cifar_towers.training.results import ForwardDiagnostics, StepDiagnostics, StepMetrics, TowerGradientStats
from cifar_towers.training.state import ModelValues, TrainState, UpdateResult


class StepOptions(NamedTuple):
    """What a tower needs to know of a step besides its shard."""

    active_groups: frozenset[str]  # parameter groups whose gradients are taken
    image_size: int = 0  # pixels that images are downsampled to; 0: as they are
    collect_diagnostics: tf.Tensor | None = None  # [] bool; None: the graph has no diagnostics


class MicroBatchResult(NamedTuple):
    """What a tower computes from a micro-batch."""

    losses: dict[str, tf.Tensor]  # scalars by term
    gradients: list[tf.Tensor | None]  # N, of the scaled loss
    non_trainable: list[tf.Tensor | None]  # new values; None for an unchanged one
    num_correct: tf.Tensor
    diagnostics: ForwardDiagnostics | None
    example_losses: tf.Tensor | None  # of each example, if there is an `example_loss`


class TowerResult(NamedTuple):
    """What one tower computes from its shard: as of a micro-batch, with a variable beside each gradient."""

    losses: dict[str, tf.Tensor]
    gradients: list[tuple[tf.Tensor | None, tf.Variable]]
    non_trainable: list[tf.Tensor | None]
    num_correct: tf.Tensor
    nonfinite_index: tf.Tensor  # in the losses, then the gradients from last to first; -1 if all are finite
    diagnostics: ForwardDiagnostics | None = None
    example_losses: tf.Tensor | None = None


def make_train_step(update: Callable[..., StepMetrics]) -> Callable[..., StepMetrics]:
    """An update of `make_update` as one graph: (batch, learning_rates, image_size, collect_diagnostics) -> metrics.

    Args of the returned function:
      learning_rates: by active parameter group; no gradients are taken for the other groups.
      image_size: a Python number of pixels that images are downsampled to; 0: as they are.
      collect_diagnostics: [] bool; without it the graph has no diagnostics.

    Each set of groups and each image size is traced once.
    """

    @tf.function(autograph=False)
    def train_step(batch, learning_rates, image_size=0, collect_diagnostics=None) -> StepMetrics:
        return update(batch, learning_rates, image_size, collect_diagnostics)

    return train_step


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
    shares: Sequence[float] = (),
) -> Callable[..., StepMetrics]:
    """The function of one step on `state`; see `make_train_step` for its arguments.

    Args:
      micro_batches: parts that each tower takes its shard in.
      batch_statistics: `mean` over the towers, the `final` tower's, or `synchronized`: computed over all towers in
        each norm. Other non-trainable values are averaged then.
      gradient_device: where gradients are averaged; beside each variable if empty.
      stages: the model cut over several devices, for one tower; they work on different micro-batches at a time.
      example_loss: (labels, logits) -> [B] losses to return in the metrics.
      load_images: `Batches.load_images`, for batches without images.
      shares: [K], of the batch, in proportion; equal if empty. Means over towers are by numbers of examples then.
    """
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches, stages, example_loss, load_images)
    synchronized = batch_statistics == "synchronized"
    devices = [variable.device for variable in state.non_trainable]

    def update(batch: Batch, learning_rates: Mapping, image_size: int = 0, collect_diagnostics=None) -> StepMetrics:
        def on_tower(tower: Tower, shard: Batch) -> TowerResult:
            collect = collect_diagnostics if tower == towers[-1] else None
            return tower_fn(tower, shard, StepOptions(frozenset(learning_rates), image_size, collect))

        sizes = share_out(batch.labels.shape[0], shares, micro_batches) if shares else None
        run = functools.partial(run_on_towers_synchronized, weights=sizes) if synchronized else run_on_towers
        results = run(on_tower, towers, split_batch(batch, towers, sizes=sizes))

        gradients = average_gradients([r.gradients for r in results], sizes, gradient_device)  # the towers meet here

        tower_stats = None
        if collect_diagnostics is not None:
            tower_stats = tower_gradient_stats(collect_diagnostics, [r.gradients for r in results], gradients)
        non_trainable = reduce_batch_stats([r.non_trainable for r in results], batch_statistics, devices, sizes)
        losses, finite = results[-1].losses, all_finite(results)
        updated = state.apply(gradients, non_trainable, losses, learning_rates, finite, collect_diagnostics)
        return make_step_metrics(results, updated, tower_stats, batch.labels.shape[0], sizes)

    return update


def make_tower_fn(
    state: TrainState,
    loss_fn: Callable,
    augmentation: Augmentation,
    micro_batches: int = 1,
    stages: Sequence[Stage] = (),
    example_loss: Callable | None = None,
    load_images: Callable[[Batch, str], Batch] | None = None,
) -> Callable[[Tower, Batch, StepOptions], TowerResult]:
    """The function that each tower runs on its shard. It only reads variables."""
    forward = _staged(stages, state.model) if stages else stateless_call_with_activations(state.model)

    def micro_batch_fn(part: Batch, values: ModelValues, options: StepOptions) -> MicroBatchResult:
        non_trainable = state.with_layer_seeds(values.non_trainable, part.draws)
        images = augmentation.augment(part.images, part.draws, options.image_size)
        active = {id(variable) for variable in state.optimizer.active_variables(options.active_groups)}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            pairs = zip(values.weights, state.weights, strict=True)
            tape.watch([weight for weight, variable in pairs if id(variable) in active])
            logits, new_values, model_losses, activations = forward(values.weights, non_trainable, images)
            losses = loss_fn(part.labels, logits, values.weights, model_losses)
            scaled_loss = state.loss_scale.scale_loss(losses["total_loss"])
        with tf.name_scope("backward"):
            gradients = tape.gradient(scaled_loss, values.weights)
        diagnostics = None
        if options.collect_diagnostics is not None:
            diagnostics = forward_diagnostics(options.collect_diagnostics, images, part.labels, activations)
        changes = zip(new_values, non_trainable, state.is_seed, strict=True)
        return MicroBatchResult(
            losses=losses,
            gradients=gradients,
            non_trainable=[None if seed or new is old else new for new, old, seed in changes],
            num_correct=tf.reduce_sum(tf.cast(tf.equal(part.labels, tf.argmax(logits, -1)), tf.float32)),
            diagnostics=diagnostics,
            example_losses=example_loss(part.labels, logits) if example_loss else None,
        )

    def on_tower(tower: Tower, shard: Batch, options: StepOptions) -> TowerResult:
        values = state.read_variables()  # once for all micro-batches: they travel to the tower

        def on_part(part: Batch) -> MicroBatchResult:
            return micro_batch_fn(load_images(part, tower.device) if load_images else part, values, options)

        results = run_micro_batches(on_part, shard, micro_batches, sequential=not stages)
        return _combine_micro_batches(results, state.weights, tower.device, pipelined=bool(stages))

    return on_tower


def _staged(stages: Sequence[Stage], model) -> Callable:
    """`stateless_call_with_activations` for a model cut in stages, which has no losses of its own."""
    call = staged_call(stages, model)

    def forward(weights, non_trainable, images):
        logits, new_values, activations = call(weights, non_trainable, images)
        return logits, new_values, [], activations

    return forward


def _combine_micro_batches(
    results: Sequence[MicroBatchResult], weights: Sequence[tf.Variable], device: str, pipelined: bool
) -> TowerResult:
    """The result of a tower on `device`. A pipeline's gradients are averaged beside their variables instead."""
    losses = {term: mean_of_towers([r.losses[term] for r in results]) for term in results[0].losses}
    gradients = average_gradients(
        [list(zip(r.gradients, weights, strict=True)) for r in results], device="" if pipelined else device
    )
    devices = [variable.device if pipelined else device for variable in reversed(weights)]
    return TowerResult(
        losses=losses,
        gradients=gradients,
        non_trainable=reduce_batch_stats([r.non_trainable for r in results]),
        num_correct=tf.add_n([r.num_correct for r in results]),
        nonfinite_index=first_nonfinite_index(
            [*losses.values(), *(gradient for gradient, _ in reversed(gradients))], [device] * len(losses) + devices
        ),
        diagnostics=results[-1].diagnostics,
        example_losses=_concat_example_losses(results),
    )


def all_finite(results: Sequence[TowerResult]) -> tf.Tensor:
    """Whether all losses and gradients of K towers are finite."""
    return tf.reduce_all(tf.stack([r.nonfinite_index for r in results]) < 0)


def make_step_metrics(
    results: Sequence[TowerResult],
    update: UpdateResult,
    tower_stats: TowerGradientStats | None,
    num_examples: int,
    sizes: Sequence[int] | None = None,
) -> StepMetrics:
    """The metrics of a step over `num_examples` examples, of which the towers have these `sizes`, or equal ones."""
    diagnostics = None
    if tower_stats is not None:
        diagnostics = StepDiagnostics(results[-1].diagnostics, tower_stats, update.diagnostics)
    with tf.name_scope("metrics"):
        metrics = StepMetrics(
            loss=mean_of_towers([r.losses["cross_entropy"] for r in results], sizes),
            accuracy=tf.add_n([r.num_correct for r in results]) / num_examples,
            gradient_norm=update.gradient_norm,
            tower_losses=tf.stack([r.losses["total_loss"] for r in results]),
            losses=results[-1].losses,
            smoothed_losses=update.smoothed_losses,
            finite=update.finite,
            nonfinite_towers=tf.stack([r.nonfinite_index for r in results]),
            nonfinite_update=update.nonfinite_index,
            loss_scale=update.loss_scale,
            example_losses=_concat_example_losses(results),
        )
        with tf.device(HOST):  # a GPU sends them by itself, instead of being asked for one after the other
            metrics = tf.nest.map_structure(lambda value: None if value is None else tf.identity(value), metrics)
    return metrics._replace(diagnostics=diagnostics)


def reduce_batch_stats(
    tower_values: Sequence[Sequence[tf.Tensor | None]],
    batch_statistics: str = "mean",
    devices: Sequence[str] = (),
    weights: Sequence[int] | None = None,
) -> list[tf.Tensor | None]:
    """K lists of new values for the same S non-trainable variables -> one; None where none changed.

    The mean, by `weights` if they are given, except that `batch_statistics="final"` takes the final tower's, as is done
    with integers always. Each mean is computed on its own of S devices, if they are given: beside the variable.

    Raises:
      ValueError: another `batch_statistics`.
    """
    if batch_statistics not in ("mean", "final", "synchronized"):
        raise ValueError(f"batch_statistics={batch_statistics} is not one of mean, final, synchronized")
    if batch_statistics == "final":
        return list(tower_values[-1])
    reduced = []
    with tf.name_scope("average_statistics"):
        for index, values in enumerate(zip(*tower_values, strict=True)):
            with tf.device(devices[index] if devices else ""):
                averaged = values[-1] is not None and values[-1].dtype.is_floating
                reduced.append(mean_of_towers(values, weights) if averaged else values[-1])
    return reduced


def _concat_example_losses(results: Sequence[MicroBatchResult | TowerResult]) -> tf.Tensor | None:
    losses = [r.example_losses for r in results]
    return None if losses[0] is None else tf.concat(losses, 0)
