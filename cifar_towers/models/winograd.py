"""3x3 convolutions with a fifth to a half of the multiplications, by Winograd's minimal filtering.

An output is computed in tiles of m x m pixels, each from (m + 2) x (m + 2) pixels of its image. Seen as polynomials, an
image's tile and a kernel are multiplied at (m + 2)^2 points, one product each, where a convolution has nine for each
pixel. The transforms to values at the points and back are products with constant matrices, and so are their gradients.

Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308.
"""

import functools

import numpy as np
import tensorflow as tf

from cifar_towers.models.fused import fused

TILE_SIDES = (2, 3, 4)  # m; with larger ones float32 loses more than a digit or two
FINITE_POINTS = (0, 1, -1, 2, -2)  # the first m + 1 are used, and infinity: small integers lose the fewest digits


def conv2d(images: tf.Tensor, kernel: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """The first `height` x `width` pixels of a SAME convolution with stride 1, equal to TensorFlow's up to rounding.

    Args:
      images: [B, H, W, C], where `height` is H or H - 1, and `width` W or W - 1.
      kernel: [3, 3, C, F].

    Returns:
      [B, height, width, F].
    """
    tile = tile_side(height, width)
    from_image, from_kernel, to_output = (tf.constant(matrix, images.dtype) for matrix in transforms(tile))
    points, channels, filters = (tile + 2) ** 2, *kernel.shape[2:]
    tiles = _cut(images, height, width, tile)
    image_values = tf.reshape(tf.matmul(from_image, tiles), [points, -1, channels])
    kernel_values = tf.reshape(tf.matmul(from_kernel, tf.reshape(kernel, [9, -1])), [points, channels, filters])
    output_values = tf.reshape(tf.matmul(image_values, kernel_values), [points, -1])
    output_tiles = tf.reshape(tf.matmul(to_output, output_values), [tile**2, -1, filters])
    return _join(output_tiles, height, width, tile)


def tile_side(height: int, width: int) -> int:
    """The tile's side that takes the fewest multiplications for an output of this size."""
    return min(TILE_SIDES, key=lambda tile: _count(height, tile) * _count(width, tile) * (tile + 2) ** 2)


@functools.cache
def transforms(tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices from an image tile's pixels to values at the points, from a kernel's, and from values to output pixels.

    Returns:
      [(m + 2)^2, (m + 2)^2], [(m + 2)^2, 9] and [m^2, (m + 2)^2] for tiles of side m: the Cook-Toom algorithm in both
      directions.
    """
    points = np.array(FINITE_POINTS[: tile + 1], np.float64)
    others = [np.delete(points, index) for index in range(len(points))]
    scale = [np.prod(point - rest) for point, rest in zip(points, others, strict=True)]
    to_output = np.vander(points, tile, increasing=True).T
    from_kernel = np.vander(points, 3, increasing=True) / np.array(scale)[:, None]
    at_infinity = [np.eye(size)[-1:] for size in (tile, 3)]
    to_output = np.hstack([to_output, at_infinity[0].T])
    from_kernel = np.vstack([from_kernel, at_infinity[1]])
    from_image = np.zeros([tile + 2, tile + 2])
    for row, roots in zip(from_image, [*others, points], strict=True):
        row[: len(roots) + 1] = np.poly(roots)[::-1]
    return tuple(np.kron(matrix, matrix) for matrix in (from_image, from_kernel, to_output))


def _count(side: int, tile: int) -> int:
    """Tiles along a side."""
    return -(-side // tile)


def _cut(images: tf.Tensor, height: int, width: int, tile: int) -> tf.Tensor:
    """Image tiles that overlap by two pixels: [B, H, W, C] -> [(m + 2)^2, tiles C]."""
    cut, join = _overlapping_tiles(*images.shape[1:], _count(height, tile), _count(width, tile), tile)
    return tf.custom_gradient(lambda images: (cut(images), join))(images)


def _join(tiles: tf.Tensor, height: int, width: int, tile: int) -> tf.Tensor:
    """Output tiles side by side: [m^2, tiles, F] -> [B, height, width, F]."""
    join, cut = _adjacent_tiles(height, width, tile)
    return tf.custom_gradient(lambda tiles: (join(tiles), cut))(tiles)


@functools.cache
def _overlapping_tiles(height: int, width: int, channels: int, rows: int, columns: int, tile: int):
    """Cuts images into rows x columns tiles, and the transpose of that, which sums where tiles overlap."""
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

    return cut, join


@functools.cache
def _adjacent_tiles(height: int, width: int, tile: int):
    """Joins tiles to images of height x width, whose last tiles may be cut off, and the transpose of that."""
    rows, columns = _count(height, tile), _count(width, tile)

    @fused
    def join(tiles):
        filters = tiles.shape[-1]
        blocks = tf.transpose(tf.reshape(tiles, [tile, tile, -1, rows, columns, filters]), [2, 3, 0, 4, 1, 5])
        return tf.reshape(blocks, [-1, rows * tile, columns * tile, filters])[:, :height, :width]

    @fused
    def cut(images):
        filters = images.shape[-1]
        beside = [(0, count * tile - side) for count, side in ((rows, height), (columns, width))]
        blocks = tf.reshape(tf.pad(images, [(0, 0), *beside, (0, 0)]), [-1, rows, tile, columns, tile, filters])
        return tf.reshape(tf.transpose(blocks, [2, 4, 0, 1, 3, 5]), [tile**2, -1, filters])

    return join, cut
