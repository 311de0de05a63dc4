"""Splitting a batch over the towers and running one function on each."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.devices import Tower


def split_batch(batch: Any, towers: Sequence[Tower]) -> list[Any]:
    """Cuts every tensor of a structure on axis 0, one shard a tower: [B, ...] -> K x [B/K, ...].

    Where K does not divide B, the first B mod K shards have one example more; weigh their gradients by their
    examples then.

    Raises:
      ValueError: a tensor without a known axis 0, tensors that differ in it, or fewer examples than towers.
    """
    tensors = tf.nest.flatten(batch)
    sizes = {tensor.shape[0] if tensor.shape.rank else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"all tensors of a batch need one known length on axis 0; these have {sorted(sizes, key=str)}")
    (examples,) = sizes
    if examples < len(towers):
        raise ValueError(f"{examples} examples cannot be shared by {len(towers)} towers")
    shard_sizes = [examples // len(towers) + (k < examples % len(towers)) for k in range(len(towers))]
    with tf.name_scope("split_batch"):
        shards_of = [tf.split(tensor, shard_sizes, axis=0) for tensor in tensors]
    return [tf.nest.pack_sequence_as(batch, shard) for shard in zip(*shards_of, strict=True)]


def run_on_towers(fn: Callable[[Tower, Any], Any], towers: Sequence[Tower], shards: Sequence[Any]) -> list[Any]:
    """Calls `fn(tower, shard)` for each tower, on its device and under its name scope; the results in tower order.

    Call it inside one `tf.function`: there the towers run side by side, eagerly one after another. `fn` must take
    its gradients itself, so that the backward pass lands on the tower's device too, and must leave nothing behind
    but its result: a tower that writes to a variable makes the next one wait.
    """
    results = []
    for tower, shard in zip(towers, shards, strict=True):
        with tf.device(tower.device), tf.name_scope(tower.name):
            results.append(fn(tower, shard))
    return results
