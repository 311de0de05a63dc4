"""Loss terms of one tower.

The loss of the examples is their mean, so that learning rates do not depend on the batch size. The
losses of weights are no means.
"""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

EXAMPLE_LOSS = "example_loss"  # the term of the user's loss, or of the cross entropy
# the term of the losses that the model itself adds, as regularizers do
MODEL_LOSSES = "model_losses"


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Return the softmax cross entropy [B] of logits [B, C], with label smoothing over C classes.

    Labels are [B] classes or [B, C] probabilities.
    """
    logits = widened(logits)
    classes = logits.shape[-1]
    if labels.shape.rank == 1:
        labels = tf.one_hot(labels, classes, dtype=logits.dtype)
    targets = (1 - smoothing) * labels + smoothing / classes
    return tf.nn.softmax_cross_entropy_with_logits(targets, logits)


def widened(logits: tf.Tensor) -> tf.Tensor:
    """Return logits of a 16-bit type, in which a user's model may end, as float32."""
    return tf.cast(logits, tf.float32) if logits.dtype.size == 2 else logits


def make_loss(
    example_loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    weight_losses: Mapping[str, tuple[int, float]],
) -> Callable:
    """Return a function (labels, logits, weights, model_losses) -> {term: scalar}, with the sum of
    the terms as `total_loss`.

    The term `example_loss` is the mean of that function, and `model_losses` the sum of the losses
    that the model itself adds, as regularizers do.

    Args:
      example_loss: (labels, logits) -> [B].
      weight_losses: layer name -> (index among the weights, factor): adds factor * sum(w ** 2) / 2
        as `<layer>/weight_loss`.
    """

    def loss(
        labels: tf.Tensor,
        logits: tf.Tensor,
        weights: Sequence[tf.Tensor],
        model_losses: Sequence[tf.Tensor] = (),
    ) -> dict[str, tf.Tensor]:
        mean_loss = tf.reduce_mean(example_loss(labels, logits))
        terms = {EXAMPLE_LOSS: mean_loss}
        for layer, (index, factor) in weight_losses.items():
            terms[f"{layer}/weight_loss"] = factor * tf.nn.l2_loss(weights[index])
        if model_losses:
            added = [tf.cast(loss, mean_loss.dtype) for loss in model_losses]
            terms[MODEL_LOSSES] = tf.add_n(added)
        return terms | {"total_loss": tf.add_n(list(terms.values()))}

    return loss
