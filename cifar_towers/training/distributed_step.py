"""The training step under `tf.distribute`: one replica for each tower, in one process or in several.

Every replica has its own copy of all variables. The gradients meet in an all-reduce, and each replica applies the same
update to its copy.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import make_towers, on_gpus
from cifar_towers.training.diagnostics import tower_gradient_stats
from cifar_towers.training.results import ForwardDiagnostics, StepMetrics, TowerGradientStats
from cifar_towers.training.state import TrainState, UpdateResult
from cifar_towers.training.step import StepOptions, TowerResult, all_finite, make_step_metrics, make_tower_fn

MEAN, SUM = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM
CROSS_DEVICE_OPS = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    "one_device": tf.distribute.ReductionToOneDevice,
}


def make_strategy(towers: Sequence[Tower], all_reduce: str = "auto") -> tf.distribute.MirroredStrategy:
    """A mirrored strategy over the towers' devices.

    `nccl` and `hierarchical` reduce over the GPUs' links; `one_device` adds up on the first device and copies back.
    `auto` is NCCL where every tower has a GPU of its own, one device elsewhere.

    Raises:
      ValueError: NCCL is asked for and the towers do not have a GPU each, or a hierarchical reduction of an odd number.
    """
    own_gpus = on_gpus(towers) and len(towers) <= len(tf.config.get_visible_devices("GPU"))
    if all_reduce == "nccl" and not own_gpus:
        raise ValueError(
            f"all_reduce=nccl joins GPUs, and not each of the {len(towers)} towers has one; take auto or one_device"
        )
    if all_reduce == "hierarchical" and len(towers) > 1 and len(towers) % 2:  # TensorFlow would leave the last one out
        raise ValueError(
            f"all_reduce=hierarchical halves the towers, and {len(towers)} are odd; take auto or one_device"
        )
    if all_reduce == "auto":
        all_reduce = "nccl" if own_gpus and len(towers) > 1 else "one_device"
    return tf.distribute.MirroredStrategy([tower.device for tower in towers], CROSS_DEVICE_OPS[all_reduce]())


def make_multi_worker_strategy(
    addresses: Sequence[str], index: int, num_gpus: int = 0, all_reduce: str = "auto", **device_options
) -> tuple[tf.distribute.MultiWorkerMirroredStrategy, list[Tower]]:
    """A strategy that joins W processes, and the towers of all, in the order of the workers. Waits for all of them.

    Each worker opens a port that asks nobody who it is, on every interface of its machine.

    Args:
      addresses: [W] host:port of each worker. index: which of them this process is.
      num_gpus: towers of each worker; 0: one for each GPU, or the one CPU.
      all_reduce: `ring` over the network, `nccl` between GPUs, or `auto`.
      device_options: keyword arguments of `make_towers`.

    Raises:
      ValueError: a worker is to have more towers than TensorFlow lets it have, or GPUs that are not there.
    """
    gpus = len(tf.config.get_visible_devices("GPU"))
    if num_gpus > max(gpus, 1):
        have = f"{gpus} GPUs" if gpus else "no GPU, and a worker's CPU is one tower"
        raise ValueError(f"num_gpus={num_gpus}: this worker has {have}; start more workers instead")
    if not gpus and (all_reduce == "nccl" or (num_gpus and not device_options.get("soft_placement", True))):
        asked = "all_reduce=nccl" if all_reduce == "nccl" else f"num_gpus={num_gpus}"
        raise ValueError(f"{asked} asks for GPUs, and this worker has none; leave it")
    make_towers(num_gpus, multi_worker=True, **device_options)
    implementation = getattr(tf.distribute.experimental.CommunicationImplementation, all_reduce.upper())
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(addresses)}), task_type="worker", task_id=index, rpc_layer="grpc"
        ),
        tf.distribute.experimental.CommunicationOptions(implementation=implementation),
    )
    mine = strategy.extended.worker_devices
    everyone = [
        device.replace(f"task:{index}", f"task:{worker}") for worker in range(len(addresses)) for device in mine
    ]
    return strategy, [Tower(place, device) for place, device in enumerate(everyone)]


class TowerScalars(NamedTuple):
    """Scalars of one tower in its own replica; after `_all_gather`, [K] of all towers on every replica."""

    losses: dict[str, tf.Tensor]
    num_correct: tf.Tensor
    nonfinite_index: tf.Tensor


class ReplicaResult(NamedTuple):
    """What one replica knows when all have met."""

    gradients: list[tf.Tensor | None]  # N, means
    non_trainable: list[tf.Tensor | None]
    towers: TowerScalars
    stop_signal: tf.Tensor | None
    tower_stats: TowerGradientStats | None  # its own
    diagnostics: ForwardDiagnostics | None  # its own


def make_mirrored_step(
    strategy: tf.distribute.Strategy,
    state: TrainState,
    towers: Sequence[Tower],
    loss_fn: Callable,
    augmentation: Augmentation,
    *,
    micro_batches: int = 1,
    batch_statistics: str = "mean",
) -> Callable[..., StepMetrics]:
    """As `make_train_step`, for K towers in the order of the replicas and a `state` built in `strategy.scope()`.

    Where other processes have some of the towers, it takes this process's part of the batch and returns the metrics of
    all; only `diagnostics` is of the towers here. It then also takes a `stop_signal`, and returns the largest of all.
    """
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches)
    local_towers = towers_here(strategy, towers)

    def on_replica(shards: Sequence[Batch], options: StepOptions, stop_signal: tf.Tensor | None) -> ReplicaResult:
        context = tf.distribute.get_replica_context()
        tower = towers[int(tf.get_static_value(context.replica_id_in_sync_group))]
        with tf.name_scope(tower.name):
            result = tower_fn(tower, shards[local_towers.index(tower)], options)
        return _meet(context, result, stop_signal, tower, len(towers), batch_statistics, options.collect_diagnostics)

    def update_replica(_, gradients, non_trainable, losses, learning_rates, finite, collect) -> UpdateResult:
        pairs = list(zip(gradients, state.weights, strict=True))
        return state.apply(pairs, non_trainable, losses, learning_rates, finite, collect)

    @tf.function(autograph=False)
    def train_step(batch, learning_rates, image_size=0, collect_diagnostics=None, stop_signal=None) -> StepMetrics:
        options = StepOptions(frozenset(learning_rates), image_size, collect_diagnostics)
        replicas = strategy.run(on_replica, (split_batch(batch, local_towers), options, stop_signal))
        local = _by_replica(strategy, replicas._replace(gradients=None, non_trainable=None))
        results = _tower_results(local[0].towers, len(towers), local[-1].diagnostics)
        losses, finite = results[-1].losses, all_finite(results)
        updated = strategy.extended.update(
            state.step,
            update_replica,
            args=(replicas.gradients, replicas.non_trainable, losses, learning_rates, finite, collect_diagnostics),
        )
        tower_stats = None
        if collect_diagnostics is not None:
            local_stats = [replica.tower_stats for replica in local]
            tower_stats = tf.nest.map_structure(lambda *values: tf.concat(values, 0), *local_stats)
        num_examples = batch.labels.shape[0] * len(towers) // len(local_towers)
        metrics = make_step_metrics(results, _by_replica(strategy, updated)[0], tower_stats, num_examples)
        return metrics._replace(stop_signal=local[0].stop_signal)

    return train_step


def _meet(
    context, result: TowerResult, stop_signal, tower: Tower, num_towers: int, batch_statistics: str, collect
) -> ReplicaResult:
    """Exchanges a tower's result with the other replicas."""
    gradients = [gradient for gradient, _ in result.gradients]
    floating = [s if s is not None and s.dtype.is_floating else None for s in result.non_trainable]
    with tf.name_scope("all_reduce"):  # the replicas meet here
        if batch_statistics == "final":
            (gradients,) = _all_reduce(context, MEAN, gradients)
            reduced = _from_final(context, floating, tower, num_towers)
        else:
            gradients, reduced = _all_reduce(context, MEAN, gradients, floating)
        scalars = TowerScalars(result.losses, result.num_correct, result.nonfinite_index)
        scalars, signals = _all_gather(context, (scalars, stop_signal), tower, num_towers)
    tower_stats = None
    if collect is not None:
        pairs = [(mean, variable) for mean, (_, variable) in zip(gradients, result.gradients, strict=True)]
        tower_stats = tower_gradient_stats(collect, [result.gradients], pairs)
    return ReplicaResult(
        gradients=gradients,
        non_trainable=[own if new is None else new for own, new in zip(result.non_trainable, reduced, strict=True)],
        towers=scalars,
        stop_signal=None if signals is None else tf.reduce_max(signals),
        tower_stats=tower_stats,
        diagnostics=result.diagnostics,
    )


def towers_here(strategy: tf.distribute.Strategy, towers: Sequence[Tower]) -> list[Tower]:
    """Those of all K towers that are in this process."""
    mine = strategy.extended.worker_devices
    return [tower for tower in towers if tower.device in mine] if len(mine) < len(towers) else list(towers)


def _all_reduce(context, operation: tf.distribute.ReduceOp, *lists: Sequence) -> list[list]:
    """Sums or means over all replicas of the tensors in some lists; None stays None."""
    present = [tensor for tensors in lists for tensor in tensors if tensor is not None]
    reduced = iter(context.all_reduce(operation, present) if present else ())
    return [[None if tensor is None else next(reduced) for tensor in tensors] for tensors in lists]


def _all_gather(context, scalars: Any, tower: Tower, num_towers: int) -> Any:
    """A structure of scalars -> of [K] float32 with the values of all replicas; None stays None.

    In one all-reduce, which rounds nothing: to each value only zeros are added.
    """
    leaves = tf.nest.flatten(scalars)
    row = tf.stack([tf.cast(leaf, tf.float32) for leaf in leaves if leaf is not None])
    table = tf.pad(row[None], [[tower.index, num_towers - 1 - tower.index], [0, 0]])
    columns = iter(tf.unstack(context.all_reduce(SUM, table), axis=1))
    return tf.nest.pack_sequence_as(scalars, [None if leaf is None else next(columns) for leaf in leaves])


def _from_final(context, values: Sequence, tower: Tower, num_towers: int) -> list:
    """The final replica's tensors on all replicas; None stays None."""
    final = tower.index == num_towers - 1
    own = [None if value is None else value if final else tf.zeros_like(value) for value in values]
    (sums,) = _all_reduce(context, SUM, own)
    return sums


def _tower_results(scalars: TowerScalars, num_towers: int, final_diagnostics) -> list[TowerResult]:
    """K results without gradients, as the metrics need them."""
    results = []
    for index in range(num_towers):
        losses, num_correct, nonfinite_index = tf.nest.map_structure(lambda values, index=index: values[index], scalars)
        results.append(TowerResult(losses, [], [], num_correct, tf.cast(nonfinite_index, tf.int32)))
    return [*results[:-1], results[-1]._replace(diagnostics=final_diagnostics)]


def _by_replica(strategy: tf.distribute.Strategy, values: Any) -> list:
    """A structure of per-replica values -> one structure for each replica in this process."""
    count = len(strategy.extended.worker_devices)
    leaves = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(values)]
    leaves = [leaf if len(leaf) == count else leaf * count for leaf in leaves]  # a None is there once
    return [tf.nest.pack_sequence_as(values, replica) for replica in zip(*leaves, strict=True)]
