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

MAX_BATCH_PIXELS = (
    500 * 32 * 32
)  # on CPUs, larger batches gain nothing, and lose an eighth in float32 with AVX2

Values = Sequence[Any]  # of variables: tensors, arrays or the variables
ClassifyFn = Callable[..., list[np.ndarray]]  # see `make_classify_fn`


@dataclasses.dataclass
class Evaluator:
    """The evaluations of one run: when, on which splits, with which weights.

    Before the end of the run, the first split is scored with the weights that the run reports,
    without test-time augmentation (TTA). At the end every split is scored with all sets of weights,
    and with TTA for the reported set.
    """

    evaluate: Callable[..., dict[int, Score]]  # `score_split` with its first argument
    splits: Mapping[str, Split]  # in the order of the reports
    weight_sets: Mapping[
        str, tuple
    ]  # name -> (weights, non-trainable values); the run reports the last
    every_steps: int  # steps between evaluations before the end; 0: only at the end
    last_step: int
    tta: int = 0  # level of test-time augmentation of the evaluation at the end

    def __post_init__(self) -> None:
        self.splits = {name: split for name, split in self.splits.items() if len(split.labels)}

    def is_due(self, step: int) -> bool:
        """Return whether the run is evaluated after `step`, before its end."""
        return bool(self.every_steps) and step % self.every_steps == 0 and 0 < step < self.last_step

    def run(self, final: bool = False) -> list[Evaluation]:
        """Score the first split, or all splits and sets of weights if `final`."""
        *others, reported = self.weight_sets.items()
        passes = [(*other, 0) for other in others] if final else []
        return [
            Evaluation(name, weights, level, score)
            for name in list(self.splits)[: None if final else 1]
            for weights, values, tta in [*passes, (*reported, self.tta if final else 0)]
            for level, score in self.evaluate(self.splits[name], *values, tta).items()
        ]


def score_split(
    classify: ClassifyFn, split: Split, weights: Values, non_trainable: Values, tta: int = 0
) -> dict[int, Score]:
    """Score a split without TTA and at a level of TTA, in one pass of `classify`; return {0: score,
    tta: score}.
    """
    plain, augmented = classify(split.images, weights, non_trainable, tta)
    return {
        level: Score(split.labels, logits) for level, logits in {0: plain, tta: augmented}.items()
    }


def make_classify_fn(
    model: keras.Model,
    towers: Sequence[Tower],
    augmentation: Augmentation,
    workers: Workers = ALONE,
    on_progress: Callable[[float], None] | None = None,
) -> ClassifyFn:
    """Return a function that classifies any number of images on the towers.

    The function is (images, weights, non_trainable, tta) -> [logits, logits with TTA]. The images
    are [n, S, S, 3] levels, both logits [n, C]. Weights and non_trainable are the model's variables
    or averages of them.

    Args:
      workers: they call the function together; each classifies its share of the images and returns
        all logits.
      on_progress: called before each batch with the fraction that is done.
    """

    def on_tower(
        tta: int, weights: Values, non_trainable: Values, tower: Tower, shard: list
    ) -> tuple:
        shares, views = zip(*tta_views(augmentation.evaluate(shard[0]), tta), strict=True)

        def classify_view(view: tf.Tensor) -> tf.Tensor:
            return tf.cast(
                model.stateless_call(weights, non_trainable, view, training=False)[0], tf.float32
            )

        # A loop: the net is traced and optimized once, not once for each view. The first view is
        # the image itself.
        logits = tf.unstack(
            tf.map_fn(classify_view, tf.stack(views), fn_output_signature=tf.float32), len(views)
        )
        return logits[0], sum(share * each for share, each in zip(shares, logits, strict=True))

    @tf.function(autograph=False)
    def on_towers(
        images: tf.Tensor, weights: Values, non_trainable: Values, tta: int
    ) -> list[tf.Tensor]:
        shards = split_batch([images], towers)
        results = run_on_towers(
            functools.partial(on_tower, tta, weights, non_trainable), towers, shards
        )
        return [tf.concat(outputs, 0) for outputs in zip(*results, strict=True)]

    def classify(
        images: np.ndarray, weights: Values, non_trainable: Values, tta: int = 0
    ) -> list[np.ndarray]:
        # `tf.function` confuses mirrored variables of one shape, so it gets their values
        weights, non_trainable = (
            [tf.convert_to_tensor(v) for v in values] for values in (weights, non_trainable)
        )
        num_shares = (
            workers.size if len(images) >= workers.size else 1
        )  # if 1, every worker classifies all
        index = workers.index % num_shares
        share = images[len(images) * index // num_shares : len(images) * (index + 1) // num_shares]
        parts = []
        for start, batch in _even_batches(share, len(towers)):
            if on_progress:
                on_progress(start / len(share))
            parts.append(on_towers(batch, weights, non_trainable, tta))
        outputs = [np.concatenate(part)[: len(share)] for part in zip(*parts, strict=True)]
        if workers.size > 1:
            outputs = [
                np.concatenate(part)
                for part in zip(*workers.gather(outputs)[:num_shares], strict=True)
            ]
        return outputs

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
