"""Training on the hardest part of each batch: a small net beside the large one, the proxy, says which that is.

The proxy trains on all that is drawn, on the same towers, a step before each of the large net's, which so takes the
gradients of a part of the examples alone. K towers pick what one picks but for two things: losses as near as rounding,
and batch norm, which sees a tower's share.

Source: K. Jordan's CIFAR-10 records of 2024 (airbench96), where the proxy picks the harder half of every batch in a run
of its own before the large net's, and moves at every fourth batch, by its harder half.
"""

from collections.abc import Callable

import tensorflow as tf

from cifar_towers.data.batches import Batch
from cifar_towers.towers.placement import HOST
from cifar_towers.training.results import PROXY, HardExamples, StepMetrics


def select_hard_examples(
    update: Callable[..., StepMetrics], proxy_update: Callable[..., StepMetrics], count: int
) -> Callable:
    """`update`, made with the `count` examples of each batch that have the highest losses by the proxy as it is before
    it makes its own update, with all. Of losses that are the same the first counts as the highest.

    Both get the same rates, so a group of the proxy's that the large net does not have rests.

    Args:
      update, proxy_update: those of `step.make_update`, the second with an `example_loss`.
    """

    def both(batch: Batch, rates: dict[str, tf.Tensor], side: int = 0, look=None) -> StepMetrics:
        with tf.name_scope(PROXY):
            proxy = proxy_update(batch, rates, side)
        with tf.name_scope("hardest"), tf.device(HOST):
            rows = tf.sort(tf.math.top_k(proxy.example_losses, count, sorted=False).indices)
            hardest = take(batch, rows)
        hard_examples = HardExamples(rows, proxy._replace(example_losses=None))
        return update(hardest, rates, side, look)._replace(hard_examples=hard_examples)

    return both


def take(batch: Batch, rows: tf.Tensor) -> Batch:
    """These rows of a batch."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)
