"""The training step under `tf.distribute`: one replica for each tower, in one process or in
several.

Every replica has its own copy of all variables. The gradients meet in an all-reduce, and each
replica applies the same update to its copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.errors import UsageError
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import make_towers, on_gpus
from cifar_towers.training.state import TrainState, UpdateResult
from cifar_towers.training.step import (
    StepMetrics,
    TowerResult,
    Update,
    all_finite,
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
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches)
    local_towers = towers_here(strategy, towers)

    def on_replica(shards: Sequence[Batch], groups: frozenset[str], image_size: int, stop_signal):
        """Run the tower of this replica, then exchange its result with the other replicas."""
        context = tf.distribute.get_replica_context()
        tower = towers[int(tf.get_static_value(context.replica_id_in_sync_group))]
        with tf.name_scope(tower.name):
            result = tower_fn(tower, shards[local_towers.index(tower)], groups, image_size)
        own_gradients, new_values = result.gradients, result.non_trainable
        floating = [
            value if value is not None and value.dtype.is_floating else None for value in new_values
        ]
        with tf.name_scope("all_reduce"):  # the replicas meet here
            gradients, reduced = _all_reduce(context, own_gradients, floating)
            scalars = result.losses, result.num_correct
            scalars, signals = _all_gather(context, (scalars, stop_signal), tower, len(towers))
        losses, num_correct = scalars  # [K] each: those of all towers
        exchanged = result._replace(
            losses=losses,
            gradients=gradients,
            non_trainable=[
                own if new is None else new for own, new in zip(new_values, reduced, strict=True)
            ],
            num_correct=num_correct,
        )
        return exchanged, own_gradients, None if signals is None else tf.reduce_max(signals)

    def update_replica(_, gradients, non_trainable, losses, learning_rates, finite) -> UpdateResult:
        pairs = list(zip(gradients, state.weights, strict=True))
        return state.apply(pairs, non_trainable, losses, learning_rates, finite)

    def train_step(batch, learning_rates, image_size, stop_signal) -> StepMetrics:
        args = split_batch(batch, local_towers), frozenset(learning_rates), image_size, stop_signal
        reduced, own_gradients, signal = strategy.run(on_replica, args)
        local = _by_replica(strategy, (reduced._replace(non_trainable=[]), own_gradients, signal))
        results = _tower_results(local[0][0], len(towers))
        updated = strategy.extended.update(
            state.step,
            update_replica,
            args=(
                reduced.gradients,
                reduced.non_trainable,
                results[-1].losses,
                learning_rates,
                all_finite(results),
            ),
        )
        gradients = list(zip(local[0][0].gradients, state.weights, strict=True))
        num_examples = batch.labels.shape[0] * len(towers) // len(local_towers)
        metrics = make_step_metrics(
            results, gradients, _by_replica(strategy, updated)[0], num_examples
        )
        return metrics._replace(
            tower_gradients=[own for _, own, _ in local], stop_signal=local[0][2]
        )

    def without_signal(
        batch, learning_rates, image_size=0
    ) -> StepMetrics:  # a traced function has no defaults
        return train_step(batch, learning_rates, image_size, None)

    return tf.function(
        without_signal if len(local_towers) == len(towers) else train_step, autograph=False
    )


def towers_here(strategy: tf.distribute.Strategy, towers: Sequence[Tower]) -> list[Tower]:
    """Return the towers of this process, of all K towers."""
    mine = strategy.extended.worker_devices
    return (
        [tower for tower in towers if tower.device in mine]
        if len(mine) < len(towers)
        else list(towers)
    )


def _all_reduce(context, *lists: Sequence) -> list[list]:
    """Return the means over all replicas of the tensors in lists of gradients and batch statistics;
    None stays None.
    """
    present = [tensor for tensors in lists for tensor in tensors if tensor is not None]
    reduced = iter(context.all_reduce(MEAN, present) if present else ())
    return [[None if tensor is None else next(reduced) for tensor in tensors] for tensors in lists]


def _all_gather(context, scalars: Any, tower: Tower, num_towers: int) -> Any:
    """Return a structure of scalars as [K] float32 of all replicas, by one sum with zeros; None
    stays None.
    """
    leaves = tf.nest.flatten(scalars)
    row = tf.stack([tf.cast(leaf, tf.float32) for leaf in leaves if leaf is not None])
    table = tf.pad(row[None], [[tower.index, num_towers - 1 - tower.index], [0, 0]])
    columns = iter(tf.unstack(context.all_reduce(SUM, table), axis=1))
    return tf.nest.pack_sequence_as(
        scalars, [None if leaf is None else next(columns) for leaf in leaves]
    )


def _tower_results(gathered: TowerResult, num_towers: int) -> list[TowerResult]:
    """Return K results without gradients, as the metrics need them, from one whose scalars are
    [K].
    """
    scalars = gathered.losses, gathered.num_correct
    results = []
    for index in range(num_towers):
        losses, num_correct = tf.nest.map_structure(
            lambda values, index=index: values[index], scalars
        )
        results.append(TowerResult(losses, [], [], num_correct))
    return results


def _by_replica(strategy: tf.distribute.Strategy, values: Any) -> list:
    """Split a structure of per-replica values into one structure for each replica in this
    process.
    """
    count = len(strategy.extended.worker_devices)
    leaves = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(values)]
    leaves = [
        leaf if len(leaf) == count else leaf * count for leaf in leaves
    ]  # a None is there once
    return [tf.nest.pack_sequence_as(values, replica) for replica in zip(*leaves, strict=True)]
