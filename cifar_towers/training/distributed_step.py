"""The training step under `tf.distribute`: one replica for each tower, in one process or in
several.

Every replica has its own copy of all variables. The gradients meet in an all-reduce, and each
replica applies the same update to its copy.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.errors import UsageError
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import make_towers, on_gpus
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import (
    StepMetrics,
    Update,
    all_finite,
    as_tensors,
    make_step_metrics,
    make_tower_fn,
)

MEAN, SUM = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM


def make_strategy(towers: Sequence[Tower]) -> tf.distribute.MirroredStrategy:
    """Return a mirrored strategy over the towers' devices.

    Several towers that have a GPU each are joined by NCCL. Otherwise the first device adds up and
    copies back.
    """
    own_gpus = on_gpus(towers) and 1 < len(towers) <= len(tf.config.get_visible_devices("GPU"))
    all_reduce = tf.distribute.NcclAllReduce() if own_gpus else tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy([tower.device for tower in towers], all_reduce)


def make_multi_worker_strategy(
    addresses: Sequence[str], index: int, num_gpus: int = 0, soft_placement: bool = True
) -> tuple[tf.distribute.MultiWorkerMirroredStrategy, list[Tower]]:
    """Return a strategy that joins W processes, and the towers of all, in the order of the workers.

    The call waits for all workers, at [W] `addresses` as host:port. Each worker opens a port
    without authentication, on every interface of its machine. `num_gpus` and `soft_placement` are
    those of `make_towers`.

    Raises:
      UsageError: more towers than TensorFlow lets a worker have, or GPUs that are not there.
    """
    gpus = len(tf.config.get_visible_devices("GPU"))
    if num_gpus > max(gpus, 1):
        have = f"{gpus} GPUs" if gpus else "no GPU, and a worker's CPU is one tower"
        raise UsageError(f"num_gpus={num_gpus}: this worker has {have}; start more workers instead")
    if not gpus and num_gpus and not soft_placement:
        raise UsageError(f"num_gpus={num_gpus} asks for GPUs, and this worker has none; leave it")
    make_towers(num_gpus, multi_worker=True, soft_placement=soft_placement)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(addresses)}),
            task_type="worker",
            task_id=index,
            rpc_layer="grpc",
        )
    )
    mine = strategy.extended.worker_devices
    everyone = [
        device.replace(f"task:{index}", f"task:{worker}")
        for worker in range(len(addresses))
        for device in mine
    ]
    return strategy, [Tower(place, device) for place, device in enumerate(everyone)]


class ReplicaResult(NamedTuple):
    """What a replica knows after the exchange with the others: K scalars of each, N gradients."""

    gradients: list[tf.Tensor | None]  # N means over the replicas
    statistics: list[tf.Tensor | None]  # S means over the replicas; integers are its own
    losses: dict[str, tf.Tensor]  # [K] of all replicas by term
    num_correct: tf.Tensor  # [K] of all replicas
    signals: tf.Tensor | None  # [K] of all replicas
    tower_gradients: list[tf.Tensor | None]  # N of its own


def make_mirrored_step(
    strategy: tf.distribute.Strategy,
    state: TrainState,
    towers: Sequence[Tower],
    loss_fn: Callable,
    augmentation: Augmentation,
    micro_batches: int = 1,
) -> Update:
    """Return the training step of K towers, which are the strategy's replicas; see `make_update`
    for its arguments.

    If other processes have some of the towers, the step takes this process's part of the batch and
    a `stop_signal`, and returns the largest of all signals. Its metrics cover all towers, except
    `tower_gradients`.

    Args:
      state: built in `strategy.scope()`.
    """
    train_on_tower = make_tower_fn(state, loss_fn, augmentation, micro_batches)
    local_towers = towers_here(strategy, towers)

    def on_replica(shards, rates, image_size, stop_signal) -> ReplicaResult:
        """Run the tower of this replica, then meet the other replicas."""
        context = tf.distribute.get_replica_context()
        tower = towers[int(tf.get_static_value(context.replica_id_in_sync_group))]
        shard = shards[local_towers.index(tower)]
        with tf.name_scope(tower.name):
            result = train_on_tower(shard, tuple(rates), image_size)

        with tf.name_scope("all_reduce"):  # the replicas meet here
            means = _all_reduce_mean(context, [*result.gradients, *result.statistics])
            num_weights = len(result.gradients)
            scalars = result.losses, result.num_correct, stop_signal
            losses, num_correct, signals = _all_gather(context, scalars, tower, len(towers))
        return ReplicaResult(
            gradients=means[:num_weights],
            statistics=means[num_weights:],
            losses=losses,
            num_correct=num_correct,
            signals=signals,
            tower_gradients=result.gradients,
        )

    def update_replica(_, gradients, statistics, rates, finite) -> tuple[tf.Tensor, tf.Tensor]:
        pairs = list(zip(gradients, state.weights, strict=True))
        return state.apply(pairs, statistics, rates, finite)

    def train_step(batch, rates, image_size, stop_signal) -> StepMetrics:
        shards = split_batch(batch, local_towers)
        distributed = strategy.run(on_replica, (shards, rates, image_size, stop_signal))
        # statistics stay distributed: those that are None or integers are not the same everywhere
        replicas = _by_replica(strategy, distributed._replace(statistics=[]))
        first = replicas[0]  # what was exchanged is the same on all

        outcome = strategy.extended.update(
            state.step,
            update_replica,
            args=(distributed.gradients, distributed.statistics, rates, all_finite(first.losses)),
        )
        updated, gradient_norm = _by_replica(strategy, outcome)[0]

        num_examples = batch.labels.shape[0] * len(towers) // len(local_towers)
        accuracy = tf.reduce_sum(first.num_correct) / num_examples
        metrics = make_step_metrics(first.losses, accuracy, updated, gradient_norm)
        return metrics._replace(
            gradients=as_tensors(first.gradients),
            tower_gradients=[as_tensors(replica.tower_gradients) for replica in replicas],
            stop_signal=None if first.signals is None else tf.reduce_max(first.signals),
        )

    def without_signal(batch, rates, image_size=0) -> StepMetrics:
        return train_step(batch, rates, image_size, None)

    # a signal is exchanged on a cluster only, and a traced function needs each of its arguments
    if len(local_towers) == len(towers):
        return tf.function(without_signal, autograph=False)
    return tf.function(train_step, autograph=False)


def towers_here(strategy: tf.distribute.Strategy, towers: Sequence[Tower]) -> list[Tower]:
    """Return the towers of this process, of all K towers."""
    mine = strategy.extended.worker_devices
    if len(mine) == len(towers):  # this process alone, whose devices have short names
        return list(towers)
    return [tower for tower in towers if tower.device in mine]


def _all_reduce_mean(
    context: tf.distribute.ReplicaContext, tensors: Sequence[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """Return the means over all replicas; None and integers stay as they are."""
    floating = [t for t in tensors if t is not None and t.dtype.is_floating]
    reduced = iter(context.all_reduce(MEAN, floating) if floating else ())
    means: list[tf.Tensor | None] = []
    for tensor in tensors:
        is_floating = tensor is not None and tensor.dtype.is_floating
        means.append(next(reduced) if is_floating else tensor)
    return means


def _all_gather(
    context: tf.distribute.ReplicaContext, scalars: Any, tower: Tower, num_towers: int
) -> Any:
    """Return a structure of scalars as [K] float32 of all replicas; None stays None."""
    leaves = tf.nest.flatten(scalars)
    row = tf.stack([tf.cast(leaf, tf.float32) for leaf in leaves if leaf is not None])

    # each replica fills a row of its own; the sum over the replicas is the whole table
    rows_above = tower.index
    rows_below = num_towers - tower.index - 1
    table = tf.pad(row[None], [[rows_above, rows_below], [0, 0]])
    table = context.all_reduce(SUM, table)

    columns = iter(tf.unstack(table, axis=1))
    gathered = [None if leaf is None else next(columns) for leaf in leaves]
    return tf.nest.pack_sequence_as(scalars, gathered)


def _by_replica(strategy: tf.distribute.Strategy, values: Any) -> list:
    """Split a structure of per-replica values into one structure for each replica in this
    process.
    """
    count = len(strategy.extended.worker_devices)
    leaves = []
    for leaf in tf.nest.flatten(values):
        local = strategy.experimental_local_results(leaf)
        leaves.append(local if len(local) == count else local * count)  # a None is there once
    return [tf.nest.pack_sequence_as(values, replica) for replica in zip(*leaves, strict=True)]
