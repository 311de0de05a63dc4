"""Split a batch over the towers and run one function on each."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.collectives import unsynchronized
from cifar_towers.towers.devices import Tower
from cifar_towers.towers.placement import HOST


def split_batch(
    batch: Any, towers: Sequence[Tower], allow_uneven: bool = False, sizes: Sequence[int] | None = None
) -> list[Any]:
    """Split every tensor or NumPy array of a structure on axis 0, in host memory: [B, ...] -> K shards of [B/K, ...].

    Args:
      allow_uneven: accept a B that K does not divide; the first B mod K shards then have one example more. The
        gradients of their mean losses need weights: `average_gradients(tower_grads, weights=[examples, ...])`.
      sizes: [K], the number of examples in each shard; by default they are equal.

    Raises:
      ValueError: axis 0 is unknown or not the same in all tensors; there are fewer examples than towers; the shards
        would be uneven, without `allow_uneven` or `sizes`; or `sizes` are not K positive numbers that add up to B.
    """
    with tf.name_scope("split_batch"):
        tensors, examples = _as_tensors(batch)
        if examples < len(towers):
            raise ValueError(f"{examples} examples cannot be shared by {len(towers)} towers")
        if not sizes:
            size, remainder = divmod(examples, len(towers))
            sizes = [size + (index < remainder) for index in range(len(towers))]
            if len(set(sizes)) > 1 and not allow_uneven:
                even = examples - examples % len(towers)
                raise ValueError(
                    f"{examples} examples cannot be shared evenly by {len(towers)} towers: give {even} or "
                    f"{even + len(towers)}, as batches with drop_remainder=True, or split_batch(..., "
                    f"allow_uneven=True) and average_gradients(..., weights={sizes})"
                )
        elif len(sizes) != len(towers) or sum(sizes) != examples or min(sizes) < 1:
            raise ValueError(
                f"sizes={list(sizes)} must be {len(towers)} positive numbers, one a tower, that add up to {examples}"
            )
        return _cut(batch, tensors, sizes)


def run_on_towers(fn: Callable[[Tower, Any], Any], towers: Sequence[Tower], shards: Sequence[Any]) -> list[Any]:
    """Call `fn(tower, shard)` for each of K towers, in its device and name scope, and return the [K] results in order.

    Call it inside one `tf.function`: there the towers run side by side, but eagerly one after another. `fn` must
    compute its gradients itself, so that the backward pass is on the tower's device too. It must have no side effects:
    a tower that writes to a variable makes the next one wait.

    Raises:
      ValueError: there is not one shard per tower.
    """
    results = []
    for tower, shard in zip(towers, shards, strict=True):  # traced in turn; when the graph runs, none waits
        with tf.device(tower.device), tf.name_scope(tower.name), unsynchronized(len(towers)):
            results.append(fn(tower, shard))
    return results


def run_micro_batches(fn: Callable[[Any], Any], shard: Any, count: int, sequential: bool = True) -> list[Any]:
    """Split a shard into `count` micro-batches of equal size, call `fn` on each, and return the results in order.

    Args:
      sequential: let each micro-batch wait for the result of the previous one when the graph runs. Memory then holds
        the activations of one micro-batch at a time, but the results of all.

    Raises:
      ValueError: a tensor without a known axis 0, tensors that differ in it, or a shard that `count` does not divide.
    """
    if count == 1:
        return [fn(shard)]
    tensors, examples = _as_tensors(shard)
    if examples % count:
        raise ValueError(
            f"{examples} examples cannot be shared evenly by {count} micro-batches; give a multiple of {count}"
        )
    results: list[Any] = []
    for index, part in enumerate(_cut(shard, tensors, [examples // count] * count)):
        with tf.name_scope(f"part_{index}"):
            if sequential and results:
                previous = [tensor for tensor in tf.nest.flatten(results[-1]) if tensor is not None]
                with tf.control_dependencies(previous):
                    part = tf.nest.map_structure(tf.identity, part)
            results.append(fn(part))
    return results


def _as_tensors(batch: Any) -> tuple[list[tf.Tensor], int]:
    """Return the tensors of a structure, and their common length on axis 0."""
    with tf.device(HOST):
        tensors = [tf.convert_to_tensor(array) for array in tf.nest.flatten(batch)]
    lengths = {tensor.shape[0] if tensor.shape.rank else None for tensor in tensors}
    length = lengths.pop() if len(lengths) == 1 else None
    if length is None:
        known = sorted(lengths or {length}, key=str)
        raise ValueError(f"all tensors of a batch need one known length on axis 0; these have {known}")
    return tensors, length


def _cut(batch: Any, tensors: Sequence[tf.Tensor], sizes: Sequence[int]) -> list[Any]:
    """Return structures like `batch`, each with its part of the tensors."""
    with tf.device(HOST):  # TensorFlow has no GPU kernel that splits integers
        parts = [tf.split(tensor, list(sizes), axis=0) for tensor in tensors]
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*parts, strict=True)]
