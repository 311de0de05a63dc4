"""Batches as functions of (seed, step): a run resumes anywhere without saved iterator state."""

import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from cifar_towers.data.dataset import Split
from cifar_towers.errors import UsageError
from cifar_towers.towers.placement import HOST

NUM_USER_DRAWS = 8  # of each example, for an augmentation of the user's
NUM_PREFETCHED = 2  # batches prepared ahead of the step, in other threads


class RandomDraws(NamedTuple):
    """The random numbers of B examples, one row each, that `Augmentation.augment` and a function of
    the user's use.
    """

    flip: tf.Tensor  # [B] bool
    window: tf.Tensor  # [B, 2] in [0, 1): position of the crop or shift
    cutout: tf.Tensor  # [B, 2] in [0, 1): position of the square that is set to 0
    brightness: tf.Tensor  # [B] in [-1, 1)
    contrast: tf.Tensor  # [B] in [-1, 1)
    # [B] int64: number of examples drawn before; seeds layers that draw random numbers
    example_index: tf.Tensor
    user: tf.Tensor  # [B, 8] in [0, 1) for an augmentation of the user's; [B, 0] without one


class Batch(NamedTuple):
    """B examples and their random numbers."""

    images: tf.Tensor  # [B, S, S, 3] uint8; float32 once they are augmented
    labels: tf.Tensor  # [B] int64; [B, C] float32 once an augmentation has mixed them
    draws: RandomDraws


class Batches:
    """The batches of a run over `split`, by step.

    Every epoch is a new permutation of all examples, cut into `steps_per_epoch` full batches. The
    rest is left out.

    Args:
      batch_size: B, the number of examples drawn per step, for all towers together.
      rows: (first, count) of the rows that this worker makes of every batch; by default all.
      flip: `none`; `random`, drawn for each image and epoch; `alternating`, drawn once for each
        image and inverted in every odd epoch (K. Jordan, arXiv 2404.00498).
      user_augmentation: whether the examples have draws for an augmentation of the user's.
      device: where a stream puts the next batch while a step runs; by default it stays in host
        memory.

    Raises:
      UsageError: there are fewer examples than `batch_size`.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int,
        flip: str = "alternating",
        rows: tuple[int, int] | None = None,
        user_augmentation: bool = False,
        device: str = "",
    ):
        count = len(split.labels)
        if batch_size > count:
            raise UsageError(
                f"a step draws {batch_size} examples, and there are only {count} for training; "
                "give a smaller --batch_size"
            )
        self.batch_size = batch_size
        self.steps_per_epoch = count // batch_size
        self.seed = seed
        self.flip = flip
        self._num_examples = count
        self._first_row, self._num_rows = rows or (0, batch_size)
        self._user_draws = NUM_USER_DRAWS if user_augmentation else 0
        self._device = device
        with tf.device(HOST):
            self._images = tf.constant(split.images)
            self._labels = tf.constant(split.labels)

    def stream(self, first_step: int, last_step: int) -> tf.data.Dataset:
        """Return the batches of steps first_step .. last_step - 1, prepared while earlier steps
        run.
        """
        options = tf.data.Options()
        options.autotune.enabled = False  # its thread delays the end of a stream by seconds
        with tf.device(HOST):
            steps = tf.data.Dataset.range(first_step, last_step)
            # analyzing it for conversion takes long
            at = tf.autograph.experimental.do_not_convert(self.at)
            batches = steps.map(at).prefetch(NUM_PREFETCHED).with_options(options)
        if not self._device:
            return batches
        return batches.apply(tf.data.experimental.prefetch_to_device(self._device))

    def at(self, step: tf.Tensor | int) -> Batch:
        """Return the batch of one step, counted from 0, made of TensorFlow operations."""
        step = tf.cast(step, tf.int64)
        epoch = step // self.steps_per_epoch
        position = step % self.steps_per_epoch
        order = tf.numpy_function(
            lambda epoch: _permutation(self.seed, int(epoch), self._num_examples),
            [epoch],
            tf.int64,
            stateful=False,
        )
        start = position * self.batch_size + self._first_row
        chosen = tf.ensure_shape(order[start : start + self._num_rows], [self._num_rows])

        # Drawn for the whole batch, so that an example's numbers do not depend on the worker. A
        # further column would change every number, so a new augmentation draws its own numbers, by
        # a pair of seeds that no other draw has. Taken are (seed, step) here, (-1 - seed, step) for
        # the user's function, and (seed, -1) for `_flips`.
        seed = tf.cast(self.seed, tf.int64)
        uniform = self._uniform(7, [seed, step])
        user_uniform = self._uniform(self._user_draws, [-1 - seed, step])
        first_index = step * self.batch_size + self._first_row
        draws = RandomDraws(
            flip=self._flips(chosen, epoch, uniform[:, 6]),
            window=uniform[:, 0:2],
            cutout=uniform[:, 2:4],
            brightness=2 * uniform[:, 4] - 1,
            contrast=2 * uniform[:, 5] - 1,
            user=user_uniform,
            example_index=first_index + tf.range(self._num_rows, dtype=tf.int64),
        )
        return Batch(tf.gather(self._images, chosen), tf.gather(self._labels, chosen), draws)

    def _uniform(self, count: int, seeds: list[tf.Tensor]) -> tf.Tensor:
        """Return `count` random numbers in [0, 1) for each row of this worker."""
        of_batch = tf.random.stateless_uniform([self.batch_size, count], tf.stack(seeds))
        return of_batch[self._first_row : self._first_row + self._num_rows]

    def _flips(self, chosen: tf.Tensor, epoch: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
        """Return which of the chosen examples are mirrored, by numbers in [0, 1)."""
        if self.flip == "none":
            return tf.zeros([self._num_rows], tf.bool)
        if self.flip == "random":
            return uniform < 0.5
        seeds = tf.constant([self.seed, -1], tf.int64)
        in_even_epochs = tf.random.stateless_uniform([self._num_examples], seeds) < 0.5
        is_odd = epoch % 2 == 1
        return tf.math.logical_xor(tf.gather(in_even_epochs, chosen), is_odd)


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)
