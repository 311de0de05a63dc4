"""Split a batch over the towers and run one function on each."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.devices import Tower
from cifar_towers.towers.placement import HOST


def split_batch(
    batch: Any, towers: Sequence[Tower], allow_uneven: bool = False, sizes: Sequence[int] | None = None
) -> list[Any]:
    """Splits every tensor or NumPy array of a structure on axis 0, in host memory: [B, ...] -> K shards of [B/K, ...].

    Args:
      sizes: [K], the examples of each shard, which add up to B; of one size, or nearly so, if not given.
      allow_uneven: accept a B that K does not divide; the first B mod K shards then have one example more. The
        gradients of their mean losses need weights: `average_gradients(tower_grads, weights=[examples, ...])`.

    Raises:
      ValueError: a tensor without a known axis 0, tensors that differ in it, fewer examples than towers, uneven
        shards without `allow_uneven` or `sizes`, or `sizes` that do not add up.
    """
    with tf.name_scope("split_batch"):
        shards = _split(batch, len(towers), "towers", sizes)
    if sizes:
        return shards
    sizes = [tf.nest.flatten(shard)[0].shape[0] for shard in shards]
    if len(set(sizes)) > 1 and not allow_uneven:
        even = sum(sizes) - sum(sizes) % len(sizes)
        raise ValueError(
            f"{sum(sizes)} examples cannot be shared evenly by {len(sizes)} towers: give {even} or "
            f"{even + len(sizes)}, as batches with drop_remainder=True, or split_batch(..., allow_uneven=True) "
            f"and average_gradients(..., weights={sizes})"
        )
    return shards


def share_out(examples: int, shares: Sequence[float], multiple: int = 1) -> list[int]:
    """Return K sizes in proportion to `shares` that add up to `examples`, each a positive multiple of `multiple`.

    >>> share_out(16, [3, 1]), share_out(10, [2, 1, 1])
    ([12, 4], [5, 3, 2])

    Raises:
      ValueError: a share is not positive, or there are too few examples, or they are no multiple.
    """
    units = examples // multiple
    if not shares or min(shares) <= 0 or examples % multiple or units < len(shares):
        parts = f" in multiples of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{examples} examples cannot be shared{parts} as {', '.join(f'{s:g}' for s in shares)}")
    exact = [units * share / sum(shares) for share in shares]
    sizes = [max(1, int(value)) for value in exact]
    while sum(sizes) != units:
        step = 1 if sum(sizes) < units else -1
        movable = [k for k in range(len(sizes)) if sizes[k] + step > 0]
        k = max(movable, key=lambda k: step * (exact[k] - sizes[k]))  # the first of equals
        sizes[k] += step
    return [multiple * size for size in sizes]


def run_on_towers(fn: Callable[[Tower, Any], Any], towers: Sequence[Tower], shards: Sequence[Any]) -> list[Any]:
    """Calls `fn(tower, shard)` for each tower, in its device and name scope; returns the results in tower order.

    Call it inside one `tf.function`: there the towers run side by side, eagerly one after another. `fn` must compute
    its gradients itself, so that the backward pass is on the tower's device too. It must have no side effects: a
    tower that writes to a variable makes the next one wait.
    """
    results = []
    for tower, shard in zip(towers, shards, strict=True):
        with tf.device(tower.device), tf.name_scope(tower.name):
            results.append(fn(tower, shard))
    return results


def run_micro_batches(fn: Callable[[Any], Any], shard: Any, count: int, sequential: bool = True) -> list[Any]:
    """Splits a shard into `count` micro-batches and calls `fn` on each; returns the results in order.

    With `sequential`, the input of a micro-batch waits for the previous result when the graph runs, so that memory
    holds the activations of one micro-batch at a time. The results of all stay in memory.

    Raises:
      ValueError: as `split_batch` does.
    """
    if count == 1:
        return [fn(shard)]
    results: list[Any] = []
    for index, part in enumerate(_split(shard, count, "micro-batches")):
        with tf.name_scope(f"part_{index}"):
            if sequential and results:
                previous = [tensor for tensor in tf.nest.flatten(results[-1]) if tensor is not None]
                with tf.control_dependencies(previous):
                    part = tf.nest.map_structure(tf.identity, part)
            results.append(fn(part))
    return results


def _split(batch: Any, count: int, unit: str, sizes: Sequence[int] | None = None) -> list[Any]:
    with tf.device(HOST):
        tensors = [tf.convert_to_tensor(array) for array in tf.nest.flatten(batch)]
    lengths = {tensor.shape[0] if tensor.shape.rank else None for tensor in tensors}
    if len(lengths) != 1 or None in lengths:
        lengths = sorted(lengths, key=str)
        raise ValueError(f"all tensors of a batch need one known length on axis 0; these have {lengths}")
    (examples,) = lengths
    if examples < count:
        raise ValueError(f"{examples} examples cannot be shared by {count} {unit}")
    sizes = list(sizes or [examples // count + (k < examples % count) for k in range(count)])
    if len(sizes) != count or sum(sizes) != examples:
        raise ValueError(f"sizes={sizes} must be of {count} {unit} and add up to {examples} examples")
    with tf.device(HOST):  # TensorFlow has no GPU kernel that splits integers
        splits = [tf.split(tensor, sizes, axis=0) for tensor in tensors]
    return [tf.nest.pack_sequence_as(batch, shard) for shard in zip(*splits, strict=True)]


def with_pinned_backward(device: str, scope: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with both its forward and its backward pass on `device`, in the name scope `scope`.

    A tape that is asked for gradients outside a tower puts the backward pass where it was asked. The returned function
    records a tape of its own on `device` and hands its gradients to any outer tape. Its arguments are positional
    structures of tensors; variables that `fn` reads get gradients too.
    """

    def pinned(*structures):
        output_structure = None

        @tf.custom_gradient
        def run(*inputs):
            nonlocal output_structure
            with tf.device(device), tf.name_scope(scope), tf.GradientTape(persistent=True) as tape:
                watched = [tensor for tensor in inputs if tensor.dtype.is_floating]
                tape.watch(watched)
                output_structure = fn(*tf.nest.pack_sequence_as(structures, inputs))
                outputs = [tf.convert_to_tensor(output) for output in tf.nest.flatten(output_structure)]

            def gradient(*upstream, variables=()):
                pairs = [(y, dy) for y, dy in zip(outputs, upstream, strict=True) if y.dtype.is_floating]
                targets, output_gradients = [y for y, _ in pairs], [dy for _, dy in pairs]
                with tf.device(device), tf.name_scope(f"{scope}/gradient"):
                    gradients = tape.gradient(targets, [*watched, *variables], output_gradients=output_gradients)
                remaining = iter(gradients)
                input_gradients = [next(remaining) if tensor.dtype.is_floating else None for tensor in inputs]
                return (input_gradients, list(remaining)) if variables else input_gradients

            return outputs, gradient

        outputs = run(*[tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(structures)])
        return tf.nest.pack_sequence_as(output_structure, outputs)

    return pinned
