"""Evaluation of whole splits on the towers, every example exactly once."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
ClassifyFn = Callable[..., np.ndarray]  # see `make_classify_fn`


@dataclasses.dataclass
class Evaluator:
    """The evaluations of one run: when, on which splits, with which weights.

    Before the end of the run, the first split is scored with the weights that the run reports,
    without test-time augmentation (TTA). At the end every split is scored with all sets of weights.
    With `tta`, a second score of the reported set is with TTA.
    """

    evaluate: Callable[..., Score]  # `score_split` with its first argument
    splits: Mapping[str, Split]  # in the order of the reports
    # name -> (weights, non-trainable values); the run reports the last
    weight_sets: Mapping[str, tuple]
    every_steps: int  # steps between evaluations before the end; 0: only at the end
    last_step: int
    tta: bool = False  # whether the evaluation at the end is also made with TTA

    def __post_init__(self) -> None:
        self.splits = {name: split for name, split in self.splits.items() if len(split.labels)}

    def is_due(self, step: int) -> bool:
        """Return whether the run is evaluated after `step`, before its end."""
        return bool(self.every_steps) and step % self.every_steps == 0 and 0 < step < self.last_step

    def run(self, final: bool = False) -> list[Evaluation]:
        """Score the first split, or all splits and sets of weights if `final`."""
        splits = list(self.splits.items())
        weight_sets = list(self.weight_sets.items())
        reported = weight_sets[-1]

        if final:
            passes = [(*weight_set, False) for weight_set in weight_sets]
            if self.tta:
                passes.append((*reported, True))
        else:
            splits = splits[:1]
            passes = [(*reported, False)]

        evaluations = []
        for name, split in splits:
            for set_name, values, tta in passes:
                score = self.evaluate(split, *values, tta)
                evaluations.append(Evaluation(name, set_name, tta, score))
        return evaluations


def score_split(
    classify: ClassifyFn, split: Split, weights: Values, non_trainable: Values, tta: bool = False
) -> Score:
    """Score a split in one pass of `classify`."""
    return Score(split.labels, classify(split.images, weights, non_trainable, tta))


def make_classify_fn(
    model: keras.Model,
    towers: Sequence[Tower],
    augmentation: Augmentation,
    workers: Workers = ALONE,
    on_progress: Callable[[float], None] | None = None,
) -> ClassifyFn:
    """Return a function that classifies any number of images on the towers.

    The function is (images, weights, non_trainable, tta) -> logits. The images are [n, S, S, 3]
    levels, the logits [n, C]; with `tta` they are weighted means over the views of
    test-time augmentation. Weights and non_trainable are the model's variables or averages of them.

    Args:
      workers: they call the function together; each classifies its share of the images and returns
        all logits.
      on_progress: called before each batch with the fraction that is done.
    """

    def on_tower(
        tta: bool, weights: Values, non_trainable: Values, tower: Tower, shard: list
    ) -> tf.Tensor:
        images = augmentation.evaluate(shard[0])
        weighted_views = tta_views(images) if tta else [(1.0, images)]
        views = [view for _, view in weighted_views]

        def classify_view(view: tf.Tensor) -> tf.Tensor:
            return tf.cast(
                model.stateless_call(weights, non_trainable, view, training=False)[0], tf.float32
            )

        # A loop: the net is traced and optimized once, not once for each view.
        logits = tf.map_fn(classify_view, tf.stack(views), fn_output_signature=tf.float32)
        return sum(weight * logits[index] for index, (weight, _) in enumerate(weighted_views))

    @tf.function(autograph=False)
    def on_towers(
        images: tf.Tensor, weights: Values, non_trainable: Values, tta: bool
    ) -> tf.Tensor:
        shards = split_batch([images], towers)
        logits = run_on_towers(
            functools.partial(on_tower, tta, weights, non_trainable), towers, shards
        )
        return tf.concat(logits, 0)

    def classify(
        images: np.ndarray, weights: Values, non_trainable: Values, tta: bool = False
    ) -> np.ndarray:
        # `tf.function` confuses mirrored variables of one shape, so it gets their values
        weights = [tf.convert_to_tensor(value) for value in weights]
        non_trainable = [tf.convert_to_tensor(value) for value in non_trainable]

        num_shares = 1  # every worker classifies all
        if len(images) >= workers.size:
            num_shares = workers.size
        index = workers.index % num_shares
        start_of_share = len(images) * index // num_shares
        end_of_share = len(images) * (index + 1) // num_shares
        share = images[start_of_share:end_of_share]

        parts = []
        for start, batch in _even_batches(share, len(towers)):
            if on_progress:
                on_progress(start / len(share))
            parts.append(on_towers(batch, weights, non_trainable, tta))

        logits = np.concatenate(parts)[: len(share)]
        if workers.size > 1:
            logits = np.concatenate(workers.gather(logits)[:num_shares])
        return logits

    return classify


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
