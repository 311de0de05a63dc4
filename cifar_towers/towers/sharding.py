"""Split a batch over the towers and run one function on each."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.collectives import unsynchronized
from cifar_towers.towers.devices import Tower
from cifar_towers.towers.placement import HOST


def split_batch(batch: Any, towers: Sequence[Tower]) -> list[Any]:
    """Split every tensor or NumPy array of a structure on axis 0, in host memory: [B, ...] -> K
    shards of [B/K, ...].

    A single shard stays where it is.

    Raises:
      ValueError: axis 0 is unknown or not the same in all tensors, or K does not divide it.
    """
    with tf.name_scope("split_batch"):
        return _split_evenly(batch, len(towers))


def split_uneven_batch(batch: Any, towers: Sequence[Tower]) -> tuple[list[Any], list[int]]:
    """Split as `split_batch` does, a B that K need not divide: the first B mod K shards have one
    example more.

    The gradient of the mean loss of the batch is then a weighted mean:
    `average_gradients(tower_grads, weights=sizes)`.

    Returns:
      K shards, and the number of examples in each.

    Raises:
      ValueError: axis 0 is unknown or not the same in all tensors, or there are fewer examples than
        towers.
    """
    with tf.name_scope("split_batch"):
        length = _length(batch)
        size, remainder = divmod(length, len(towers))
        if size == 0:
            raise ValueError(f"{length} examples are too few for {len(towers)} towers")
        sizes = [size + 1] * remainder + [size] * (len(towers) - remainder)
        return _split(batch, sizes), sizes


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
    # traced in turn; when the graph runs, no tower waits for another
    for tower, shard in zip(towers, shards, strict=True):
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
    for index, part in enumerate(_split_evenly(shard, count)):
        with tf.name_scope(f"part_{index}"):
            if index == 0:
                total = fn(part)
                continue
            earlier = [tensor for tensor in tf.nest.flatten(total) if tensor is not None]
            with tf.control_dependencies(earlier):
                part = tf.nest.map_structure(tf.identity, part)
            total = add(total, fn(part))
    return total


def _split_evenly(batch: Any, count: int) -> list[Any]:
    """Return `count` structures like `batch`, with equal parts of the tensors."""
    length = _length(batch)
    if length == 0 or length % count != 0:
        raise ValueError(
            f"{length} examples cannot be split evenly into {count} parts: give a multiple of "
            f"{count}, as batches with drop_remainder=True, or use split_uneven_batch"
        )
    return _split(batch, [length // count] * count)


def _length(batch: Any) -> int:
    """Return the length of axis 0, which all tensors of a batch have in common."""
    lengths = {tensor.shape[0] for tensor in tf.nest.flatten(batch)}
    if len(lengths) > 1 or None in lengths:
        raise ValueError(
            f"all tensors of a batch need one known length on axis 0; these have {lengths}"
        )
    return lengths.pop()


def _split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a structure like `batch` for each size, with so many rows of the tensors."""
    with tf.device(HOST):  # TensorFlow has no GPU kernel that splits integers
        tensors = [tf.convert_to_tensor(array) for array in tf.nest.flatten(batch)]
        if len(sizes) == 1:
            return [tf.nest.pack_sequence_as(batch, tensors)]
        parts = [tf.split(tensor, list(sizes), axis=0) for tensor in tensors]
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*parts, strict=True)]
