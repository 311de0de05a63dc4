"""Splitting a batch over the towers and running one function on each."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cifar_towers.towers.devices import Tower
from cifar_towers.towers.placement import HOST


def split_batch(batch: Any, towers: Sequence[Tower]) -> list[Any]:
    """Cuts every tensor of a structure on axis 0, in host memory, one shard a tower: [B, ...] -> K x [B/K, ...].

    Where K does not divide B, the first B mod K shards have one example more; weigh their gradients by their
    examples then.

    Raises:
      ValueError: a tensor without a known axis 0, tensors that differ in it, or fewer examples than towers.
    """
    with tf.name_scope("split_batch"):
        return _split(batch, len(towers), "towers")


def _split(batch: Any, count: int, what: str) -> list[Any]:
    """In host memory: TensorFlow splits whole numbers on no GPU."""
    tensors = tf.nest.flatten(batch)
    sizes = {tensor.shape[0] if tensor.shape.rank else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"all tensors of a batch need one known length on axis 0; these have {sorted(sizes, key=str)}")
    (examples,) = sizes
    if examples < count:
        raise ValueError(f"{examples} examples cannot be shared by {count} {what}")
    share_sizes = [examples // count + (k < examples % count) for k in range(count)]
    with tf.device(HOST):
        shares_of = [tf.split(tensor, share_sizes, axis=0) for tensor in tensors]
    return [tf.nest.pack_sequence_as(batch, share) for share in zip(*shares_of, strict=True)]


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


def run_micro_batches(fn: Callable[[Any], Any], shard: Any, parts: int, sequential: bool = True) -> list[Any]:
    """Calls `fn` on each of a shard's `parts`; the results in order.

    With `sequential`, a part's input waits for the result of the part before also when the graph runs, so that memory
    holds the activations of one part at a time. The results are all kept.

    Raises:
      ValueError: as `split_batch` does.
    """
    if parts == 1:
        return [fn(shard)]
    results: list[Any] = []
    for index, part in enumerate(_split(shard, parts, "parts")):
        with tf.name_scope(f"part_{index}"):
            if sequential and results:
                before = [tensor for tensor in tf.nest.flatten(results[-1]) if tensor is not None]
                with tf.control_dependencies(before):
                    part = tf.nest.map_structure(tf.identity, part)
            results.append(fn(part))
    return results


def with_pinned_backward(device: str, scope: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, with its forward and its backward pass on `device` and under the name scope `scope`.

    A tape that is asked for gradients outside a tower puts the backward pass where it was asked. The function
    returned here takes its own gradients, there where it ran, and hands them to whatever tape is outside. It is
    called with positional structures of tensors; variables that `fn` reads get their gradients too.
    """

    def kept(*structures):
        @tf.custom_gradient
        def run(*inputs):
            with tf.device(device), tf.name_scope(scope), tf.GradientTape(persistent=True) as tape:
                watched = [tensor for tensor in inputs if tensor.dtype.is_floating]
                tape.watch(watched)
                structure = fn(*tf.nest.pack_sequence_as(structures, inputs))
                outputs = [tf.convert_to_tensor(output) for output in tf.nest.flatten(structure)]
            shape_of_outputs.append(structure)

            def gradient(*upstream, variables=()):
                sources = [*watched, *variables]
                pairs = [(y, dy) for y, dy in zip(outputs, upstream, strict=True) if y.dtype.is_floating]
                with tf.device(device), tf.name_scope(f"{scope}/gradient"):
                    found = tape.gradient([y for y, _ in pairs], sources, output_gradients=[dy for _, dy in pairs])
                of_watched = iter(found)
                to_inputs = [next(of_watched) if tensor.dtype.is_floating else None for tensor in inputs]
                return (to_inputs, list(of_watched)) if variables else to_inputs

            return outputs, gradient

        shape_of_outputs: list[Any] = []
        flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(structures)]
        outputs = run(*flat)
        return tf.nest.pack_sequence_as(shape_of_outputs[-1], outputs)

    return kept
