"""Pillow's resizing in operations that every export format supports, equal to it to the bit.

Pillow computes with whole numbers: weights in 22 bits, and levels rounded to 8 bits after each of two passes. Here they
are float32, whose sums are exact below 2^24, as they are where the weights are split into 16 and 6 bits.
"""

from keras import ops

WEIGHT_BITS, LOW_BITS = 22, 6
QUOTIENT_BITS = (8, 7, 7)  # of a weight, by long division: more at a time would not fit in 32 bits


def resize_square(images, side: int):
    """[B, H, W, C] float levels from 0 to 255 -> [B, side, side, C]: the central square, resized as by
    `image_files.to_levels`.

    `images` is a tensor or a symbolic one of Keras. No operation needs to know H and W before the graph runs.
    """
    planes = ops.transpose(images, (0, 3, 1, 2))
    height, width = (ops.cast(ops.sum(ops.zeros_like(planes), axis), "int32") for axis in ((0, 1, 3), (0, 1, 2)))
    square = ops.minimum(ops.sum(height + 1), ops.sum(width + 1))
    planes = _resample(planes, _weights(width, square, side))
    planes = _resample(ops.swapaxes(planes, 2, 3), _weights(height, square, side))
    return ops.reshape(ops.transpose(planes, (0, 3, 2, 1)), (-1, side, side, images.shape[-1]))


def _weights(zeros, square, side: int):
    """[side, n] int32, for n zeros: row i holds a triangle about the center of output pixel i, over the central
    `square` input pixels; its half-width is the larger of an output and an input pixel, its sum about 2^22."""
    first = ops.floor_divide(ops.sum(zeros + 1) - square, 2)
    positions = ops.cumsum(zeros + 1) - 1 - first
    outputs = ops.expand_dims(ops.arange(side, dtype="int32"), 1)
    distances = ops.absolute(side * (2 * positions + 1) - (2 * outputs + 1) * square)  # in 1 / (2 side) input pixels
    heights = ops.maximum(2 * ops.maximum(square, side) - distances, 0)
    inside = ops.logical_and(positions >= 0, positions < square)
    remainders = heights * ops.cast(inside, "int32")
    total = ops.sum(remainders, axis=1, keepdims=True)
    weights = 0
    for bits in QUOTIENT_BITS:
        scaled = remainders * 2**bits
        quotients = ops.floor_divide(scaled, total)
        remainders = scaled - quotients * total
        weights = weights * 2**bits + quotients
    return weights + ops.cast(2 * remainders >= total, "int32")


def _resample(planes, weights):
    """[..., n] whole levels and [side, n] weights -> [..., side] levels, rounded to whole ones."""
    high = ops.floor_divide(weights, 2**LOW_BITS)
    low = weights - high * 2**LOW_BITS
    high, low = (ops.matmul(planes, ops.transpose(ops.cast(part, "float32"))) for part in (high, low))
    scale = 2.0 ** (WEIGHT_BITS - LOW_BITS)
    return ops.floor((high + ops.floor(low / 2**LOW_BITS)) / scale + 0.5)
