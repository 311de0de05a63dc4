"""Run a function of batched tensors, or a function over the batches of a `tf.data.Dataset`, on
several towers.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from cifar_towers.towers.collectives import unsynchronized
from cifar_towers.towers.devices import Tower, make_towers
from cifar_towers.towers.model_parallel import place_on_device
from cifar_towers.towers.sharding import run_on_towers, split_uneven_batch


def make_parallel(fn: Callable[..., Any], num_towers: int | Sequence[Tower], **tensors: Any) -> Any:
    """Compute `fn(**tensors)` on K towers: split the tensors, call `fn(**shard)` on each tower and
    join the outputs.

    The result equals `fn(**tensors)` if each row of an output depends on the same row of the
    tensors only. A function that mixes rows, as a mean over axis 0 does, sees one shard's rows.

    Call it inside one `tf.function`: there the towers run side by side, but eagerly one after
    another. Gradients with respect to `tensors` and to the variables that `fn` reads are computed
    on the tower that ran the forward pass. Tensors that `fn` only closes over get none. `fn` must
    not write to variables, as batch norm does in training: each tower would write. Return the new
    values instead, or use `make_parallel_model`.

    Args:
      fn: called with keywords, each a shard [B/K, ...]; returns a structure of tensors [B/K, ...].
      num_towers: K, or the K towers of `make_towers`.
      **tensors: structures of tensors [B, ...]. Where K does not divide B, the first B mod K shards
        have one example more. Where B is less than K, towers without an example compute the last
        example again, and their outputs are dropped.

    Returns:
      The structure that `fn` returns, with tensors [B, ...].

    Raises:
      ValueError: there are no towers, `fn` is a Keras model, a tensor is a scalar, or an output has
        not one row for each example.
    """
    if isinstance(fn, keras.Model):
        raise ValueError("fn is a Keras model; write make_parallel_model(fn, num_towers)")
    tensors = tf.nest.map_structure(tf.convert_to_tensor, tensors)
    scalars = [name for name, tensor in tensors.items() if getattr(tensor, "shape", None) == []]
    if scalars:
        raise ValueError(
            f"{scalars[0]} has no rows to split; pass it by functools.partial(fn, {scalars[0]}=...)"
        )
    outputs, sizes = run_on_any_batch(
        lambda tower, shard: check_outputs(fn(**shard), shard, tower),
        resolve_towers(num_towers),
        tensors,
    )
    return join_outputs(outputs, sizes)


def map_on_towers(
    fn: Callable[[Any], Any], dataset: tf.data.Dataset, towers: int | Sequence[Tower]
) -> Iterator[Any]:
    """Yield `fn(batch)` for each batch of a dataset, in order, K batches at a time on K devices.

    One graph runs all groups of K batches, and a second one a smaller last group.

    Args:
      fn: called as `fn(element)`, also if an element is a tuple; the last batch may be shorter.
        Returns a structure of tensors.
      towers: K, or the K towers of `make_towers`.
    """
    towers = resolve_towers(towers)

    def on_tower(tower: Tower, batch: Any) -> Any:
        return fn(batch)

    @tf.function
    def run_group(group: list[Any]) -> list[Any]:
        return run_on_towers(on_tower, towers[: len(group)], group)

    batches = iter(dataset)
    while group := list(itertools.islice(batches, len(towers))):
        # traced for batches of any length, as the last one may be shorter
        traced = run_group.get_concrete_function([dataset.element_spec] * len(group))
        yield from traced(group)


def run_on_any_batch(
    fn: Callable[[Tower, Any], Any], towers: Sequence[Tower], tensors: Any
) -> tuple[list[Any], list[int | tf.Tensor]]:
    """Split a batch of any length and run `fn(tower, shard)` on each tower, with its backward pass
    on the same device.

    The length may be less than K, or unknown until the graph runs. The last example then replaces
    an empty shard.

    Returns:
      [K] results, and [K] numbers of examples, 0 for an empty shard.
    """
    known_length = tf.nest.flatten(tensors)[0].shape[0]
    if known_length is not None and known_length >= len(towers):
        shards, sizes = split_uneven_batch(tensors, towers)
    else:
        shards, sizes = _split_unknown_length(tensors, len(towers))

    results = []
    with unsynchronized(len(towers)):
        for tower, shard in zip(towers, shards, strict=True):
            on_tower = place_on_device(functools.partial(fn, tower), tower.device, tower.name)
            results.append(on_tower(shard))
    return results, sizes


def _split_unknown_length(tensors: Any, count: int) -> tuple[list[Any], list[tf.Tensor]]:
    """Split a batch of few examples, or of a length that is known when the graph runs; see
    `run_on_any_batch`.
    """
    shards = []
    sizes = []
    with tf.name_scope("split_batch"):
        first, *others = tf.nest.flatten(tensors)
        length = tf.shape(first)[0]
        for tensor in others:
            tf.debugging.assert_equal(
                tf.shape(tensor)[0], length, "the tensors of a batch differ in axis 0"
            )

        begin = 0
        for index in range(count):
            # the first shards have one example more
            size = length // count + tf.cast(index < length % count, tf.int32)
            start = tf.minimum(begin, length - 1)  # the last example, for an empty shard
            shards.append(_slice_rows(tensors, start, begin + size))
            sizes.append(size)
            begin += size
    return shards, sizes


def _slice_rows(tensors: Any, start: tf.Tensor, end: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda tensor: tensor[start:end], tensors)


def join_outputs(structures: Sequence[Any], sizes: Sequence[int | tf.Tensor]) -> Any:
    """Concatenate the tensors of K equal structures, K x [B/K, ...] -> [B, ...], without the rows
    of empty shards.
    """
    with tf.name_scope("join_batch"):
        counted = []
        for structure, size in zip(structures, sizes, strict=True):
            may_be_empty = not isinstance(size, int)
            counted.append(_slice_rows(structure, 0, size) if may_be_empty else structure)
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *counted)


def resolve_towers(towers: int | Sequence[Tower]) -> list[Tower]:
    """Return so many towers for a number, otherwise the towers themselves; raise a ValueError if
    there are none.
    """
    if not towers or (isinstance(towers, int) and towers < 0):
        raise ValueError(f"{towers} towers cannot run anything; give one or more")
    return make_towers(towers, soft_placement=None) if isinstance(towers, int) else list(towers)


def check_outputs(structure: Any, shard: Any, tower: Tower) -> Any:
    """Return `structure` if each of its tensors has one row per example; the graph checks an
    unknown length.
    """
    first = tf.nest.flatten(shard)[0]
    for index, output in enumerate(map(tf.convert_to_tensor, tf.nest.flatten(structure))):
        name = f"output {index} of {tower.name}"
        rows = output.shape[:1]
        examples = first.shape[:1]
        if output.shape.rank is None or None in rows:
            tf.debugging.assert_equal(
                tf.shape(output)[0], tf.shape(first)[0], f"{name} must have one row per example"
            )
        elif rows != examples:
            raise ValueError(
                f"{name} must have one row for each example of {first.shape}, and has the shape "
                f"{output.shape}"
            )
    return structure
