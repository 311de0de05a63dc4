"""Training on the hardest part of each batch: the examples with the highest losses under a proxy,
a small net that trains beside the large one, on all examples.

Source: K. Jordan's CIFAR-10 records of 2024 (airbench96). There a separate run of the proxy selects
the harder half of every batch first, and the proxy is updated at every fourth batch only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from cifar_towers.training.state import TrainState
from cifar_towers.training.step import StepMetrics, Update, augment_shard, copy_to_host
from cifar_towers.xla import xla_compiled

PROXY = "proxy"  # prefix of the proxy's variables and operations, and of its values in reports


class HardExamples:
    """The selection of the `count` examples of each batch that have the highest losses under the
    proxy, and the proxy's training.

    The losses are of a forward pass in training, on the towers, before the proxy's step.

    Args:
      proxy: the proxy's variables. It gets the learning rates of the large net. A parameter group
        that the large net lacks has none, and is not updated.
      update: the proxy's step.
      example_loss: function (labels, logits) -> [b] losses.
      micro_batches, synchronized: as of the proxy's step; see `make_update`.

    Attributes:
      select: `tf.function` (batch, rates, image_size) -> (the hardest examples, metrics of the
        proxy's step on the whole batch).
    """

    def __init__(
        self,
        proxy: TrainState,
        update: Update,
        towers: Sequence[Tower],
        example_loss: Callable,
        augmentation: Augmentation,
        count: int,
        *,
        micro_batches: int,
        synchronized: bool,
    ):
        self.proxy = proxy
        self.update = update
        self.towers = towers
        self.example_loss = example_loss
        self.augmentation = augmentation
        self.count = count
        self.micro_batches = micro_batches
        self.run_towers = run_on_towers_synchronized if synchronized else run_on_towers
        self.select: Any = tf.function(self._select, autograph=False)

    def _select(
        self, batch: Batch, rates: Mapping[str, tf.Tensor], image_size: int = 0
    ) -> tuple[Batch, StepMetrics]:
        def on_tower(tower: Tower, shard: Batch) -> tf.Tensor:
            return self._losses(shard, image_size)

        with tf.name_scope("hardest"):
            shards = split_batch(batch, self.towers)
            tower_losses = self.run_towers(on_tower, self.towers, shards)
            with tf.device(HOST):
                losses = tf.concat(tower_losses, 0)
                hardest = tf.math.top_k(losses, self.count, sorted=False).indices
                selected = gather_rows(batch, tf.sort(hardest))

        with tf.name_scope(PROXY):
            metrics, _ = self.update(batch, rates, image_size)
        return selected, copy_to_host(metrics)

    def _losses(self, shard: Batch, image_size: int) -> tf.Tensor:
        """Return the losses [b] of a tower's examples under the proxy."""

        def forward(shard: Batch, weights: list, non_trainable: list) -> tf.Tensor:
            def on_part(part: Batch) -> tf.Tensor:
                logits, _, _ = self.proxy.call(weights, non_trainable, part)
                return self.example_loss(part.labels, logits)

            return run_micro_batches(on_part, shard, self.micro_batches, add=_join)

        weights, non_trainable = self.proxy.read_variables()
        augmented = augment_shard(self.augmentation, shard, image_size)
        forward = xla_compiled(forward, self.proxy.jit_compile)
        return forward(augmented, weights, non_trainable)


def gather_rows(batch: Batch, rows: tf.Tensor) -> Batch:
    """Return the examples of a batch at some rows."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)


def _join(earlier: tf.Tensor, later: tf.Tensor) -> tf.Tensor:
    return tf.concat([earlier, later], 0)
