"""The same step under `tf.distribute`: a replica for every tower, each with its own copy of all variables, in one
process or in several.

Nothing is shared, so nothing is read from afar; the gradients meet in an all-reduce, and every replica makes the same
update to its own copy. Here towers are called replicas, as TensorFlow calls them.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.towers import Tower, split_batch
from cifar_towers.towers.devices import plan_devices, prepare_devices
from cifar_towers.training.diagnostics import tower_gradient_stats
from cifar_towers.training.results import StepMetrics, TowerGradientStats
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import TowerResult, all_finite, apply_update, make_tower_fn, metrics


def make_strategy(towers: Sequence[Tower], all_reduce: str = "auto") -> tf.distribute.MirroredStrategy:
    """A mirrored strategy over the towers' devices.

    `nccl` and `hierarchical` reduce over the GPUs' links; `one_device` adds up on the first device and copies back.
    `auto` is NCCL where every tower has a GPU of its own, one device elsewhere.

    Raises:
      ValueError: NCCL is asked for and the towers do not have a GPU each, or a hierarchical reduction of an odd number.
    """
    own_gpus = all("GPU" in tower.device for tower in towers) and (
        len(towers) <= len(tf.config.get_visible_devices("GPU"))
    )
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
    operations = {
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
        "one_device": tf.distribute.ReductionToOneDevice,
    }
    return tf.distribute.MirroredStrategy([tower.device for tower in towers], operations[all_reduce]())


def make_multi_worker_strategy(
    addresses: Sequence[str], index: int, num_gpus: int = 0, all_reduce: str = "auto", **device_options
) -> tuple[tf.distribute.MultiWorkerMirroredStrategy, list[Tower]]:
    """A strategy that joins W processes, and the towers of all, in the order of the workers. Waits for all of them.

    Each worker opens a port that asks nobody who it is, on every interface of its machine.

    Args:
      addresses: [W] host:port of each worker. index: which of them this process is.
      num_gpus: towers of each worker; 0: one for each GPU, or the one CPU.
      all_reduce: `ring` over the network, `nccl` between GPUs, or `auto`.
      device_options: those of `prepare_devices`.

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
    prepare_devices(plan_devices(num_gpus or max(gpus, 1), gpus), **device_options)
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
    """What `make_train_step` makes, for a `state` that was built in `strategy.scope()`.

    Args:
      towers: K, in the order of the strategy's replicas. Where other processes have some of them, the function takes
        this process's part of the batch and gives the metrics of all; only `diagnostics` is of the towers here. It then
        takes a fifth argument too, a number; the largest that any process gave is `stop_signal` in the metrics of all.
    """
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches)
    here = towers_here(strategy, towers)

    def on_replica(side: int, groups: Sequence[str], shards: Sequence[Batch], look, asked) -> dict:
        context = tf.distribute.get_replica_context()
        tower = towers[int(tf.get_static_value(context.replica_id_in_sync_group))]
        with tf.name_scope(tower.name):
            result = tower_fn(side, groups, tower, (shards[here.index(tower)], look))
        gradients = [gradient for gradient, _ in result.gradients]
        floating = [s if s is not None and s.dtype.is_floating else None for s in result.statistics]
        with tf.name_scope("all_reduce"):  # the replicas meet here
            gradients, means = _mean(context, gradients, [] if batch_statistics == "final" else floating)
            said = _all_say(context, [*result.losses.values(), result.correct, result.bad, asked], tower, len(towers))
            if batch_statistics == "final":
                means = _of_final(context, floating, tower, len(towers))
        pairs = list(zip(gradients, state.weights, strict=True))
        return {
            "alike": None if look is None else tower_gradient_stats(look, [result.gradients], pairs),
            "gradients": gradients,
            "statistics": [own if mean is None else mean for mean, own in zip_longest(means, result.statistics)],
            "said": said,
            "look": result.look,
        }

    def update(_, *arguments) -> dict:
        return _update(state, *arguments)

    @tf.function(autograph=False)
    def train_step(batch: Batch, rates: dict[str, tf.Tensor], side: int = 0, look=None, asked=0.0) -> StepMetrics:
        outcome = strategy.run(on_replica, (side, tuple(rates), split_batch(batch, here), look, asked))
        results, asked = _results(_by_replica(strategy, outcome["said"])[0], list(state.loss_averages.sums))
        results[-1] = results[-1]._replace(look=_by_replica(strategy, outcome["look"])[-1])
        arguments = rates, results[-1].losses, all_finite(results), look
        arguments = outcome["gradients"], outcome["statistics"], *arguments
        updated = strategy.extended.update(state.step, update, args=arguments)
        updated = _by_replica(strategy, updated)[0]
        alike = None
        if look is not None:
            replicas = _by_replica(strategy, outcome["alike"])
            alike = TowerGradientStats(*(tf.concat(field, 0) for field in zip(*replicas, strict=True)))
        told = updated["told"], updated["averages"], updated.get("seen"), alike
        examples = batch.labels.shape[0] * len(towers) // len(here)
        return metrics(results, *told, examples)._replace(stop_signal=asked)

    return train_step


def _update(state: TrainState, gradients, statistics, rates, losses, finite, look) -> dict:
    """What every replica does to its own copy."""
    pairs = state.loss_scale.unscale(list(zip(gradients, state.weights, strict=True)))
    told, averages, seen = apply_update(state, pairs, statistics, rates, losses, finite, look)
    return {"told": told, "averages": averages} | ({"seen": seen} if seen else {})


def towers_here(strategy: tf.distribute.Strategy, towers: Sequence[Tower]) -> list[Tower]:
    """Those of all K towers that are in this process."""
    mine = strategy.extended.worker_devices
    return [tower for tower in towers if tower.device in mine] if len(mine) < len(towers) else list(towers)


def _mean(context, *lists: Sequence) -> list[list]:
    """Lists of tensors, some of them None, as their means over all replicas."""
    present = [tensor for tensors in lists for tensor in tensors if tensor is not None]
    means = iter(context.all_reduce(tf.distribute.ReduceOp.MEAN, present))
    return [[None if tensor is None else next(means) for tensor in tensors] for tensors in lists]


def _all_say(context, numbers: Sequence, tower: Tower, towers: int) -> tf.Tensor:
    """[K, n] float32: the n numbers of each replica, on all. Nothing is rounded, as the rest of each sum is zeros."""
    row = tf.stack([tf.cast(number, tf.float32) for number in numbers])
    table = tf.pad(row[None], [[tower.index, towers - 1 - tower.index], [0, 0]])
    return context.all_reduce(tf.distribute.ReduceOp.SUM, table)


def _of_final(context, statistics: Sequence, tower: Tower, towers: int) -> list:
    """The final replica's, on all."""
    final = tower.index == towers - 1
    own = [None if s is None else s if final else tf.zeros_like(s) for s in statistics]
    present = [tensor for tensor in own if tensor is not None]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present) if present else ())
    return [None if tensor is None else next(sums) for tensor in own]


def _results(said: tf.Tensor, terms: Sequence[str]) -> tuple[list[TowerResult], tf.Tensor]:
    """What `_all_say` brought together, as results without gradients; and the largest number that was asked."""
    results = []
    for row in tf.unstack(said):
        *losses, correct, bad, _ = tf.unstack(row)
        losses = dict(zip(terms, losses, strict=True))
        results.append(TowerResult(losses, [], [], correct, tf.cast(bad, tf.int32)))
    return results, tf.reduce_max(said[:, -1])


def _by_replica(strategy: tf.distribute.Strategy, values) -> list:
    """A structure of per-replica values -> one structure for each replica that is in this process."""
    leaves = tf.nest.flatten(values)
    each = [strategy.experimental_local_results(leaf) for leaf in leaves]
    count = len(strategy.extended.worker_devices)
    each = [(leaf * count if len(leaf) < count else leaf) for leaf in each]  # one value for all: a None
    return [tf.nest.pack_sequence_as(values, of_one) for of_one in zip(*each, strict=True)]
