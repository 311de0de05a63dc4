"""One training step: split, run, average, apply, report; and the calls of the step in a run."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager import context, executor

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
from cifar_towers.towers.placement import HOST
from cifar_towers.training.optimizers import Optimizer
from cifar_towers.training.state import (
    TrainState,
    UpdateResult,
    xla_compiled,
)

PROXY = (
    "proxy"  # prefix of the proxy's variables, operations and metrics; see `select_hard_examples`
)


class StepMetrics(NamedTuple):
    """The numbers of one step, float32 unless noted: the final tower's losses by term, all else
    over all towers.

    They are tensors in the graph and NumPy arrays in a `FinishedStep`.
    """

    loss: Any  # mean cross entropy
    accuracy: Any  # of the training batch, as augmented
    gradient_norm: Any  # of the mean gradient over all variables, before weight decay
    tower_losses: Any  # [K] total loss
    losses: dict[str, Any]  # by term
    smoothed_losses: dict[str, Any]  # moving averages by term
    updated: Any  # bool: the variables were updated; otherwise the step was skipped
    gradients: Any = ()  # N mean gradients, None for a variable without one
    tower_gradients: Any = ()  # for each tower of this process, its N gradients
    stop_signal: Any = (
        None  # of several processes: the largest signal number that any of them passed in
    )
    example_losses: Any = None  # [B], if the step was made with an `example_loss`
    hard_examples: Any = (
        None  # ascending indices into the batch, if only these examples were trained on
    )
    proxy: "StepMetrics | None" = None  # of the proxy's step on the whole batch, which chose them


Update = Callable[..., StepMetrics]  # (batch, learning_rates, image_size=0) -> metrics


class TowerResult(NamedTuple):
    """The result of a tower on its shard, or on one micro-batch of the shard."""

    losses: dict[str, tf.Tensor]  # scalars by term
    gradients: list[tf.Tensor | None]  # N, in the order of `TrainState.weights`
    non_trainable: list[tf.Tensor | None]  # new values; None for an unchanged one
    num_correct: tf.Tensor
    example_losses: tf.Tensor | None = None  # one for each example, if there is an `example_loss`


def make_update(
    state: TrainState,
    towers: Sequence[Tower],
    loss_fn: Callable,
    augmentation: Augmentation,
    *,
    micro_batches: int = 1,
    synchronized: bool = False,
    example_loss: Callable | None = None,
) -> Update:
    """Return the function of one step on `state`: (batch, learning_rates, image_size=0) -> metrics.

    Its `learning_rates` are by active parameter group; no gradients are taken for the other groups.
    Its `image_size` is a Python number of pixels that images are downsampled to; 0 leaves them as
    they are. As a `tf.function` it is traced once for each set of active parameter groups and each
    image size.

    Args:
      micro_batches: number of parts that each tower takes its shard in.
      synchronized: compute batch statistics over all towers in each norm, instead of over each
        tower's shard.
      example_loss: (labels, logits) -> [B] losses to return in the metrics.
    """
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches, example_loss)
    run = run_on_towers_synchronized if synchronized else run_on_towers
    devices = [variable.device for variable in state.non_trainable]

    def update(batch: Batch, learning_rates, image_size: int = 0) -> StepMetrics:
        def on_tower(tower: Tower, shard: Batch) -> TowerResult:
            return tower_fn(tower, shard, learning_rates.keys(), image_size)

        results = run(on_tower, towers, split_batch(batch, towers))

        tower_grads = [zip(r.gradients, state.weights, strict=True) for r in results]
        gradients = average_gradients(tower_grads)  # the towers meet here

        non_trainable = reduce_batch_stats([r.non_trainable for r in results], devices)
        losses = results[-1].losses  # the final tower's
        updated = state.apply(gradients, non_trainable, losses, learning_rates, all_finite(results))
        return make_step_metrics(results, gradients, updated, batch.labels.shape[0])

    return update


def make_tower_fn(
    state: TrainState,
    loss_fn: Callable,
    augmentation: Augmentation,
    micro_batches: int = 1,
    example_loss: Callable | None = None,
) -> Callable[..., TowerResult]:
    """Return the function (tower, shard, active_groups, image_size=0) of every tower. It only reads
    variables.
    """
    forward = training_call(state.model)

    def tower_fn(
        tower: Tower, shard: Batch, active_groups: Collection[str], image_size: int = 0
    ) -> TowerResult:
        weights, old_values = (
            state.read_variables()
        )  # once for all micro-batches: they travel to the tower
        active = {id(variable) for variable in state.optimizer.active_variables(active_groups)}
        augments_first = (
            state.jit_compile and augmentation.own
        )  # of which XLA may lack an operation

        def augmented(part: Batch) -> Batch:
            images, labels = augmentation.augment_with_labels(
                part.images, part.labels, part.draws, image_size
            )
            return part._replace(images=images, labels=labels)

        def on_part(part: Batch, weights: list, old_values: list, sums: list) -> TowerResult:
            """Compute losses, gradients and new values from a micro-batch; replace the `sums` of
            gradients so far.
            """
            non_trainable = state.with_layer_seeds(old_values, part.draws)
            images, labels, _ = part if augments_first else augmented(part)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                pairs = zip(weights, state.weights, strict=True)
                tape.watch([weight for weight, variable in pairs if id(variable) in active])
                logits, new_values, *model_losses = forward(weights, non_trainable, images)
                losses = loss_fn(labels, logits, weights, model_losses)
            with tf.name_scope("backward"):
                gradients = tape.gradient(losses["total_loss"], weights)
                if micro_batches > 1:
                    pairs = zip(sums or [None] * len(weights), gradients, strict=True)
                    gradients = [weighted_sum(pair, (1.0, 1.0), tower.device) for pair in pairs]
                    sums[:] = gradients
            classes = (
                labels if labels.shape.rank == 1 else tf.argmax(labels, -1)
            )  # the most likely ones
            changes = zip(new_values, non_trainable, state.is_seed, strict=True)
            return TowerResult(
                losses=losses,
                gradients=gradients,
                non_trainable=[None if seed or new is old else new for new, old, seed in changes],
                num_correct=tf.reduce_sum(
                    tf.cast(tf.equal(classes, tf.argmax(logits, -1)), tf.float32)
                ),
                example_losses=example_loss(labels, logits) if example_loss else None,
            )

        def on_shard(shard: Batch, weights: list, old_values: list) -> TowerResult:
            sums: list = []  # those of one part at a time are in memory besides
            on_each = functools.partial(on_part, weights=weights, old_values=old_values, sums=sums)
            results = run_micro_batches(on_each, shard, micro_batches)
            return _combine_micro_batches(results, tower.device)

        if augments_first:
            parts = run_micro_batches(augmented, shard, micro_batches)
            shard = tf.nest.map_structure(lambda *tensors: tf.concat(tensors, 0), *parts)
        return xla_compiled(on_shard, state.jit_compile)(shard, weights, old_values)

    return tower_fn


def training_call(model: keras.Model) -> Callable:
    """Return a call in training: (weights, non_trainable, images) -> (logits, new non-trainable
    values, *losses).
    """
    trainable, frozen = model.trainable_variables, model.non_trainable_variables

    def call(weights, non_trainable, images):
        values = zip([*trainable, *frozen], [*weights, *non_trainable], strict=True)
        losses: list[tf.Tensor] = []
        with keras.StatelessScope(values, collect_losses=True) as scope:
            scope.add_loss = (
                losses.append
            )  # each call of a layer removes those of its last call from `scope.losses`
            logits = model.call(images, training=True)
            losses += model.losses  # of weights
        return (
            logits,
            [scope.get_current_value(variable) for variable in frozen],
            *map(to_scalar, losses),
        )

    return call


def _combine_micro_batches(results: Sequence[TowerResult], device: str) -> TowerResult:
    """Combine the results of a tower's micro-batches; the last result has the gradients' sums."""
    losses = {
        term: average_tensors([r.losses[term] for r in results]) for term in results[0].losses
    }
    gradients = results[-1].gradients
    if len(results) > 1:
        gradients = [weighted_sum([sums], [1 / len(results)], device) for sums in gradients]
    return TowerResult(
        losses=losses,
        gradients=gradients,
        non_trainable=reduce_batch_stats([r.non_trainable for r in results]),
        num_correct=tf.add_n([r.num_correct for r in results]),
        example_losses=_concat_example_losses(results),
    )


def all_finite(results: Sequence[TowerResult]) -> tf.Tensor:
    """Return whether the losses of K towers are finite."""
    losses = [result.losses["total_loss"] for result in results]
    return tf.reduce_all(tf.math.is_finite(tf.stack(losses)))


def reduce_batch_stats(
    tower_values: Sequence[Sequence[tf.Tensor | None]], devices: Sequence[str] = ()
) -> list[tf.Tensor | None]:
    """Reduce K lists of new values for the same S non-trainable variables to one list; None where
    none changed.

    A float value becomes the mean, on its own of S `devices`. An integer value becomes the final
    tower's.
    """
    reduced = []
    with tf.name_scope("average_statistics"):
        for index, values in enumerate(zip(*tower_values, strict=True)):
            with tf.device(devices[index] if devices else ""):
                averaged = values[-1] is not None and values[-1].dtype.is_floating
                reduced.append(average_tensors(values) if averaged else values[-1])
    return reduced


def make_step_metrics(
    results: Sequence[TowerResult],
    gradients: Sequence[tuple],
    update: UpdateResult,
    num_examples: int,
) -> StepMetrics:
    """Return the metrics of a step over `num_examples` examples; `gradients` are N x (mean
    gradient, variable).
    """
    with tf.name_scope("metrics"):
        metrics = StepMetrics(
            loss=average_tensors([r.losses["cross_entropy"] for r in results]),
            accuracy=tf.add_n([r.num_correct for r in results]) / num_examples,
            gradient_norm=update.gradient_norm,
            tower_losses=tf.stack([r.losses["total_loss"] for r in results]),
            losses=results[-1].losses,
            smoothed_losses=update.smoothed_losses,
            updated=update.updated,
            example_losses=_concat_example_losses(results),
        )
    return copy_to_host(metrics)._replace(
        gradients=_as_tensors([gradient for gradient, _ in gradients]),
        tower_gradients=[_as_tensors(r.gradients) for r in results],
    )


def copy_to_host(metrics: StepMetrics) -> StepMetrics:
    """Copy all metrics except gradients to the host in the graph; reading would copy them from a
    GPU one by one.
    """
    scalars = without_gradients(metrics)
    with tf.name_scope("metrics"), tf.device(HOST):
        copies = tf.nest.map_structure(
            lambda value: None if value is None else tf.identity(value), scalars
        )
    return copies._replace(gradients=metrics.gradients, tower_gradients=metrics.tower_gradients)


def compile_whole(update: Update) -> Update:
    """Return an update as one function compiled by XLA. All its variables must be on one device,
    that of its tower.
    """
    compiled = xla_compiled(update, jit_compile=True)
    return lambda batch, learning_rates, image_size=0: copy_to_host(
        compiled(batch, learning_rates, image_size)
    )


def _as_tensors(gradients: Sequence) -> list[tf.Tensor | None]:
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def _concat_example_losses(results: Sequence[TowerResult]) -> tf.Tensor | None:
    losses = [r.example_losses for r in results]
    return None if losses[0] is None else tf.concat(losses, 0)


def select_hard_examples(update: Update, proxy_update: Update, count: int) -> Update:
    """Return an update on the `count` hardest examples of each batch: those with the highest losses
    by the proxy.

    The proxy is a small net that trains on the whole batch, on the same towers, before each step of
    the large net. Both nets get the same learning rates, so a parameter group of the proxy that the
    large net lacks is frozen. `make_update` makes both updates, that of the proxy with an
    `example_loss`.

    Source: K. Jordan's CIFAR-10 records of 2024 (airbench96). There a separate run of the proxy
    selects the harder half of every batch first, and the proxy is updated at every fourth batch
    only.
    """

    def update_both(batch: Batch, learning_rates, image_size: int = 0) -> StepMetrics:
        with tf.name_scope(PROXY):
            proxy = proxy_update(batch, learning_rates, image_size)
        with tf.name_scope("hardest"), tf.device(HOST):
            rows = tf.sort(tf.math.top_k(proxy.example_losses, count, sorted=False).indices)
            selected = gather_rows(batch, rows)
        metrics = update(selected, learning_rates, image_size)
        return metrics._replace(
            hard_examples=rows, proxy=without_gradients(proxy._replace(example_losses=None))
        )

    return update_both


def gather_rows(batch: Batch, rows: tf.Tensor) -> Batch:
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)


# Calls of the step in a run -----------------------------------------------------------------------


class FinishedStep(NamedTuple):
    """A step that has run, its inputs and its metrics."""

    step: int  # number of finished steps, this one included
    batch: Batch
    learning_rates: dict[str, float]  # by parameter group; without the groups that are frozen
    image_size: int  # pixels
    metrics: StepMetrics  # NumPy values; tensors until `StepRunner` has read them


class StepRunner:
    """Runs steps in a thread. The metrics of a step are read after the next has started, so that a
    GPU is never idle.

    Args:
      train_step: the step as `build.make_training` returns it.
      image_size_at: function (step) -> image size in pixels.
    """

    def __init__(self, train_step: Any, optimizer: Optimizer, image_size_at: Callable[[int], int]):
        self.train_step, self.optimizer, self.image_size_at = train_step, optimizer, image_size_at
        self.traced: dict[
            tuple, tf.types.experimental.ConcreteFunction
        ] = {}  # by kind of step; see `_kind`
        self._unread: list[FinishedStep] = []  # the last step, its metrics still tensors
        self._executor = executor.new_executor(enable_async=True)

    @property
    def is_up_to_date(self) -> bool:
        """Whether all steps that were started have been returned."""
        return not self._unread

    def needs_compilation(self, step: int) -> bool:
        """Return whether no step of this kind has been traced."""
        return self._kind(step) not in self.traced

    def trace(
        self, step: int, batch: Batch, stop_signal: int | None
    ) -> tf.types.experimental.ConcreteFunction:
        """Trace a step without running it. The arguments are those of `start`."""
        function = self.train_step.get_concrete_function(
            **self._arguments(step, batch, stop_signal)
        )
        return self.traced.setdefault(self._kind(step), function)

    def start(
        self, step: int, batch: Batch, stop_signal: int | None, keep_gradients: bool
    ) -> list[FinishedStep]:
        """Start step number `step + 1`, whose kind was traced; return the step before it, if it was
        not returned.

        Args:
          stop_signal: in a cluster, the number of the signal that this process has received, or 0;
            otherwise None.
        """
        function, arguments = (
            self.traced[self._kind(step)],
            self._arguments(step, batch, stop_signal),
        )
        with context.executor_scope(
            self._executor
        ):  # the call returns at once; an error is raised by `to_numpy`
            metrics = function(
                **arguments
            )  # in half the time of `train_step`, which looks for the function
        metrics = metrics if keep_gradients else without_gradients(metrics)
        rates = self.optimizer.learning_rates(step)
        return self._read([FinishedStep(step + 1, batch, rates, self.image_size_at(step), metrics)])

    def finish(self) -> list[FinishedStep]:
        """Wait for the step that was started last, and return it, unless it has been returned."""
        return self._read([])

    def close(self) -> None:
        """Forget an error of a step; the thread would print it again at its end."""
        self._executor.clear_error()

    def _read(self, started: list[FinishedStep]) -> list[FinishedStep]:
        finished = [each._replace(metrics=to_numpy(each.metrics)) for each in self._unread]
        self._unread = started  # a step with an error stays unread, and every later call raises it
        return finished

    def _kind(self, step: int) -> tuple:
        """Return what a step is traced for: its image size and its active parameter groups."""
        return (self.image_size_at(step), *self.optimizer.learning_rates(step))

    def _arguments(self, step: int, batch: Batch, stop_signal: int | None) -> dict[str, Any]:
        rates = self.optimizer.learning_rates(step)
        with tf.device(HOST):
            tensors = {name: tf.constant(rate, tf.float32) for name, rate in rates.items()}
            signal = (
                {} if stop_signal is None else {"stop_signal": tf.constant(stop_signal, tf.float32)}
            )
        return {
            "batch": batch,
            "learning_rates": tensors,
            "image_size": self.image_size_at(step),
            **signal,
        }


def without_gradients(metrics: StepMetrics) -> StepMetrics:
    """Return the metrics without their gradients, which take the memory of several models."""
    return metrics._replace(gradients=(), tower_gradients=())


def to_numpy(values: Any) -> Any:
    """Return the same structure with NumPy arrays for tensors; None stays None."""
    return tf.nest.map_structure(lambda value: None if value is None else value.numpy(), values)
