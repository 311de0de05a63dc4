"""Model parallelism: parts of one net on several devices."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def place_on_device(fn: Callable[..., Any], device: str, name: str) -> Callable[..., Any]:
    """Return `fn` with its forward and its backward pass on `device`.

    A tape computes gradients on the device where it is asked for them, wherever the forward pass
    ran. Therefore the returned function records a tape of its own on `device`, and hands the
    gradients to the tape around it. The variables that `fn` reads get gradients too.

    Args:
      fn: takes positional structures of tensors, and returns a structure of tensors.
      device: the name of a device, such as `/GPU:1`.
      name: the name scope of the operations. TensorFlow puts most of those of the backward pass
        into `gradient_tape/<name>`.
    """

    def placed(*structures: Any) -> Any:
        result = None

        @tf.custom_gradient
        def run(*inputs: tf.Tensor) -> Any:
            nonlocal result
            watched = [tensor for tensor in inputs if _has_gradient(tensor)]

            with tf.device(device), tf.name_scope(name), tf.GradientTape(persistent=True) as tape:
                tape.watch(watched)
                result = fn(*tf.nest.pack_sequence_as(structures, inputs))
                outputs = [tf.convert_to_tensor(output) for output in tf.nest.flatten(result)]

            def backward(*upstream: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
                targets = [output for output in outputs if _has_gradient(output)]
                output_gradients = [
                    gradient
                    for output, gradient in zip(outputs, upstream, strict=True)
                    if _has_gradient(output)
                ]

                with tf.device(device), tf.name_scope(f"{name}/gradient"):
                    gradients = tape.gradient(targets, [*watched, *variables], output_gradients)

                remaining = iter(gradients)
                input_gradients = [
                    next(remaining) if _has_gradient(tensor) else None for tensor in inputs
                ]
                return (input_gradients, list(remaining)) if variables else input_gradients

            return outputs, backward

        outputs = run(*[tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(structures)])
        return tf.nest.pack_sequence_as(result, outputs)

    return placed


def _has_gradient(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
