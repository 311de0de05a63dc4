"""Evaluation of whole splits on the towers, every example exactly once."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar_towers.data.augment import Augmentation, tta_views
from cifar_towers.data.dataset import Split, chunks
from cifar_towers.evaluation.score import Evaluation, Score
from cifar_towers.multi_worker.cluster_spec import ALONE, Workers
from cifar_towers.towers import Tower, run_on_towers, split_batch
from cifar_towers.towers.placement import HOST

# on CPUs, larger batches gain nothing, and lose an eighth in float32 with AVX2
MAX_BATCH_PIXELS = 500 * 32 * 32

Values = Sequence[Any]  # of variables: tensors, arrays or the variables


@dataclasses.dataclass
class Evaluator:
    """The evaluations of one run: when, on which splits, with which weights.

    Before the end of the run the first split is scored, at the end every split. With `tta`, the
    pass at the end gives a second score, with test-time augmentation (TTA).
    """

    classifier: "Classifier"
    splits: Mapping[str, Split]  # in the order of the reports
    weights: tuple[str, Values, Values]  # name, weights and non-trainable values
    every_steps: int  # steps between evaluations before the end; 0: only at the end
    last_step: int
    tta: bool = False  # whether the evaluation at the end is also made with TTA

    def __post_init__(self) -> None:
        self.splits = {name: split for name, split in self.splits.items() if len(split.labels)}

    def is_due(self, step: int) -> bool:
        """Return whether the run is evaluated after `step`, before its end."""
        return bool(self.every_steps) and step % self.every_steps == 0 and 0 < step < self.last_step

    def run(self, final: bool = False) -> list[Evaluation]:
        """Score the first split, or all splits if `final`."""
        name, weights, non_trainable = self.weights
        splits = list(self.splits.items())
        if not final:
            splits = splits[:1]
        tta = final and self.tta

        evaluations = []
        for split_name, split in splits:
            logits = self.classifier.logits(split.images, weights, non_trainable, tta)
            score = Score(split.labels, logits.plain)
            evaluations.append(Evaluation(split_name, name, False, score))
            if tta:
                score = Score(split.labels, logits.tta)
                evaluations.append(Evaluation(split_name, name, True, score))
        return evaluations


class Logits(NamedTuple):
    """The logits [n, C] of images."""

    plain: np.ndarray
    tta: np.ndarray  # the weighted means over the views of test-time augmentation, or `plain`


class Classifier:
    """Classifies any number of images on the towers.

    Args:
      workers: they classify together: each its share of the images, and all return all logits.
      on_progress: called before each batch with the fraction that is done.
    """

    def __init__(
        self,
        model: keras.Model,
        towers: Sequence[Tower],
        augmentation: Augmentation,
        workers: Workers = ALONE,
        on_progress: Callable[[float], None] | None = None,
    ):
        self._model = model
        self._towers = towers
        self._augmentation = augmentation
        self._workers = workers
        self._on_progress = on_progress
        self._traced_batch = tf.function(self._classify_batch, autograph=False)

    def logits(
        self, images: np.ndarray, weights: Values, non_trainable: Values, tta: bool = False
    ) -> Logits:
        """Return the logits of images [n, S, S, 3] of levels, with `tta` in one pass also those of
        test-time augmentation.

        Weights and non_trainable are the model's variables or averages of them.
        """
        # `tf.function` confuses mirrored variables of one shape, so it gets their values
        weights = [tf.convert_to_tensor(value) for value in weights]
        non_trainable = [tf.convert_to_tensor(value) for value in non_trainable]

        # with fewer images than workers, every worker classifies all
        num_shares = self._workers.size if len(images) >= self._workers.size else 1
        index = self._workers.index % num_shares
        start_of_share = len(images) * index // num_shares
        end_of_share = len(images) * (index + 1) // num_shares
        share = images[start_of_share:end_of_share]

        batches = []
        for start, batch in _even_batches(share, len(self._towers)):
            if self._on_progress:
                self._on_progress(start / len(share))
            batches.append(self._traced_batch(batch, weights, non_trainable, tta))

        logits = np.concatenate(batches, 1)[:, : len(share)]
        if self._workers.size > 1:
            logits = np.concatenate(self._workers.gather(logits)[:num_shares], 1)
        return Logits(logits[0], logits[-1])

    def _classify_batch(
        self, images: tf.Tensor, weights: Values, non_trainable: Values, tta: bool
    ) -> tf.Tensor:
        """Return the logits of a batch, [1, B, C]; with `tta` [2, B, C]."""
        shards = split_batch(images, self._towers)
        on_tower = functools.partial(self._classify_shard, weights, non_trainable, tta)
        return tf.concat(run_on_towers(on_tower, self._towers, shards), 1)

    def _classify_shard(
        self, weights: Values, non_trainable: Values, tta: bool, tower: Tower, shard: tf.Tensor
    ) -> tf.Tensor:
        """Return the logits of a tower's shard, as `_classify_batch` those of the batch."""

        def classify_view(view: tf.Tensor) -> tf.Tensor:
            logits, _ = self._model.stateless_call(weights, non_trainable, view, training=False)
            return tf.cast(logits, tf.float32)

        images = self._augmentation.evaluate(shard)
        weighted_views = tta_views(images) if tta else [(1.0, images)]
        views = tf.stack([view for _, view in weighted_views])
        # a loop: the net is traced and optimized once, not once for each view
        logits = tf.map_fn(classify_view, views, fn_output_signature=tf.float32)
        if not tta:
            return logits

        mean = sum(weight * logits[index] for index, (weight, _) in enumerate(weighted_views))
        return tf.stack([logits[0], mean])  # the first view is the images


def _even_batches(images: np.ndarray, num_towers: int) -> Iterator[tuple[int, tf.Tensor]]:
    """Yield (start, batch) of batches of one size, which the towers divide evenly. The last is
    padded with zeros.
    """
    size = len(next(chunks(images, MAX_BATCH_PIXELS)))
    size = -(-size // num_towers) * num_towers
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        padding = np.zeros((size - len(batch), *batch.shape[1:]), batch.dtype)
        with tf.device(HOST):
            yield start, tf.constant(np.concatenate([batch, padding]) if len(padding) else batch)
