import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.models import convolution
from tests.models.convolutions import gradients, op_types, ops, processor


@pytest.mark.parametrize(("dtype", "channels", "rounding"), [("bfloat16", 128, 0.01), ("float32", 24, 1e-5)])
@pytest.mark.parametrize(("high", "wide", "size"), [(7, 7, (3, 3)), (3, 4, (3, 3)), (5, 6, (5, 3)), (2, 2, (3, 5))])
@pytest.mark.parametrize("even", [False, True])
def test_gradients_equal_tensorflows(monkeypatch, dtype, channels, rounding, high, wide, size, even):
    """Of a SAME convolution, and of one without the last row and column of an odd size."""
    processor(monkeypatch, "avx2")
    random = np.random.default_rng(0)
    out_high, out_wide = (high - high % 2, wide - wide % 2) if even else (high, wide)
    shapes = (4, high, wide, channels), (*size, channels, 64), (4, out_high, out_wide, 64)
    images, kernel, upstream = (tf.cast(random.normal(size=shape), dtype) for shape in shapes)
    padding = convolution.even_padding(images.shape, kernel.shape) if even else "SAME"
    ours = gradients(lambda x, k: convolution.conv2d(x, k, 1, padding), images, kernel, upstream)

    def convolve(x, k):
        return tf.nn.conv2d(x, k, 1, "SAME")[:, :out_high, :out_wide]

    tensorflows = gradients(convolve, images, kernel, upstream)
    exact = gradients(convolve, *(tf.cast(tensor, tf.float64) for tensor in (images, kernel, upstream)))
    for actual, theirs, true in zip(ours, tensorflows, exact, strict=True):
        error, allowed = (np.abs(tf.cast(values, tf.float64) - true).max() for values in (actual, theirs))
        # some processors accumulate in bfloat16, with errors of this size
        assert error <= max(1.5 * allowed, rounding * np.abs(true).max())


def test_faster_gradient_is_used_only_where_measured(monkeypatch):
    processor(monkeypatch, "avx2")
    assert "Conv2DBackpropFilter" not in op_types(tf.bfloat16, 128, "/CPU:1")
    assert "Conv2DBackpropFilter" not in op_types(tf.float32, 24, "/CPU:1")
    for arguments in [
        (tf.float64, 128, "/CPU:1"),
        (tf.float32, 16, "/CPU:1"),
        (tf.float32, 24, "/CPU:1", 1, "SAME", 32),
        (tf.float32, 24, "/GPU:0"),
        (tf.bfloat16, 64, "/CPU:1"),
        (tf.bfloat16, 128, "/GPU:0"),
        (tf.bfloat16, 128, "/CPU:1", 2),
        (tf.bfloat16, 128, "/CPU:1", 1, "VALID"),
    ]:
        assert "Conv2DBackpropFilter" in op_types(*arguments), arguments
    processor(monkeypatch, "avx2", "avx512f")
    assert "Conv2DBackpropFilter" in op_types(tf.float32, 128, "/CPU:1")
    assert "Conv2DBackpropFilter" not in op_types(tf.bfloat16, 128, "/CPU:1")


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32])
def test_gradient_to_kernel_has_no_explicit_padding(dtype):
    """oneDNN does not have it: TensorFlow's own takes up to 60 times as long."""
    padding = convolution.even_padding(tf.TensorShape([1, 7, 7, 3]), tf.TensorShape([3, 3, 3, 64]))
    to_kernel = [op for op in ops(dtype, 3, "/CPU:1", 1, padding) if op.type == "Conv2DBackpropFilter"]
    assert [op.get_attr("padding") for op in to_kernel] == [b"VALID"]


@pytest.mark.parametrize("padding", [[(0, 0)] * 4, [(0, 0), (1, 0), (0, 1), (0, 0)]])
def test_any_other_padding_is_as_in_tensorflow(monkeypatch, padding):
    processor(monkeypatch, "avx2")
    random = np.random.default_rng(0)
    arguments = [tf.constant(random.normal(size=shape), tf.float32) for shape in ((2, 7, 7, 64), (3, 3, 64, 128))]
    ours = gradients(lambda x, k: convolution.conv2d(x, k, 1, padding), *arguments, None)
    theirs = gradients(lambda x, k: tf.nn.conv2d(x, k, 1, padding), *arguments, None)
    for actual, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-3)
