"""Training on the hardest examples of each batch, as a small net beside the large one selects them: the proxy.

The proxy trains on the whole batch, on the same towers, before each step of the large net, which takes gradients of
the selected examples only. K towers select what one selects, but for rounding where losses are nearly equal and for
batch norm, which sees one tower's share.

Source: K. Jordan's CIFAR-10 records of 2024 (airbench96), where the proxy selects the harder half of every batch in a
run of its own before the large net's, and is updated at every fourth batch, by its harder half.
"""

from collections.abc import Callable

import tensorflow as tf

from cifar_towers.data.batches import Batch
from cifar_towers.towers.placement import HOST
from cifar_towers.training.results import PROXY, HardExamples, StepMetrics


def select_hard_examples(
    update: Callable[..., StepMetrics], proxy_update: Callable[..., StepMetrics], count: int
) -> Callable[..., StepMetrics]:
    """`update` on the `count` examples of each batch with the highest losses by the proxy, before its own update.

    Of equal losses the first counts as the highest. Both nets get the same learning rates, so a parameter group of the
    proxy that the large net lacks is frozen.

    Args:
      update, proxy_update: those of `step.make_update`, the second with an `example_loss`.
    """

    def update_both(batch: Batch, learning_rates, image_size: int = 0, collect_diagnostics=None) -> StepMetrics:
        with tf.name_scope(PROXY):
            proxy = proxy_update(batch, learning_rates, image_size)
        with tf.name_scope("hardest"), tf.device(HOST):
            rows = tf.sort(tf.math.top_k(proxy.example_losses, count, sorted=False).indices)
            selected = gather_rows(batch, rows)
        metrics = update(selected, learning_rates, image_size, collect_diagnostics)
        return metrics._replace(hard_examples=HardExamples(rows, proxy._replace(example_losses=None)))

    return update_both


def gather_rows(batch: Batch, rows: tf.Tensor) -> Batch:
    """The examples of a batch at these indices."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)
