"""3x3 convolutions with a quarter to a half of the multiplications, where tiles fill the image: Winograd's algorithm.

A tile of m x m output pixels comes from (m + 2) x (m + 2) pixels of its image. These and the kernel are each
transformed to (m + 2)^2 values, which are multiplied value by value and summed over the channels: for each value a
product of matrices, [tiles, C] x [C, F]. A third transform gives the output's pixels. The transforms are the source's
B, G and A, here products with constant matrices for both directions at once, and so are their gradients.

Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
"""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from cifar_towers.models.fused import fused

TILE_SIDES = (2, 3, 4)  # m; with larger ones float32 loses more than a digit or two
FINITE_POINTS = (0, 1, -1, 2, -2)  # of the Cook-Toom algorithm, which has the first m + 1 of them and infinity


def conv2d(images: tf.Tensor, kernel: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """The first `height` x `width` pixels of a SAME convolution with stride 1, equal to TensorFlow's up to rounding.

    Args:
      images: [B, H, W, C], where `height` is H or H - 1, and `width` W or W - 1.
      kernel: [3, 3, C, F].

    Returns:
      [B, height, width, F].
    """
    tile = tile_side(height, width)
    tiles = (-(-height // tile), -(-width // tile))
    from_image, from_kernel, to_output = (tf.constant(matrix, images.dtype) for matrix in transforms(tile))
    values, channels, filters = (tile + 2) ** 2, *kernel.shape[2:]
    image_tiles = _overlapping_tiles(*images.shape[1:], *tiles, tile)(images)  # [values, B rows columns C]
    image_values = tf.reshape(tf.matmul(from_image, image_tiles), [values, -1, channels])
    kernel_values = tf.reshape(tf.matmul(from_kernel, tf.reshape(kernel, [9, -1])), [values, channels, filters])
    products = tf.reshape(tf.matmul(image_values, kernel_values), [values, -1])
    output_tiles = tf.reshape(tf.matmul(to_output, products), [tile**2, -1, filters])
    return _joined_tiles(height, width, *tiles, tile)(output_tiles)


def tile_side(height: int, width: int) -> int:
    """The tile's side that takes the fewest multiplications for an output of this size."""
    return min(TILE_SIDES, key=lambda tile: -(-height // tile) * -(-width // tile) * (tile + 2) ** 2)


def transforms(tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrices that transform an image tile's pixels, a kernel's, and the sums of products, for tiles of side m.

    Returns:
      [(m + 2)^2, (m + 2)^2], [(m + 2)^2, 9] and [m^2, (m + 2)^2]: Kronecker products of the transposed B, of G and of
      the transposed A, each with itself.
    """
    points = np.array(FINITE_POINTS[: tile + 1], np.float64)
    others = [np.delete(points, index) for index in range(len(points))]
    scale = [*(np.prod(point - rest) for point, rest in zip(points, others, strict=True)), 1.0]
    from_image = np.zeros([tile + 2, tile + 2])
    for row, roots in zip(from_image, [*others, points], strict=True):
        row[: len(roots) + 1] = np.poly(roots)[::-1]
    from_kernel = _values_at(points, 3) / np.array(scale)[:, None]
    to_output = _values_at(points, tile).T
    return tuple(np.kron(matrix, matrix) for matrix in (from_image, from_kernel, to_output))


def _values_at(points: np.ndarray, count: int) -> np.ndarray:
    """Matrix from `count` coefficients, the constant first, to the polynomial's values at `points` and at infinity."""
    return np.vstack([np.vander(points, count, increasing=True), np.eye(count)[-1:]])


# cached: XLA compiles each function once, for all towers and layers of a size


@functools.cache
def _overlapping_tiles(height: int, width: int, channels: int, rows: int, columns: int, tile: int) -> Callable:
    """A function that cuts images into tiles that overlap by two pixels; its gradient sums where they overlap.

    [B, height, width, C] -> [(m + 2)^2, B rows columns C], with zeros around the images.
    """
    none = (0, 0)

    @fused
    def cut(images):
        beside = [(1, (count + 1) * tile - side - 1) for count, side in ((rows, height), (columns, width))]
        blocks = tf.pad(images, [none, *beside, none])
        blocks = tf.reshape(blocks, [-1, rows + 1, tile, columns + 1, tile, channels])
        high = tf.concat([blocks[:, :-1], blocks[:, 1:, :2]], 2)
        tiles = tf.concat([high[:, :, :, :-1], high[:, :, :, 1:, :2]], 4)
        return tf.reshape(tf.transpose(tiles, [2, 4, 0, 1, 3, 5]), [(tile + 2) ** 2, -1])

    @fused
    def join(tiles):
        tiles = tf.reshape(tiles, [tile + 2, tile + 2, -1, rows, columns, channels])
        tiles = tf.transpose(tiles, [2, 3, 0, 4, 1, 5])
        own, shared = tiles[:, :, :, :, :tile], tiles[:, :, :, :, tile:]
        high = tf.pad(own, [none, none, none, (0, 1), none, none])
        high += tf.pad(shared, [none, none, none, (1, 0), (0, tile - 2), none])
        own, shared = high[:, :, :tile], high[:, :, tile:]
        blocks = tf.pad(own, [none, (0, 1), none, none, none, none])
        blocks += tf.pad(shared, [none, (1, 0), (0, tile - 2), none, none, none])
        padded = tf.reshape(blocks, [-1, (rows + 1) * tile, (columns + 1) * tile, channels])
        return padded[:, 1 : height + 1, 1 : width + 1]

    return tf.custom_gradient(lambda images: (cut(images), join))


@functools.cache
def _joined_tiles(height: int, width: int, rows: int, columns: int, tile: int) -> Callable:
    """A function that puts tiles side by side and cuts off what is too much.

    [m^2, B rows columns, F] -> [B, height, width, F].
    """

    @fused
    def join(tiles):
        filters = tiles.shape[-1]
        blocks = tf.transpose(tf.reshape(tiles, [tile, tile, -1, rows, columns, filters]), [2, 3, 0, 4, 1, 5])
        return tf.reshape(blocks, [-1, rows * tile, columns * tile, filters])[:, :height, :width]

    @fused
    def cut(images):
        filters = images.shape[-1]
        padded = tf.pad(images, [(0, 0), (0, rows * tile - height), (0, columns * tile - width), (0, 0)])
        blocks = tf.reshape(padded, [-1, rows, tile, columns, tile, filters])
        return tf.reshape(tf.transpose(blocks, [2, 4, 0, 1, 3, 5]), [tile**2, -1, filters])

    return tf.custom_gradient(lambda tiles: (join(tiles), cut))
