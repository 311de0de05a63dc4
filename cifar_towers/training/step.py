"""One update: split, run, average, apply, follow, report."""

import functools
from collections.abc import Callable, Sequence
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
from cifar_towers.towers.pipeline import Stage, staged_call
from cifar_towers.towers.placement import HOST
from cifar_towers.training.diagnostics import (
    forward_diagnostics,
    stateless_call_with_activations,
    tower_gradient_stats,
)
from cifar_towers.training.nonfinite import first_nonfinite_index
from cifar_towers.training.results import ForwardDiagnostics, StepDiagnostics, StepMetrics, TowerGradientStats
from cifar_towers.training.state import TrainState


class TowerResult(NamedTuple):
    """What one tower hands over of its shard. A part of a shard has no `bad`."""

    losses: dict[str, tf.Tensor]  # scalars by term
    gradients: list  # N x (gradient, variable)
    statistics: list[tf.Tensor | None]  # new values; None where one did not change
    correct: tf.Tensor  # examples it got right
    # The first that is not finite: its index in the losses and, after them, the gradients from the last to the first,
    # or -1.
    bad: tf.Tensor | None = None
    look: ForwardDiagnostics | None = None
    example_losses: tf.Tensor | None = None  # of each example in turn, if there was an `example_loss`


def make_train_step(update: Callable[..., StepMetrics]) -> Callable[..., StepMetrics]:
    """The function (batch, rates, side, look) -> metrics that a run calls: an update of `make_update` as one graph.

    `rates` are those of the optimizer's groups that move; no gradient is taken for the others. `side` is the Python
    number of pixels the images are shrunk to, 0: none. Each set of groups and each side is traced once. `look` is a
    tensor that says whether the step is looked at closely; without it there are no `diagnostics`, and
    nothing of them in the graph.
    """

    @tf.function(autograph=False)
    def train_step(batch: Batch, rates: dict[str, tf.Tensor], side: int = 0, look=None) -> StepMetrics:
        return update(batch, rates, side, look)

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
) -> Callable[..., StepMetrics]:
    """The function (batch, rates, side, look) -> metrics that moves `state` by one step; see `make_train_step`.

    Args:
      micro_batches: parts that each tower takes its shard in.
      batch_statistics: what becomes of K towers' new statistics: their `mean`, the `final` tower's, or `synchronized`,
        where the towers meet in the norms on the way, and of what else there is the mean is taken.
      gradient_device: where gradients are averaged; beside each variable if empty.
      stages: the model cut over several devices, for one tower; they work on different parts at the same time.
      example_loss: (labels, logits) -> [B] losses, for the metrics; none are there if None.
    """
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches, stages, example_loss)
    run = run_on_towers_synchronized if batch_statistics == "synchronized" else run_on_towers

    def update(batch: Batch, rates: dict[str, tf.Tensor], side: int = 0, look=None) -> StepMetrics:
        shards = split_batch(batch, towers)
        looks = [None] * (len(towers) - 1) + [look]  # at the final tower
        on_tower = functools.partial(tower_fn, side, tuple(rates))
        results = run(on_tower, towers, list(zip(shards, looks, strict=True)))

        gradients = average_gradients([r.gradients for r in results], device=gradient_device)  # the towers meet here

        alike = None if look is None else tower_gradient_stats(look, [r.gradients for r in results], gradients)
        gradients = state.loss_scale.unscale(gradients)
        homes = [variable.device for variable in state.statistics]
        statistics = reduce_batch_stats([r.statistics for r in results], batch_statistics, homes)
        told = apply_update(state, gradients, statistics, rates, results[-1].losses, all_finite(results), look)
        return metrics(results, *told, alike, batch.labels.shape[0])

    return update


def make_tower_fn(
    state: TrainState,
    loss_fn: Callable,
    augmentation: Augmentation,
    micro_batches: int = 1,
    stages: Sequence[Stage] = (),
    example_loss: Callable | None = None,
) -> Callable[..., TowerResult]:
    """The function (side, groups, tower, (shard, look)) -> result that each tower runs: it takes the gradients of the
    variables in these of the optimizer's groups. It only reads."""
    forward = _staged(stages, state.model) if stages else stateless_call_with_activations(state.model)

    def micro_batch_fn(
        side: int, groups: Sequence[str], look, weights: list[tf.Tensor], statistics: list[tf.Tensor], part: Batch
    ) -> TowerResult:
        statistics = state.with_layer_seeds(statistics, part.draws)
        images = augmentation.train(part.images, part.draws, side)
        moving = {id(variable) for variable in state.optimizer.moving(groups)}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([w for w, variable in zip(weights, state.weights, strict=True) if id(variable) in moving])
            logits, new_statistics, own_losses, activations = forward(weights, statistics, images)
            losses = loss_fn(part.labels, logits, weights, own_losses)
            scaled = state.loss_scale.scale_loss(losses["total_loss"])
        with tf.name_scope("backward"):
            gradients = tape.gradient(scaled, weights)
        moved = zip(new_statistics, statistics, state.seeds, strict=True)
        changed = [None if seed or new is old else new for new, old, seed in moved]
        seen = None if look is None else forward_diagnostics(look, images, part.labels, activations)
        correct, each = num_correct(part.labels, logits), example_loss(part.labels, logits) if example_loss else None
        return TowerResult(losses, gradients, changed, correct, look=seen, example_losses=each)

    def on_tower(side: int, groups: Sequence[str], tower: Tower, shard_and_look: tuple) -> TowerResult:
        shard, look = shard_and_look
        values = state.read()  # once for all parts: they travel to the tower
        part_fn = functools.partial(micro_batch_fn, side, groups, look, *values)
        results = run_micro_batches(part_fn, shard, micro_batches, sequential=not stages)
        pairs = [list(zip(r.gradients, state.weights, strict=True)) for r in results]
        losses = {term: _mean([r.losses[term] for r in results]) for term in results[0].losses}
        gradients = average_gradients(pairs, device="" if stages else tower.device)
        homes = [v.device if stages else tower.device for v in reversed(state.weights)]
        return TowerResult(
            losses=losses,
            gradients=gradients,
            statistics=reduce_batch_stats([r.statistics for r in results], "mean"),
            correct=tf.add_n([r.correct for r in results]),
            bad=first_nonfinite_index(
                [*losses.values(), *(gradient for gradient, _ in reversed(gradients))],
                [*(tower.device for _ in losses), *homes],
            ),
            look=results[-1].look,
            example_losses=_joined(results),
        )

    return on_tower


def _staged(stages: Sequence[Stage], model) -> Callable:
    """`stateless_call_with_activations` for a model cut in stages, which has no losses of its own."""
    call = staged_call(stages, model)

    def forward(weights, statistics, images):
        logits, new_statistics, activations = call(weights, statistics, images)
        return logits, new_statistics, [], activations

    return forward


def all_finite(results: Sequence[TowerResult]) -> tf.Tensor:
    """Whether what K towers hand over has no NaN and no infinity in it."""
    return tf.reduce_all(tf.stack([r.bad for r in results]) < 0)


def apply_update(
    state: TrainState, gradients: list, statistics: list, rates: dict, losses: dict, finite: tf.Tensor, look=None
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor], tuple[tf.Tensor, tf.Tensor] | None]:
    """Moves the state by mean gradients: ({`gradient_norm`, `finite`, `nonfinite_update`}, averages of the losses, what
    `update_diagnostics` says and the loss scale, if it was asked for)."""
    scale = state.loss_scale.value()
    finite, nonfinite_update, seen = state.apply(gradients, statistics, rates, finite, look)
    averages = state.loss_averages.update(losses, finite)
    norm = tf.linalg.global_norm([gradient for gradient, _ in gradients])
    told = {"gradient_norm": norm, "finite": finite, "nonfinite_update": nonfinite_update}
    return told, averages, None if look is None else (seen, scale)


def metrics(
    results: Sequence[TowerResult],
    update: dict,
    averages: dict,
    seen: tuple | None,
    alike: TowerGradientStats | None,
    examples: int,
) -> StepMetrics:
    """What K towers' results, an `apply_update` and `tower_gradient_stats` say of a step over `examples` examples. The
    final tower speaks for the loss terms."""
    diagnostics = None if seen is None else StepDiagnostics(results[-1].look, alike, *seen)
    with tf.name_scope("metrics"):
        told = StepMetrics(
            loss=_mean([r.losses["cross_entropy"] for r in results]),
            accuracy=tf.add_n([r.correct for r in results]) / examples,
            tower_losses=tf.stack([r.losses["total_loss"] for r in results]),
            losses=results[-1].losses,
            smoothed_losses=averages,
            nonfinite_towers=tf.stack([r.bad for r in results]),
            example_losses=_joined(results),
            **update,
        )
        with tf.device(HOST):  # a GPU sends them on its own, and is not asked for one after the other
            told = tf.nest.map_structure(lambda value: None if value is None else tf.identity(value), told)
            return told._replace(diagnostics=diagnostics)


def reduce_batch_stats(
    tower_statistics: Sequence[Sequence[tf.Tensor | None]], how: str, devices: Sequence[str] = ()
) -> list[tf.Tensor | None]:
    """K lists of the same S statistics -> one: their mean, or, if that is `how`, the `final` tower's, as with whole
    numbers. None where none changed.

    Each mean is taken on its own of S devices, if they are given: beside the variable, where it is needed next.
    """
    if how == "final":
        return list(tower_statistics[-1])
    combined = []
    with tf.name_scope("average_statistics"):
        for index, of_one in enumerate(zip(*tower_statistics, strict=True)):
            with tf.device(devices[index] if devices else ""):
                averaged = of_one[-1] is not None and of_one[-1].dtype.is_floating
                combined.append(_mean(of_one) if averaged else of_one[-1])
    return combined


def _joined(results: Sequence[TowerResult]) -> tf.Tensor | None:
    """The losses of all their examples in turn, where there are some."""
    losses = [r.example_losses for r in results]
    return None if losses[0] is None else tf.concat(losses, 0)


def _mean(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(list(values)) / len(values) if len(values) > 1 else values[0]


def num_correct(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """How many of B examples have their largest logit at their label, as float32."""
    return tf.reduce_sum(tf.cast(tf.equal(labels, tf.argmax(logits, -1)), tf.float32))
