from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.models import convolution, winograd
from scripts.speedrun import operations
from tests.models.convolutions import gradients, op_types, processor


@pytest.mark.parametrize("tile", winograd.TILE_SIDES)
def test_transforms_are_exact(tile):
    """Every product of a pixel and a weight comes to exactly one in its output and to zero elsewhere."""
    from_image, from_kernel, to_output = (
        [[Fraction(value).limit_denominator(10_000) for value in row] for row in matrix]
        for matrix in winograd.transforms(tile)
    )
    from_image, from_kernel, to_output = (np.array(rows) for rows in (from_image, from_kernel, to_output))
    side = tile + 2
    weights = np.einsum("op,pi,pk->oik", to_output, from_image, from_kernel)
    expected = np.zeros_like(weights)
    for y, x, row, column in np.ndindex(tile, tile, 3, 3):
        expected[y * tile + x, (y + row) * side + x + column, row * 3 + column] = 1
    assert (weights == expected).all()


def test_tiles_take_the_fewest_products():
    sides = {(14, 14): 4, (8, 4): 4, (7, 7): 4, (6, 6): 3, (3, 3): 3, (2, 2): 2, (7, 2): 2, (5, 9): 3}
    assert {size: winograd.tile_side(*size) for size in sides} == sides


@pytest.mark.parametrize("size", [(15, 15), (8, 4), (7, 7), (3, 3), (2, 2), (7, 2), (5, 9)])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("even", [False, True])
def test_values_and_gradients_equal_tensorflows(monkeypatch, size, images, even):
    """Of a SAME convolution, and of one without the last row and column of an odd size."""
    processor(monkeypatch, "avx2")
    random = np.random.default_rng(0)
    shape = (images, *size, 64)
    out_high, out_wide = (side - side % 2 * even for side in size)
    images, kernel = random.normal(size=shape), random.normal(size=(3, 3, 64, 128)) / 24
    upstream = random.normal(size=(len(images), out_high, out_wide, 128))
    padding = convolution.even_padding(tf.TensorShape(shape), tf.TensorShape(kernel.shape)) if even else "SAME"
    narrow = [tf.constant(values, tf.float32) for values in (images, kernel, upstream)]
    ours = gradients(lambda x, k: convolution.conv2d(x, k, 1, padding), *narrow)
    exact = gradients(
        lambda x, k: tf.nn.conv2d(x, k, 1, "SAME")[:, :out_high, :out_wide],
        *map(tf.constant, (images, kernel, upstream)),
    )
    for actual, true in zip(ours, exact, strict=True):
        assert np.abs(actual.numpy() - true).max() <= 3e-5 * np.abs(true).max()


def test_it_is_used_only_where_measured(monkeypatch):
    processor(monkeypatch, "avx2")
    assert "Conv2D" not in op_types(tf.float32, 64, "/CPU:1", 1, "SAME", 128)
    for arguments in [
        (tf.float32, 64, "/CPU:1", 1, "SAME", 64),
        (tf.float32, 32, "/CPU:1", 1, "SAME", 512),
        (tf.float32, 64, "/CPU:1", 1, "VALID", 128),
        (tf.float32, 64, "/CPU:1", 2, "SAME", 128),
        (tf.float32, 64, "/GPU:0", 1, "SAME", 128),
        (tf.bfloat16, 256, "/CPU:1", 1, "SAME", 256),
        (tf.float64, 256, "/CPU:1", 1, "SAME", 256),
        (tf.float32, 256, "/CPU:1", 1, [(0, 0)] * 4, 256),
    ]:
        assert "Conv2D" in op_types(*arguments), arguments
    processor(monkeypatch)
    assert "Conv2D" in op_types(tf.float32, 256, "/CPU:1", 1, "SAME", 256)
    processor(monkeypatch, "avx2", "avx512f")
    assert "Conv2D" in op_types(tf.float32, 64, "/CPU:1", 1, "SAME", 128)
    assert "Conv2D" not in op_types(tf.float32, 128, "/CPU:1", 1, "SAME", 128)


def test_any_number_of_images_of_one_size():
    convolve = tf.function(lambda x, k: winograd.conv2d(x, k, 7, 7))
    kernel = tf.random.normal([3, 3, 5, 6])
    traced = convolve.get_concrete_function(tf.TensorSpec([None, 7, 7, 5]), kernel)
    for count in (1, 3):
        images = tf.random.normal([count, 7, 7, 5])
        np.testing.assert_allclose(traced(images, kernel), tf.nn.conv2d(images, kernel, 1, "SAME"), atol=1e-3)


def test_fewer_multiplications():
    """Counted in the graph of forward and backward pass, transforms included."""

    def count(convolve):
        arguments = [tf.ones(shape) for shape in ([64, 7, 7, 256], [3, 3, 256, 256], [64, 7, 7, 256])]
        function = tf.function(lambda *tensors: gradients(convolve, *tensors))
        return sum(operations.count(function.get_concrete_function(*arguments)).values())

    direct = count(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"))
    assert count(lambda x, k: winograd.conv2d(x, k, 7, 7)) < 0.45 * direct
