"""A 2-D convolution in the forms that are fastest on CPUs, equal to TensorFlow's up to rounding.

`conv2d` chooses the form: TensorFlow's own, a faster gradient to the kernel, or Winograd's
algorithm. In float32 the last rounds about ten times as much as TensorFlow's, which is still a
hundred times less than bfloat16. In bfloat16 it computes gradients to kernels alone, to 0.5 to
2.4 %.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from cifar_towers.hardware import processor_features
from cifar_towers.xla import fused, fused_moves

Padding: TypeAlias = Sequence[tuple[int, int]]  # before and after each of the axes [B, H, W, C]

# (images, gradient of the output, the kernel's shape, padding) -> gradient of the kernel
KernelGradient: TypeAlias = Callable[
    [tf.Tensor, tf.Tensor, tf.TensorShape, Padding | str], tf.Tensor
]

# images of at most so many columns are put side by side, to at most so many columns
NARROW_COLUMNS = 9
JOINED_COLUMNS = 80

# pixels of a tile's side, m; with larger ones float32 loses more than a digit or two
WINOGRAD_TILES = (2, 3, 4)
# points of the Cook-Toom algorithm: tiles of side m use the first m + 1 of them, and infinity; -1/2
# rounds less than -2 (B. Barabasz et al., arXiv 1803.10986)
WINOGRAD_POINTS = (0, 1, -1, 2, -0.5)


def conv2d(
    images: tf.Tensor, kernel: tf.Tensor, strides: int = 1, padding: Padding | str = "SAME"
) -> tf.Tensor:
    """Compute `tf.nn.conv2d` of [B, H, W, C] with [h, w, C, F], in a faster form on CPUs.

    Many 3x3 filters of many channels are applied in float32 by Winograd's algorithm.

    On CPUs, TensorFlow's gradient to the kernel reaches half the speed of the forward pass in
    bfloat16, and in float32 with AVX2; with AMX it reaches a tenth if the images are small. Another
    form is used where `_faster_kernel_gradient` knows one. With an explicit `Padding`, the gradient
    to the images is a convolution with the turned kernel, because TensorFlow's takes up to four
    times as long.
    """
    if isinstance(padding, str):
        padding = padding.upper()
    if strides != 1 or not _on_cpu(images):
        return tf.nn.conv2d(images, kernel, strides, padding)

    has_known_size = None not in images.shape[1:]
    is_same = has_known_size and padding in ("SAME", even_padding(images.shape, kernel.shape))
    if is_same and _suits_winograd(images, kernel):
        height, width = images.shape[1:3]
        if padding != "SAME":  # without the last row or column of an odd size
            height -= height % 2
            width -= width % 2
        return winograd_conv2d(images, kernel, height, width)

    to_kernel = _faster_kernel_gradient(images, kernel) if is_same else None
    if isinstance(padding, str) and to_kernel is None:
        return tf.nn.conv2d(images, kernel, 1, padding)
    return _conv2d_with_faster_gradients(
        images, kernel, padding, to_kernel or _kernel_gradient_of_padded_images
    )


def _conv2d_with_faster_gradients(
    images: tf.Tensor, kernel: tf.Tensor, padding: Padding | str, to_kernel: KernelGradient
) -> tf.Tensor:
    """Compute a convolution with stride 1; see `conv2d` for its gradients."""

    @tf.custom_gradient
    def convolve(images: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return (
                _image_gradient(images, upstream, kernel, padding),
                to_kernel(images, upstream, kernel.shape, padding),
            )

        return tf.nn.conv2d(images, kernel, 1, padding), gradient

    return convolve(images, kernel)


def even_padding(images: tf.TensorShape, kernel: tf.TensorShape) -> Padding | str:
    """Return the padding of a SAME convolution whose output lacks the last row or column of an odd
    size.

    Args:
      images: [B, H, W, C]. "SAME" is returned if H or W is not known.
      kernel: [h, w, C, F], where h and w are odd.
    """
    if None in images[1:3]:
        return "SAME"
    sides = [
        (size // 2, size // 2 - length % 2)
        for size, length in zip(kernel[:2], images[1:3], strict=True)
    ]
    return [(0, 0), *sides, (0, 0)]


def _on_cpu(images: tf.Tensor) -> bool:
    return "CPU" in images.device if images.device else not tf.config.list_logical_devices("GPU")


def _suits_winograd(images: tf.Tensor, kernel: tf.Tensor) -> bool:
    """Return whether Winograd's algorithm is faster on this processor, in float32.

    In bfloat16 it would round each output by about a percent.
    """
    if images.dtype != tf.float32 or "avx2" not in processor_features():
        return False
    enough = 64 * 256 if "avx512f" in processor_features() else 64 * 128
    return _has_many_products(images, kernel, enough)


def _has_many_products(images: tf.Tensor, kernel: tf.Tensor, enough: int) -> bool:
    """Return whether a kernel has so many channels and filters that matrix products are most of the
    work of Winograd's algorithm.

    Args:
      images: [B, H, W, C].
      kernel: [h, w, C, F]. For any but 3x3 the result is false.
      enough: the smallest C * F, by measurement with 512 images of 2x2 to 15x15 pixels.
    """
    *size, channels, filters = kernel.shape
    if size != [3, 3] or min(images.shape[1:3]) == 1:
        return False
    return min(channels, filters) >= 64 and channels * filters >= enough


def _faster_kernel_gradient(images: tf.Tensor, kernel: tf.Tensor) -> KernelGradient | None:
    """Return the form of the gradient to the kernel that is faster than TensorFlow's on this
    processor, by measurement.

    Returns:
      None if TensorFlow's is the fastest, and for kernels of even size.
    """
    high, wide, channels, filters = kernel.shape
    if high % 2 == 0 or wide % 2 == 0:
        return None

    if images.dtype == tf.bfloat16:
        batch, _, columns, _ = images.shape
        if "amx_bf16" in processor_features():
            is_narrow = columns <= NARROW_COLUMNS and batch is not None
            return _kernel_gradient_side_by_side if is_narrow else None

        has_bfloat16 = "avx512_bf16" in processor_features()
        suits = has_bfloat16 and _has_many_products(images, kernel, 64 * 256)
        return _kernel_gradient_by_winograd if suits else None

    if images.dtype == tf.float32 and channels >= 24 and filters >= 64:
        is_slow = "avx2" in processor_features() and "avx512f" not in processor_features()
        return _kernel_gradient_by_products if is_slow else None
    return None


def _image_gradient(
    images: tf.Tensor, upstream: tf.Tensor, kernel: tf.Tensor, padding: Padding | str
) -> tf.Tensor:
    """Return the gradient of a convolution with stride 1 to its images."""
    if isinstance(padding, str):
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=tf.shape(images),
            filter=kernel,
            out_backprop=upstream,
            strides=[1] * 4,
            padding=padding,
        )
    turned = tf.transpose(tf.reverse(kernel, [0, 1]), [0, 1, 3, 2])
    sides = [
        (size - 1 - before, length - computed + before)
        for size, length, computed, (before, _) in zip(
            kernel.shape[:2], images.shape[1:3], upstream.shape[1:3], padding[1:3], strict=True
        )
    ]
    return tf.nn.conv2d(upstream, turned, 1, [(0, 0), *sides, (0, 0)])


def _kernel_gradient_of_padded_images(
    images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape, padding: Padding | str
) -> tf.Tensor:
    """Return the gradient of a convolution with stride 1 and explicit padding to its kernel, by
    TensorFlow's operation on padded images.

    oneDNN does not have the operation with explicit padding: 60 times as long in bfloat16.
    """
    return tf.raw_ops.Conv2DBackpropFilter(
        input=tf.pad(images, padding),
        filter_sizes=shape,
        out_backprop=upstream,
        strides=[1] * 4,
        padding="VALID",
    )


def _kernel_gradient_side_by_side(
    images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape, padding: Padding | str
) -> tf.Tensor:
    """Return the gradient of a convolution with stride 1 to its kernel, by TensorFlow's operation
    on wider images, each of which is several images side by side.

    oneDNN computes it row by row, and with AMX a row of a few pixels takes as long as one of 32.
    Columns of zeros keep the images apart.
    """
    batch, rows, columns, _ = images.shape
    gap = shape[1] // 2
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    count = max(n for n in divisors if n * (columns + gap) <= JOINED_COLUMNS)

    missing = [(0, rows - upstream.shape[1]), (0, columns - upstream.shape[2])]
    if missing != [(0, 0), (0, 0)]:  # see `even_padding`
        upstream = tf.pad(upstream, [(0, 0), *missing, (0, 0)])

    return tf.raw_ops.Conv2DBackpropFilter(
        input=_side_by_side(images, count, gap),
        filter_sizes=shape,
        out_backprop=_side_by_side(upstream, count, gap),
        strides=[1] * 4,
        padding="SAME",
    )


def _side_by_side(images: tf.Tensor, count: int, gap: int) -> tf.Tensor:
    """Join every `count` images of [B, H, W, C] to one of [B / count, H, count (W + gap) - gap, C].

    The first image stands beside those that come B / count, 2 B / count, ... images later: parts
    of the batch are joined without a transposition.
    """
    batch, rows, _, channels = images.shape
    zeros = tf.zeros([batch // count, rows, gap, channels], images.dtype)
    joined = []
    for part in tf.split(images, count):
        joined += [part, zeros]
    return tf.concat(joined[:-1], 2)


def _kernel_gradient_by_products(
    images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape, padding: Padding | str
) -> tf.Tensor:
    """Return the gradient of a convolution with stride 1 to its kernel, by a matrix product for
    each of the kernel's h rows.

    Its first factor is the gradient of the output. Its second has w shifted copies of the images as
    channels.
    """
    high, wide, channels, filters = shape
    sides = (
        [(size // 2, size // 2) for size in (high, wide)]
        if isinstance(padding, str)
        else padding[1:3]
    )
    above_and_below, beside = sides
    height, width = upstream.shape[1:3]
    # rows are the first axis: a shift by a row is a slice without a copy
    rows = tf.pad(tf.transpose(images, [1, 0, 2, 3]), [above_and_below, (0, 0), beside, (0, 0)])
    rows = tf.concat([rows[:, :, column : column + width] for column in range(wide)], -1)
    # a tenth faster as the first factor
    outputs = tf.reshape(tf.transpose(upstream, [1, 0, 2, 3]), [-1, filters])
    products = [
        tf.matmul(
            outputs, tf.reshape(rows[row : row + height], [-1, wide * channels]), transpose_a=True
        )
        for row in range(high)
    ]
    return tf.reshape(tf.transpose(tf.stack(products), [0, 2, 1]), shape)


# ---- Winograd's algorithm


def winograd_conv2d(images: tf.Tensor, kernel: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Compute the first `height` x `width` pixels of a SAME convolution with a 3x3 kernel and
    stride 1.

    It takes a quarter to a half of the multiplications, where tiles fill the image. A tile of m x m
    output pixels comes from (m + 2) x (m + 2) pixels of its image. These and the kernel are each
    transformed to (m + 2)^2 values, which are multiplied value by value and summed over the
    channels: for each value a product of matrices, [tiles, C] x [C, F]. A third transform gives the
    output's pixels. The transforms are the source's B, G and A. Here they are products with
    constant matrices for both directions at once, and so are their gradients.

    Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv
    1509.09308.

    Args:
      images: [B, H, W, C], where `height` is H or H - 1, and `width` W or W - 1.
      kernel: [3, 3, C, F].

    Returns:
      [B, height, width, F].
    """
    tile = winograd_tile(height, width)
    values = (tile + 2) ** 2
    channels, filters = kernel.shape[2:]
    _, from_kernel, to_output = winograd_transforms(tile)

    image_values = _winograd_image_values(images, height, width, tile)

    kernel_values = tf.matmul(tf.constant(from_kernel, kernel.dtype), tf.reshape(kernel, [9, -1]))
    kernel_values = tf.reshape(kernel_values, [values, channels, filters])

    products = tf.reshape(tf.matmul(image_values, kernel_values), [values, -1])
    output_tiles = tf.matmul(tf.constant(to_output, images.dtype), products)
    output_tiles = tf.reshape(output_tiles, [tile**2, -1, filters])
    return _joined_tiles(height, width, tile)(output_tiles)


def _kernel_gradient_by_winograd(
    images: tf.Tensor, upstream: tf.Tensor, shape: tf.TensorShape, padding: Padding | str
) -> tf.Tensor:
    """Return the gradient of a 3x3 convolution with stride 1 to its kernel, which is that of
    `winograd_conv2d`, in bfloat16.

    Most of what the transforms round to bfloat16 averages out, because a gradient is a sum over all
    pixels: of 512 random images the error is 0.5 to 2.4 % of the gradient's norm.
    """
    height, width = upstream.shape[1:3]
    filters = shape[-1]
    tile = winograd_tile(height, width)
    values = (tile + 2) ** 2
    _, from_kernel, to_output = winograd_transforms(tile)

    image_values = _winograd_image_values(images, height, width, tile)

    # the gradient of the output, back through the third transform
    output_tiles = tf.reshape(_separate_tiles(height, width, tile)(upstream), [tile**2, -1])
    transform = tf.constant(to_output, images.dtype)
    output_values = tf.matmul(transform, output_tiles, transpose_a=True)
    output_values = tf.reshape(output_values, [values, -1, filters])

    # summed over the tiles of all images
    kernel_values = tf.matmul(image_values, output_values, transpose_a=True)
    kernel_values = tf.reshape(tf.cast(kernel_values, tf.float32), [values, -1])

    # back through the transform of the kernel
    gradient = tf.matmul(tf.constant(from_kernel, tf.float32), kernel_values, transpose_a=True)
    return tf.cast(tf.reshape(gradient, shape), images.dtype)


def _winograd_image_values(images: tf.Tensor, height: int, width: int, tile: int) -> tf.Tensor:
    """Transform the tiles of images that an output of `height` x `width` comes from.

    [B, H, W, C] -> [(m + 2)^2, tiles, C].
    """
    from_image, _, _ = winograd_transforms(tile)
    tiles = _overlapping_tiles(*images.shape[1:], height, width, tile)(images)
    transformed = tf.matmul(tf.constant(from_image, images.dtype), tiles)
    return tf.reshape(transformed, [(tile + 2) ** 2, -1, images.shape[-1]])


def winograd_tile(height: int, width: int) -> int:
    """Return the side m of the tiles for an output of this size.

    A larger tile rounds more, so it must take less than nine tenths of the multiplications.
    """

    def multiplications(tile: int) -> int:
        rows, columns = _count_tiles(height, width, tile)
        return rows * columns * (tile + 2) ** 2

    best, *larger = WINOGRAD_TILES
    for tile in larger:
        if multiplications(tile) < 0.9 * multiplications(best):
            best = tile
    return best


def _count_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return how many rows and columns of tiles cover an output."""
    return math.ceil(height / tile), math.ceil(width / tile)


def winograd_transforms(tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the matrices that transform an image tile's pixels, a kernel's, and the sums of
    products, for a side m.

    Returns:
      [(m + 2)^2, (m + 2)^2], [(m + 2)^2, 9] and [m^2, (m + 2)^2]: Kronecker products of the
      transposed B, of G and of the transposed A, each with itself.
    """
    points = np.array(WINOGRAD_POINTS[: tile + 1], np.float64)
    others = [np.delete(points, index) for index in range(len(points))]
    scale = np.ones(tile + 2)  # the last is infinity's
    from_image = np.zeros([tile + 2, tile + 2])
    for index, rest in enumerate(others):
        scale[index] = np.prod(points[index] - rest)
        # the polynomial that is 0 at all other points, the constant first
        from_image[index, :-1] = np.poly(rest)[::-1]
    from_image[-1] = np.poly(points)[::-1]
    from_kernel = _values_at(points, 3) / scale[:, None]
    to_output = _values_at(points, tile).T
    return (
        np.kron(from_image, from_image),
        np.kron(from_kernel, from_kernel),
        np.kron(to_output, to_output),
    )


def _values_at(points: np.ndarray, count: int) -> np.ndarray:
    """Return the matrix from `count` coefficients of a polynomial, the constant first, to its
    values at `points` and at infinity.
    """
    return np.vstack([np.vander(points, count, increasing=True), np.eye(count)[-1:]])


# The next three functions are cached, so that XLA compiles each result once for all towers and
# layers of a size. The batch stands beside the channels, so that what is moved is in long rows.


@functools.cache
def _overlapping_tiles(
    image_height: int, image_width: int, channels: int, height: int, width: int, tile: int
) -> Callable:
    """Return a function that cuts images into tiles that overlap by two pixels; its gradient sums
    where they overlap.

    [B, image_height, image_width, C] -> [(m + 2)^2, rows columns B C], where rows x columns tiles
    cover `height` x `width` pixels, with zeros around the images.
    """
    rows, columns = _count_tiles(height, width, tile)
    none = (0, 0)

    @fused_moves
    def cut(images: tf.Tensor) -> tf.Tensor:
        above_and_below = (1, (rows + 1) * tile - image_height - 1)
        left_and_right = (1, (columns + 1) * tile - image_width - 1)
        padded = tf.pad(images, [none, above_and_below, left_and_right, none])
        blocks = tf.reshape(padded, [-1, rows + 1, tile, columns + 1, tile, channels])
        blocks = tf.transpose(blocks, [2, 4, 1, 3, 0, 5])
        high = tf.concat([blocks[:, :, :-1], blocks[:2, :, 1:]], 0)
        tiles = tf.concat([high[:, :, :, :-1], high[:, :2, :, 1:]], 1)
        return tf.reshape(tiles, [(tile + 2) ** 2, -1])

    @fused
    def join(tiles: tf.Tensor) -> tf.Tensor:
        tiles = tf.reshape(tiles, [tile + 2, tile + 2, rows, columns, -1, channels])
        inside = tiles[:, :tile]
        shared = tiles[:, tile:]
        high = tf.pad(inside, [none, none, none, (0, 1), none, none])
        high += tf.pad(shared, [none, (0, tile - 2), none, (1, 0), none, none])
        inside = high[:tile]
        shared = high[tile:]
        blocks = tf.pad(inside, [none, none, (0, 1), none, none, none])
        blocks += tf.pad(shared, [(0, tile - 2), none, (1, 0), none, none, none])
        blocks = tf.transpose(blocks, [4, 2, 0, 3, 1, 5])
        padded = tf.reshape(blocks, [-1, (rows + 1) * tile, (columns + 1) * tile, channels])
        return padded[:, 1 : image_height + 1, 1 : image_width + 1]

    return tf.custom_gradient(lambda images: (cut(images), join))


@functools.cache
def _joined_tiles(height: int, width: int, tile: int) -> Callable:
    """Return a function that puts tiles side by side and cuts off what is too much.

    [m^2, rows columns B, F] -> [B, height, width, F].
    """
    rows, columns = _count_tiles(height, width, tile)

    @fused
    def join(tiles: tf.Tensor) -> tf.Tensor:
        filters = tiles.shape[-1]
        blocks = tf.reshape(tiles, [tile, tile, rows, columns, -1, filters])
        blocks = tf.transpose(blocks, [4, 2, 0, 3, 1, 5])
        return tf.reshape(blocks, [-1, rows * tile, columns * tile, filters])[:, :height, :width]

    cut = _separate_tiles(height, width, tile)
    return tf.custom_gradient(lambda tiles: (join(tiles), cut))


@functools.cache
def _separate_tiles(height: int, width: int, tile: int) -> Callable:
    """Return a function that cuts images into tiles, the last ones filled up with zeros.

    [B, height, width, F] -> [m^2, rows columns B, F].
    """
    rows, columns = _count_tiles(height, width, tile)

    @fused_moves
    def cut(images: tf.Tensor) -> tf.Tensor:
        filters = images.shape[-1]
        below = (0, rows * tile - height)
        beside = (0, columns * tile - width)
        padded = tf.pad(images, [(0, 0), below, beside, (0, 0)])
        blocks = tf.reshape(padded, [-1, rows, tile, columns, tile, filters])
        blocks = tf.transpose(blocks, [2, 4, 1, 3, 0, 5])
        return tf.reshape(blocks, [tile**2, -1, filters])

    return cut
