"""Split a batch over the towers and run one function on each."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.collectives import unsynchronized
from cifar_towers.towers.devices import Tower
from cifar_towers.towers.placement import HOST


def split_batch(batch: Any, towers: Sequence[Tower], allow_uneven: bool = False) -> list[Any]:
    """Split every tensor or NumPy array of a structure on axis 0, in host memory: [B, ...] -> K
    shards of [B/K, ...].

    A single shard stays where it is.

    Args:
      allow_uneven: accept a B that K does not divide; the first B mod K shards then have one
        example more. The gradients of their mean losses need weights:
        `average_gradients(tower_grads, weights=[examples, ...])`.

    Raises:
      ValueError: axis 0 is unknown or not the same in all tensors; there are fewer examples than
        towers; or the shards would be uneven, without `allow_uneven`.
    """
    with tf.name_scope("split_batch"):
        return _split(batch, len(towers), allow_uneven)


def run_on_towers(
    fn: Callable[[Tower, Any], Any], towers: Sequence[Tower], shards: Sequence[Any]
) -> list[Any]:
    """Call `fn(tower, shard)` for each of K towers, in its device and name scope, and return the
    [K] results in order.

    Call it inside one `tf.function`: there the towers run side by side, but eagerly one after
    another. `fn` must compute its gradients itself, so that the backward pass is on the tower's
    device too. It must have no side effects: a tower that writes to a variable makes the next one
    wait.

    Raises:
      ValueError: there is not one shard per tower.
    """
    results = []
    for tower, shard in zip(
        towers, shards, strict=True
    ):  # traced in turn; when the graph runs, none waits
        with tf.device(tower.device), tf.name_scope(tower.name), unsynchronized(len(towers)):
            results.append(fn(tower, shard))
    return results


def run_micro_batches(
    fn: Callable[[Any], Any], shard: Any, count: int, add: Callable[[Any, Any], Any]
) -> Any:
    """Split a shard into `count` micro-batches of equal size, call `fn` on each, and return the sum
    of the results.

    When the graph runs, each micro-batch waits for the sum so far. Memory then holds the
    activations of one micro-batch at a time, and one sum.

    Args:
      add: function (sum so far, result) -> sum.

    Raises:
      ValueError: axis 0 is unknown or not the same in all tensors, or `count` does not divide it.
    """
    if count == 1:
        return fn(shard)

    total = None
    for index, part in enumerate(_split(shard, count)):
        with tf.name_scope(f"part_{index}"):
            if index == 0:
                total = fn(part)
                continue
            earlier = [tensor for tensor in tf.nest.flatten(total) if tensor is not None]
            with tf.control_dependencies(earlier):
                part = tf.nest.map_structure(tf.identity, part)
            total = add(total, fn(part))
    return total


def _split(batch: Any, count: int, allow_uneven: bool = False) -> list[Any]:
    """Return `count` structures like `batch`, each with its part of the tensors."""
    with tf.device(HOST):  # TensorFlow has no GPU kernel that splits integers
        tensors = [tf.convert_to_tensor(array) for array in tf.nest.flatten(batch)]
        lengths = {tensor.shape[0] for tensor in tensors}
        if len(lengths) > 1 or None in lengths:
            raise ValueError(
                f"all tensors of a batch need one known length on axis 0; these have {lengths}"
            )
        length = lengths.pop()
        size, remainder = divmod(length, count)
        if not size or (remainder and not allow_uneven):
            raise ValueError(
                f"{length} examples cannot be split evenly into {count} parts: give a multiple of "
                f"{count}, as batches with drop_remainder=True, or split_batch(..., "
                "allow_uneven=True) and average_gradients(..., weights=[examples, ...])"
            )
        sizes = [size + (index < remainder) for index in range(count)]
        parts = [tf.split(tensor, sizes, axis=0) if count > 1 else [tensor] for tensor in tensors]
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*parts, strict=True)]
