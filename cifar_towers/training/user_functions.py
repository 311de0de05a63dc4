"""An augmentation and a loss of the user's own: load the function, and check what it returns before training."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from cifar_towers.data.batches import NUM_OWN_DRAWS
from cifar_towers.errors import UsageError
from cifar_towers.user_code import as_usage_errors, load_function

NUM_EXAMPLES = 4  # of the call that checks a function


def load_augmentation(name: str, image_size: int, num_classes: int) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Return the function (images, labels, draws) -> (images, labels) of a user's augmentation.

    The user's function takes normalized images [b, s, s, 3] float32 and draws [b, 8], uniform random numbers in [0, 1)
    of each example, and returns images. A function with an argument named `labels` also takes the labels as one-hot
    rows [b, C] float32, and returns (images, labels).

    Args:
      name: as `path/to/file.py:function`.

    Raises:
      UsageError: there is no such function, it fails, it returns another shape or type, or other values in a second
        call with the same arguments.
    """
    function = load_function("augment", name)
    takes_labels = "labels" in inspect.signature(function).parameters

    def augment(images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        arguments: dict[str, tf.Tensor] = {"images": images, "draws": draws}
        expected = [images]
        if takes_labels:
            arguments["labels"] = tf.one_hot(labels, num_classes)
            expected.append(arguments["labels"])
        with as_usage_errors(f"augment={name}: it fails"):
            results = function(**arguments)
        results = tuple(results) if takes_labels and isinstance(results, (tuple, list)) else (results,)
        _check_shapes("augment", name, results, expected)
        return (results[0], results[1]) if takes_labels else (results[0], labels)

    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=[NUM_EXAMPLES, image_size, image_size, 3]), tf.float32)
    draws = tf.constant(random.random([NUM_EXAMPLES, NUM_OWN_DRAWS]), tf.float32)
    _check_repeatable("augment", name, lambda: augment(images, tf.range(NUM_EXAMPLES) % num_classes, draws))
    return augment


def load_loss(name: str, num_classes: int) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return the function (labels, logits) -> [b] losses of a user's loss.

    The user's function takes labels [b, C] float32, rows of sum 1, and logits [b, C] float32, and returns a loss for
    each example. The labels of the function that is returned may also be [b] classes.

    Raises:
      UsageError: as `load_augmentation` does.
    """
    function = load_function("loss", name)

    def loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        labels = labels if labels.shape.rank == 2 else tf.one_hot(labels, num_classes)
        logits = tf.cast(logits, tf.float32)
        with as_usage_errors(f"loss={name}: it fails"):
            losses = function(labels=labels, logits=logits)
        _check_shapes("loss", name, (losses,), [logits[:, 0]])
        return losses

    logits = tf.constant(np.random.default_rng(0).normal(size=[NUM_EXAMPLES, num_classes]), tf.float32)
    _check_repeatable("loss", name, lambda: loss(tf.range(NUM_EXAMPLES) % num_classes, logits))
    return loss


def _check_shapes(setting: str, name: str, results: tuple, expected: list[tf.Tensor]) -> None:
    returned = [f"{tuple(r.shape)} {r.dtype.name}" if tf.is_tensor(r) else type(r).__name__ for r in results]
    wanted = [f"{tuple(tensor.shape)} {tensor.dtype.name}" for tensor in expected]
    if returned != wanted:
        raise UsageError(f"{setting}={name}: it returns {', '.join(returned)}, and not {', '.join(wanted)}")


def _check_repeatable(setting: str, name: str, call: Callable[[], Any]) -> None:
    first, second = (tf.nest.flatten(call()) for _ in range(2))
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)):
        raise UsageError(
            f"{setting}={name}: it returns other values in a second call with the same arguments: it draws random "
            "numbers of its own, with which a resumed run and other numbers of towers would differ; use draws"
        )
