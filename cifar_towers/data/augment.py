"""Augmentation of whole batches. An example's result does not depend on the tower that computes it.

Images are float32 levels 0..255 until `normalize`. The random numbers are arguments: no function
here draws any.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from cifar_towers.config.train_config import AugmentationSettings
from cifar_towers.data.batches import RandomDraws
from cifar_towers.data.dataset import CIFAR10
from cifar_towers.xla import fused


class Augmentation(NamedTuple):
    """The preprocessing of images, with the moments of `DatasetInfo`."""

    settings: AugmentationSettings = AugmentationSettings()
    mean: tuple[float, ...] = CIFAR10.mean
    std: tuple[float, ...] = CIFAR10.std
    # the user's, as `load_augmentation` returns it
    user_function: Callable[..., tuple[tf.Tensor, tf.Tensor]] | None = None

    def augment(self, images: tf.Tensor, draws: RandomDraws, image_size: int = 0) -> tf.Tensor:
        """Augment and normalize training images: [B, S, S, 3] uint8 -> [B, T, T, 3] float32.

        Args:
          image_size: size that images are downsampled to; 0 keeps S. With `crop` it is ignored: T
            is the crop.
        """
        settings = self.settings
        images = tf.cast(images, tf.float32)  # before the padding: GPUs cannot pad integers
        window_size = settings.crop or images.shape[1]
        images = random_window(
            images, draws.window, draws.flip, window_size, settings.shift, settings.shift_fill
        )
        if settings.brightness or settings.contrast:
            center = tf.constant(self.mean)
            if settings.standardize == "image":
                center = tf.reduce_mean(images, [1, 2], keepdims=True)
            brightness = settings.brightness * draws.brightness
            contrast = 1 + settings.contrast * draws.contrast
            images = adjust_color(images, brightness, contrast, center)
        images = self.normalize(images)
        if settings.cutout:
            images = cutout(images, draws.cutout, settings.cutout)
        if image_size and not settings.crop:
            images = downsample(images, image_size)
        return images

    def augment_with_labels(
        self, images: tf.Tensor, labels: tf.Tensor, draws: RandomDraws, image_size: int = 0
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Augment images as `augment` does, then by the user's function; return them with labels
        [B] or [B, C].
        """
        images = self.augment(images, draws, image_size)
        if not self.user_function:
            return images, labels
        return self.user_function(images, labels, draws.user)

    def evaluate(self, images: tf.Tensor) -> tf.Tensor:
        """Normalize test images, or their central crop if `crop` is set: [B, S, S, 3] uint8 -> [B,
        T, T, 3] float32.
        """
        images = tf.cast(images, tf.float32)
        crop = self.settings.crop
        if crop:
            start = (images.shape[1] - crop) // 2
            images = images[:, start : start + crop, start : start + crop]
        return self.normalize(images)

    def normalize(self, images: tf.Tensor) -> tf.Tensor:
        """Scale to zero mean and unit standard deviation, per channel of the data set or per
        image.
        """
        if self.settings.standardize == "dataset":
            return _standardize(images, tf.constant(self.mean), tf.constant(self.std))
        return tf.image.per_image_standardization(images)


def random_window(
    images: tf.Tensor,
    position: tf.Tensor,
    mirrored: tf.Tensor,
    size: int,
    pad: int = 0,
    fill: str = "reflect",
) -> tf.Tensor:
    """Crop a window of each image, padded by `pad` pixels: [B, S, S, C] -> [B, size, size, C].

    Args:
      position: [B, 2] in [0, 1), row and column of the window's corner as fractions of the possible
        ones.
      mirrored: [B] bool, whether to mirror the window left to right.
      fill: value of the padding, `reflect` or `zeros`.
    """
    side = images.shape[1]
    # TensorFlow keeps int32 in the host's memory
    corner = tf.cast(position * (side + 2 * pad - size + 1), tf.int64)
    offsets = tf.range(size, dtype=tf.int64)
    rows = corner[:, :1] + offsets
    columns = corner[:, 1:] + tf.where(mirrored[:, None], offsets[::-1], offsets)

    if fill == "reflect":
        rows = _reflected(rows - pad, side)
        columns = _reflected(columns - pad, side)
    elif pad:
        images = tf.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])

    flat = tf.reshape(images, [images.shape[0], -1, images.shape[3]])
    pixels = rows[:, :, None] * images.shape[2] + columns[:, None, :]
    return tf.gather(flat, pixels, batch_dims=1)


def _reflected(index: tf.Tensor, size: int) -> tf.Tensor:
    """Map an index outside a row of `size` pixels to its mirror image inside. The border pixel is
    not repeated.
    """
    last = size - 1
    return last - tf.abs(last - tf.abs(index))


@fused
def _standardize(images: tf.Tensor, mean: tf.Tensor, std: tf.Tensor) -> tf.Tensor:
    return (images - mean) / std


@fused
def adjust_color(
    images: tf.Tensor, brightness: tf.Tensor, contrast: tf.Tensor, center: tf.Tensor
) -> tf.Tensor:
    """Add `brightness` ([B], in levels), then scale by `contrast` ([B]) about the color
    `center`.
    """
    brightness = brightness[:, None, None, None]
    contrast = contrast[:, None, None, None]
    return (images + brightness - center) * contrast + center


def cutout(images: tf.Tensor, position: tf.Tensor, size: int) -> tf.Tensor:
    """Set a size x size square to 0 at a uniformly random place inside each image.

    Source: T. DeVries and G. Taylor, "Improved Regularization ... with Cutout", arXiv 1708.04552.
    """
    height, width = images.shape[1:3]
    corner = tf.cast(position * [height - size + 1, width - size + 1], tf.int64)
    rows = tf.range(height, dtype=tf.int64) - corner[:, :1]
    columns = tf.range(width, dtype=tf.int64) - corner[:, 1:]
    inside_rows = (rows >= 0) & (rows < size)
    inside_columns = (columns >= 0) & (columns < size)
    inside = inside_rows[:, :, None] & inside_columns[:, None, :]
    return tf.where(inside[..., None], tf.zeros_like(images), images)


def downsample(images: tf.Tensor, size: int) -> tf.Tensor:
    """Resize by antialiased bilinear resampling: [B, S, S, C] -> [B, size, size, C]."""
    if size == images.shape[1]:
        return images
    side, channels = images.shape[2:]
    matrix = _downsampling_matrix(side, size)
    # one product with a large matrix is faster than many small ones, although two thirds of the
    # matrix are zeros
    of_all_channels = tf.constant(np.kron(matrix, np.eye(channels)).T, images.dtype)
    narrow = tf.matmul(tf.reshape(images, [-1, side * channels]), of_all_channels)
    narrow = tf.reshape(narrow, [-1, side, size * channels])
    small = tf.matmul(tf.constant(matrix, images.dtype), narrow)
    return tf.reshape(small, [-1, size, size, channels])


@functools.cache
def _downsampling_matrix(size: int, new_size: int) -> np.ndarray:
    """Return [new_size, size] weights; each row is a triangle about its pixel's center, with the
    sum 1.
    """
    ratio = size / new_size  # half of the triangle's base
    centers = (np.arange(new_size) + 0.5) * ratio - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(size) - centers[:, None]) / ratio)
    return weights / weights.sum(1, keepdims=True)


def tta_views(images: tf.Tensor) -> list[tuple[float, tf.Tensor]]:
    """Return (weight, images) of each view of test-time augmentation; the weights sum to 1.

    The views are the images, and at half their weight the images shifted by a pixel down and right,
    and up and left, with the border reflected. Each view is followed by its mirror image.

    Source: K. Jordan, arXiv 2404.00498.
    """
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    views = []
    for weight, view in ((0.25, images), (0.125, padded[:, :-2, :-2]), (0.125, padded[:, 2:, 2:])):
        mirrored = tf.reverse(view, [2])
        views += [(weight, view), (weight, mirrored)]
    return views
