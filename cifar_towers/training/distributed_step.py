"""The training step under `tf.distribute`: one replica for each tower, in one process or in
several.

Every replica has its own copy of all variables. The gradients meet in an all-reduce, and each
replica applies the same update to its copy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.errors import UsageError
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import make_towers, on_gpus
from cifar_towers.towers.gradients import Gradient
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import (
    StepGradients,
    StepMetrics,
    TowerResult,
    TowerStep,
    dense_gradients,
    is_integer,
    make_step_metrics,
)

MEAN = tf.distribute.ReduceOp.MEAN
SUM = tf.distribute.ReduceOp.SUM


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
        raise UsageError(f"num_gpus={num_gpus}, and this worker has no GPU; leave out num_gpus")
    make_towers(num_gpus, multi_worker=True, soft_placement=soft_placement)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(addresses)}),
            task_type="worker",
            task_id=index,
            rpc_layer="grpc",
        )
    )
    devices = []
    for worker in range(len(addresses)):
        for device in strategy.extended.worker_devices:  # of this worker
            devices.append(device.replace(f"task:{index}", f"task:{worker}"))
    return strategy, [Tower(place, device) for place, device in enumerate(devices)]


class ReplicaResult(NamedTuple):
    """The values that a replica has after it met the others."""

    gradients: list[Gradient]  # N means over the replicas
    non_trainable: list[tf.Tensor | None]  # S means over the replicas; integers are its own
    losses: dict[str, tf.Tensor]  # [K] of all replicas by term
    num_correct: tf.Tensor  # [K] of all replicas
    signals: tf.Tensor | None  # [K] of all replicas
    tower_result: TowerResult  # its own


class MirroredStep:
    """The step of K towers that are a strategy's replicas.

    If other processes have some of the towers, a step takes this process's part of the batch. Its
    metrics cover all towers, its towers' gradients those of this process.

    Args:
      state: built in `strategy.scope()`. The other arguments are those of `make_update`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        state: TrainState,
        towers: Sequence[Tower],
        loss_fn: Callable,
        augmentation: Augmentation,
        micro_batches: int = 1,
    ):
        self.strategy = strategy
        self.state = state
        self.towers = towers
        self.local_towers = local_towers_of(strategy, towers)
        self.tower_step = TowerStep(state, loss_fn, augmentation, micro_batches)

    def update(
        self, batch: Batch, rates: Mapping[str, tf.Tensor], image_size: int = 0
    ) -> tuple[StepMetrics, StepGradients]:
        """Run a step whose towers are all in this process; see `make_update`."""
        return self.update_with_signal(batch, rates, image_size, None)

    def update_with_signal(
        self,
        batch: Batch,
        rates: Mapping[str, tf.Tensor],
        image_size: int,
        stop_signal: tf.Tensor | None,
    ) -> tuple[StepMetrics, StepGradients]:
        """Run a step of several processes. Each passes a signal in, and all get the largest."""
        shards = split_batch(batch, self.local_towers)
        arguments = shards, image_size, stop_signal
        distributed = self.strategy.run(self._on_replica, arguments)
        # non-trainable values stay distributed: None and integers differ between replicas
        replicas = _by_replica(self.strategy, distributed._replace(non_trainable=[]))
        first = replicas[0]  # what was exchanged is the same on all

        tower_losses = first.losses["total_loss"]
        outcome = self.strategy.extended.update(
            self.state.step,
            self._apply_on_replica,
            args=(distributed.gradients, distributed.non_trainable, rates, tower_losses),
        )
        updated, gradient_norm = _by_replica(self.strategy, outcome)[0]

        num_examples = batch.labels.shape[0] * len(self.towers) // len(self.local_towers)
        metrics = make_step_metrics(
            first.losses, first.num_correct, num_examples, updated, gradient_norm
        )
        if first.signals is not None:
            metrics = metrics._replace(stop_signal=tf.reduce_max(first.signals))
        results = [replica.tower_result for replica in replicas]
        return metrics, dense_gradients(first.gradients, results)

    def _on_replica(
        self,
        shards: Sequence[Batch],
        image_size: int,
        stop_signal: tf.Tensor | None,
    ) -> ReplicaResult:
        """Run the tower of this replica, then meet the other replicas."""
        context = tf.distribute.get_replica_context()
        tower = self.towers[int(tf.get_static_value(context.replica_id_in_sync_group))]
        shard = shards[self.local_towers.index(tower)]
        with tf.name_scope(tower.name):
            result = self.tower_step(shard, image_size)

        with tf.name_scope("all_reduce"):  # the replicas meet here
            values = result.gradients, result.non_trainable
            gradients, non_trainable = _all_reduce_mean(context, values)
            scalars = result.losses, result.num_correct, stop_signal
            losses, num_correct, signals = _all_gather(context, scalars, tower, len(self.towers))
        return ReplicaResult(gradients, non_trainable, losses, num_correct, signals, result)

    def _apply_on_replica(
        self,
        _: tf.Variable,
        gradients: Sequence[Gradient],
        non_trainable: Sequence[tf.Tensor | None],
        rates: Mapping[str, tf.Tensor],
        tower_losses: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Apply the update to this replica's copy of the variables."""
        pairs = list(zip(gradients, self.state.weights, strict=True))
        return self.state.apply(pairs, non_trainable, rates, tower_losses)


def local_towers_of(strategy: tf.distribute.Strategy, towers: Sequence[Tower]) -> list[Tower]:
    """Return the towers of this process, of all K towers."""
    mine = strategy.extended.worker_devices
    if len(mine) == len(towers):  # this process alone, whose devices have short names
        return list(towers)
    return [tower for tower in towers if tower.device in mine]


def _all_reduce_mean(context: tf.distribute.ReplicaContext, values: Any) -> Any:
    """Return the means over all replicas of a structure of tensors; None and integers stay as they
    are.
    """

    def is_reduced(leaf: Gradient) -> bool:
        return leaf is not None and not is_integer(leaf)

    leaves = tf.nest.flatten(values)
    places = [place for place, leaf in enumerate(leaves) if is_reduced(leaf)]
    if places:
        means = context.all_reduce(MEAN, [leaves[place] for place in places])
        for place, mean in zip(places, means, strict=True):
            leaves[place] = mean
    return tf.nest.pack_sequence_as(values, leaves)


def _all_gather(
    context: tf.distribute.ReplicaContext, scalars: Any, tower: Tower, num_towers: int
) -> Any:
    """Return a structure of scalars as [K] float32 of all replicas; None stays None."""
    leaves = tf.nest.flatten(scalars)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]
    row = tf.stack([tf.cast(leaves[place], tf.float32) for place in places])

    # each replica fills a row of its own; the sum over the replicas is the whole table
    rows_above = tower.index
    rows_below = num_towers - tower.index - 1
    table = tf.pad(row[None], [[rows_above, rows_below], [0, 0]])
    table = context.all_reduce(SUM, table)

    for place, column in zip(places, tf.unstack(table, axis=1), strict=True):
        leaves[place] = column
    return tf.nest.pack_sequence_as(scalars, leaves)


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
