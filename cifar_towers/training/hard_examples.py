"""Training on the hardest part of each batch: the examples with the highest losses under a proxy,
a small net that trains beside the large one, on all examples.

Source: K. Jordan's CIFAR-10 records of 2024 (airbench96). There a separate run of the proxy selects
the harder half of every batch first, and the proxy is updated at every fourth batch only.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import Batch
from cifar_towers.towers import (
    Tower,
    run_micro_batches,
    run_on_towers,
    run_on_towers_synchronized,
    split_batch,
)
from cifar_towers.towers.placement import HOST
from cifar_towers.training.state import TrainState, xla_compiled
from cifar_towers.training.step import StepMetrics, Update, augment_shard, copy_to_host

PROXY = "proxy"  # prefix of the proxy's variables and operations, and of its values in reports


class HardExamples(NamedTuple):
    """The proxy, and the function that selects examples by it.

    `select` is a `tf.function` (batch, rates, image_size) -> (the hardest examples, metrics of the
    proxy's step on the whole batch). The proxy gets the learning rates of the large net, so that a
    parameter group that the large net lacks is frozen.
    """

    proxy: TrainState
    select: Any


def make_hard_examples(
    proxy: TrainState,
    update: Update,
    towers: Sequence[Tower],
    example_loss: Callable,
    augmentation: Augmentation,
    count: int,
    *,
    micro_batches: int,
    synchronized: bool,
) -> HardExamples:
    """Return the selection of the `count` examples of each batch with the highest losses.

    The losses are of a forward pass in training, on the towers, before the proxy's step.

    Args:
      update: the proxy's step.
      example_loss: function (labels, logits) -> [b] losses.
      micro_batches, synchronized: as of the proxy's step; see `make_update`.
    """
    run_towers = run_on_towers_synchronized if synchronized else run_on_towers

    def losses_on_tower(tower: Tower, shard: Batch, image_size: int) -> tf.Tensor:
        def losses_of_images(shard: Batch, weights: list, non_trainable: list) -> tf.Tensor:
            def on_part(part: Batch) -> tf.Tensor:
                logits, _, _ = proxy.call(weights, non_trainable, part)
                return example_loss(part.labels, logits)

            return run_micro_batches(on_part, shard, micro_batches, add=_join)

        weights, non_trainable = proxy.read_variables()
        shard = augment_shard(augmentation, shard, image_size)
        return xla_compiled(losses_of_images, proxy.jit_compile)(shard, weights, non_trainable)

    def select(
        batch: Batch, rates: Mapping[str, tf.Tensor], image_size: int = 0
    ) -> tuple[Batch, StepMetrics]:
        on_tower = functools.partial(losses_on_tower, image_size=image_size)
        with tf.name_scope("hardest"):
            losses = run_towers(on_tower, towers, split_batch(batch, towers))
            with tf.device(HOST):
                hardest = tf.math.top_k(tf.concat(losses, 0), count, sorted=False).indices
                selected = gather_rows(batch, tf.sort(hardest))
        with tf.name_scope(PROXY):
            metrics, _ = update(batch, rates, image_size)
        return selected, copy_to_host(metrics)

    return HardExamples(proxy, tf.function(select, autograph=False))


def gather_rows(batch: Batch, rows: tf.Tensor) -> Batch:
    """Return the examples of a batch at some rows."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)


def _join(earlier: tf.Tensor, later: tf.Tensor) -> tf.Tensor:
    return tf.concat([earlier, later], 0)
