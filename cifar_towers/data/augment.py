"""Whole-batch augmentation: functions of (images, draws), the same for an example on whatever tower it lands.

Images are float32 levels 0..255 until `normalise`. No function here draws a random number.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from cifar_towers.data.batches import RandomDraws
from cifar_towers.data.dataset import CIFAR10


class Augmentation(NamedTuple):
    """What is done to an image before a net sees it; units as in `TrainConfig`, moments as in `DatasetInfo`."""

    crop: int = 0
    shift: int = 0
    shift_fill: str = "reflect"
    cutout: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    standardize: str = "dataset"
    mean: tuple[float, ...] = CIFAR10.mean
    deviation: tuple[float, ...] = CIFAR10.deviation

    def train(self, images: tf.Tensor, draws: RandomDraws, side: int = 0) -> tf.Tensor:
        """[B, S, S, 3] uint8 -> [B, side, side, 3] float32, or [B, crop, crop, 3], as a net trains on it; all S pixels
        if neither is given."""
        images = tf.cast(images, tf.float32)  # not later: GPUs cannot pad whole numbers
        if self.shift or self.crop:
            images = random_window(images, draws.window, self.crop or images.shape[1], self.shift, self.shift_fill)
        images = flip(images, draws.flip)
        if self.brightness or self.contrast:
            centre = (
                tf.constant(self.mean)
                if self.standardize == "dataset"
                else tf.reduce_mean(images, [1, 2], keepdims=True)
            )
            images = color(images, self.brightness * draws.brightness, 1 + self.contrast * draws.contrast, centre)
        images = self.normalize(images)
        if self.cutout:
            images = cutout(images, draws.cutout, self.cutout)
        return downsample(images, side) if side and not self.crop else images

    def evaluate(self, images: tf.Tensor) -> tf.Tensor:
        """[B, S, S, 3] uint8 -> what the same net is judged on: the central crop, normalised."""
        images = tf.cast(images, tf.float32)
        if self.crop:
            start = (images.shape[1] - self.crop) // 2
            images = images[:, start : start + self.crop, start : start + self.crop]
        return self.normalize(images)

    def normalize(self, images: tf.Tensor) -> tf.Tensor:
        """Levels to zero mean and unit deviation, of the data set's channels or of each image.

        An image's own deviation counts as at least 1 / sqrt(number of values), as `tf.image.per_image_standardization`.
        """
        if self.standardize == "dataset":
            return (images - tf.constant(self.mean)) / tf.constant(self.deviation)
        return tf.image.per_image_standardization(images)


def random_window(images: tf.Tensor, place: tf.Tensor, side: int, pad: int = 0, fill: str = "reflect") -> tf.Tensor:
    """A side x side window of each image, grown by `pad` pixels all round: [B, H, W, C] -> [B, side, side, C].

    Args:
      place: [B, 2] in [0, 1): row and column, as fractions of the whole numbers that fit.
      fill: `reflect` or `zeros`, what the pixels outside are.
    """
    if pad:
        mode = {"reflect": "REFLECT", "zeros": "CONSTANT"}[fill]
        images = tf.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]], mode)
    choices = images.shape[1] - side + 1
    corner = tf.cast(place * choices, tf.int64)  # not int32, which TensorFlow keeps in the host's memory
    rows = corner[:, :1] + tf.range(side, dtype=tf.int64)
    columns = corner[:, 1:] + tf.range(side, dtype=tf.int64)
    flat = tf.reshape(images, [images.shape[0], -1, images.shape[3]])
    pixels = rows[:, :, None] * images.shape[2] + columns[:, None, :]
    return tf.gather(flat, pixels, batch_dims=1)


def flip(images: tf.Tensor, mirrored: tf.Tensor) -> tf.Tensor:
    """Mirrors the images whose `mirrored` ([B] bool) is true, left to right."""
    return tf.where(mirrored[:, None, None, None], mirror(images), images)


def mirror(images: tf.Tensor) -> tf.Tensor:
    """All images, left to right."""
    return tf.reverse(images, [2])


def color(images: tf.Tensor, brightness: tf.Tensor, contrast: tf.Tensor, centre: tf.Tensor) -> tf.Tensor:
    """Adds `brightness` ([B], in levels), then stretches by `contrast` ([B]) about the colour `centre`."""
    return (images + brightness[:, None, None, None] - centre) * contrast[:, None, None, None] + centre


def cutout(images: tf.Tensor, place: tf.Tensor, size: int) -> tf.Tensor:
    """Blanks a size x size square of each image to 0, its place uniform among those that lie wholly inside.

    Source: T. DeVries and G. Taylor, "Improved Regularization ... with Cutout", arXiv 1708.04552.
    """
    height, width = images.shape[1:3]
    corner = tf.cast(place * [height - size + 1, width - size + 1], tf.int64)
    rows = tf.range(height, dtype=tf.int64) - corner[:, :1]
    columns = tf.range(width, dtype=tf.int64) - corner[:, 1:]
    blank = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    return tf.where(blank[..., None], tf.zeros_like(images), images)


def downsample(images: tf.Tensor, side: int) -> tf.Tensor:
    """[B, H, H, C] -> [B, side, side, C] by area-weighted (antialiased, triangular) resampling of rows and columns."""
    if side == images.shape[1]:
        return images
    matrix = tf.constant(_shrinking_matrix(images.shape[1], side), images.dtype)
    rows = tf.einsum("oh,bhwc->bowc", matrix, images)
    return tf.einsum("pw,bowc->bopc", matrix, rows)


@functools.cache
def _shrinking_matrix(side: int, smaller: int) -> np.ndarray:
    """[smaller, side]: each row a triangle of half-width side/smaller about its output pixel's centre, summing to 1."""
    ratio = side / smaller
    centres = (np.arange(smaller) + 0.5) * ratio - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(side) - centres[:, None]) / ratio)
    return weights / weights.sum(1, keepdims=True)


def views(images: tf.Tensor, tta: int) -> list[tuple[float, Callable[[], tf.Tensor]]]:
    """The weighted views of test-time augmentation; weights sum to 1, images are made only when asked for.

    0: the image. 1: it and its mirror, half each. 2: half of that, and half of the same on the two diagonal shifts
    by one pixel. Source: K. Jordan, arXiv 2404.00498.
    """
    if tta == 0:
        return [(1.0, lambda: images)]
    if tta == 1:
        return [(0.5, lambda: images), (0.5, lambda: mirror(images))]
    height, width = images.shape[1:3]
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    up_left, down_right = padded[:, :height, :width], padded[:, 2:, 2:]
    shifted = [
        (0.125, make)
        for moved in (up_left, down_right)
        for make in (functools.partial(tf.identity, moved), functools.partial(mirror, moved))
    ]
    return [(0.25, lambda: images), (0.25, lambda: mirror(images)), *shifted]
