"""Batches whose order and random numbers are functions of (seed, step): nothing to save, nothing to lose."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from cifar_towers.data.dataset import Split

PREFETCHED = 2  # batches made ahead of the step, in other threads


class RandomDraws(NamedTuple):
    """The random numbers of B examples, one row each; `augment` says what they mean."""

    flip: tf.Tensor  # [B] bool
    window: tf.Tensor  # [B, 2] in [0, 1): place of the crop or shift
    cutout: tf.Tensor  # [B, 2] in [0, 1): place of the blanked square
    brightness: tf.Tensor  # [B] in [-1, 1)
    contrast: tf.Tensor  # [B] in [-1, 1)
    place: tf.Tensor  # [B] int64: how many examples the run drew before; for layers that draw numbers of their own


class Batch(NamedTuple):
    """B examples: images [B, S, S, 3] uint8, labels [B] int64, and their draws."""

    images: tf.Tensor
    labels: tf.Tensor
    draws: RandomDraws


class Batches:
    """The batches of a run over `split`, by step.

    Every epoch is a new order of all examples, cut into `steps_per_epoch` whole batches; the few examples that are
    left over sit that epoch out.

    Args:
      split: what to draw from.
      batch_size: B, for all towers together.
      seed: order, draws and flips follow from it and the step alone.
      rows: (first, count) of the rows of every batch that are made here; other processes make the others.
      flip: `none`; `random`, a coin for each image and epoch; `alternating`, one coin an image for the whole run,
        turned over in every odd epoch (K. Jordan, arXiv 2404.00498).
    """

    def __init__(
        self, split: Split, batch_size: int, seed: int, flip: str = "alternating", rows: tuple[int, int] | None = None
    ):
        if batch_size > len(split.labels):
            raise ValueError(f"batch_size={batch_size} is more than the {len(split.labels)} training examples")
        self.batch_size, self.seed, self.flip = batch_size, seed, flip
        self.steps_per_epoch = len(split.labels) // batch_size
        self._examples, (self._first, self._count) = len(split.labels), rows or (0, batch_size)
        with tf.device("/CPU:0"):
            self._images, self._labels = tf.constant(split.images), tf.constant(split.labels)

    def at(self, step: tf.Tensor | int) -> Batch:
        """The batch of one step, counted from 0, made of TensorFlow operations."""
        step = tf.cast(step, tf.int64)
        epoch, position = step // self.steps_per_epoch, step % self.steps_per_epoch
        order = tf.numpy_function(self._order, [epoch], tf.int64, stateful=False)
        first = step * self.batch_size + self._first  # how many examples the run drew before these
        start = position * self.batch_size + self._first
        chosen = tf.ensure_shape(order[start : start + self._count], [self._count])
        uniform = tf.random.stateless_uniform([self.batch_size, 7], tf.stack([tf.cast(self.seed, tf.int64), step]))
        uniform = uniform[self._first : self._first + self._count]  # drawn for the batch: they belong to the example
        draws = RandomDraws(
            flip=self._flips(chosen, epoch, uniform[:, 6]),
            window=uniform[:, 0:2],
            cutout=uniform[:, 2:4],
            brightness=2 * uniform[:, 4] - 1,
            contrast=2 * uniform[:, 5] - 1,
            place=first + tf.range(self._count, dtype=tf.int64),
        )
        return Batch(tf.gather(self._images, chosen), tf.gather(self._labels, chosen), draws)

    def stream(self, first_step: int, last_step: int) -> tf.data.Dataset:
        """The batches of steps first_step .. last_step - 1, prepared ahead while the step runs."""
        options = tf.data.Options()
        options.autotune.enabled = False  # nothing to tune, and its thread delays the end of a stream by seconds
        with tf.device("/CPU:0"):
            steps = tf.data.Dataset.range(first_step, last_step)
            at = tf.autograph.experimental.do_not_convert(self.at)  # it has nothing to convert, and looking takes long
            return steps.map(at).prefetch(PREFETCHED).with_options(options)

    def _order(self, epoch: np.int64) -> np.ndarray:
        if getattr(self, "_ordered", (None, None))[0] != epoch:
            random = np.random.Generator(np.random.Philox(key=[self.seed, int(epoch)]))
            self._ordered = (epoch, random.permutation(self._examples))
        return self._ordered[1]

    def _flips(self, chosen: tf.Tensor, epoch: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
        if self.flip == "none":
            return tf.zeros([self._count], tf.bool)
        if self.flip == "random":
            return uniform < 0.5
        coins = tf.random.stateless_uniform([self._examples], tf.constant([self.seed, -1], tf.int64)) < 0.5
        return tf.math.logical_xor(tf.gather(coins, chosen), epoch % 2 == 1)
