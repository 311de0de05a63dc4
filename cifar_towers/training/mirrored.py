"""The same step under `tf.distribute`: a replica for every tower, each with its own copy of all variables.

Nothing is shared, so nothing is read from afar; the gradients meet in an all-reduce, and every replica makes the same
update to its own copy. Here towers are called replicas, as TensorFlow calls them.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.towers import Tower, split_batch
from cifar_towers.training.observing import look_at_towers
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import StepMetrics, all_finite, apply_update, make_tower_fn, metrics


def make_strategy(towers: Sequence[Tower], all_reduce: str = "auto") -> tf.distribute.MirroredStrategy:
    """A mirrored strategy over the towers' devices.

    `nccl` and `hierarchical` reduce over the GPUs' links; `one_device` adds up on the first device and copies back.
    `auto` is NCCL where every tower has a GPU of its own, one device elsewhere.

    Raises:
      ValueError: NCCL is asked for and the towers do not have a GPU each, or a hierarchical reduction of an odd number.
    """
    own_gpus = all("GPU" in tower.device for tower in towers) and (
        len(towers) <= len(tf.config.list_physical_devices("GPU"))
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
    """What `make_train_step` makes, for a `state` that was built in `strategy.scope()`."""
    tower_fn = make_tower_fn(state, loss_fn, augmentation, micro_batches)

    def on_replica(side: int, groups: Sequence[str], shards: Sequence[Batch], look) -> dict:
        context = tf.distribute.get_replica_context()
        tower = towers[int(tf.get_static_value(context.replica_id_in_sync_group))]
        with tf.name_scope(tower.name):
            result = tower_fn(side, groups, tower, (shards[tower.index], look))
        reduced = [gradient for gradient, _ in result.gradients]
        if batch_statistics == "mean":
            reduced += [s if s is not None and s.dtype.is_floating else None for s in result.statistics]
        present = [tensor for tensor in reduced if tensor is not None]
        with tf.name_scope("all_reduce"):
            present = iter(context.all_reduce(tf.distribute.ReduceOp.MEAN, present))  # the replicas meet here
        reduced = [None if tensor is None else next(present) for tensor in reduced]
        gradients, statistics = reduced[: len(state.weights)], reduced[len(state.weights) :]
        means = list(zip(gradients, state.weights, strict=True))
        return {
            "alike": None if look is None else look_at_towers(look, [result.gradients], means),
            "gradients": gradients,
            "statistics": [own if mean is None else mean for mean, own in zip_longest(statistics, result.statistics)],
            "said": result._replace(gradients=[], statistics=[]),
        }

    def update(_, gradients, statistics, rates, losses, finite, look):
        pairs = state.loss_scale.unscale(list(zip(gradients, state.weights, strict=True)))
        told, averages, seen = apply_update(state, pairs, statistics, rates, losses, finite, look)
        return {"told": told, "averages": averages} | ({"seen": seen} if seen else {})

    @tf.function(autograph=False)
    def train_step(batch: Batch, rates: dict[str, tf.Tensor], side: int = 0, look=None) -> StepMetrics:
        outcome = strategy.run(on_replica, (side, tuple(rates), split_batch(batch, towers), look))
        said = _by_replica(strategy, outcome["said"])
        statistics = outcome["statistics"]
        if batch_statistics != "mean":
            statistics = _by_replica(strategy, statistics)[-1]  # the final tower's
        arguments = outcome["gradients"], statistics, rates, said[-1].losses, all_finite(said), look
        updated = strategy.extended.update(state.step, update, args=arguments)
        updated = _by_replica(strategy, updated)[0]
        alike = None if look is None else tf.concat(_by_replica(strategy, outcome["alike"]), 0)
        told = updated["told"], updated["averages"], updated.get("seen"), alike
        return metrics(said, *told, batch.labels.shape[0])

    return train_step


def _by_replica(strategy: tf.distribute.Strategy, values) -> list:
    """A structure of per-replica values -> one structure a replica."""
    leaves = tf.nest.flatten(values)
    each = [strategy.experimental_local_results(leaf) for leaf in leaves]
    count = strategy.num_replicas_in_sync
    each = [(leaf * count if len(leaf) < count else leaf) for leaf in each]  # one value for all: a None
    return [tf.nest.pack_sequence_as(values, of_one) for of_one in zip(*each, strict=True)]
