from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.models import convolution


def gradients(function, images, kernel, upstream):
    with tf.GradientTape() as tape:
        tape.watch([images, kernel])
        y = function(images, kernel)
    return y, *tape.gradient(y, [images, kernel], upstream)


def processor(monkeypatch, *features):
    monkeypatch.setattr(convolution, "processor_features", lambda: {"sse2", *features})


def ops(dtype, channels, device, strides=1, padding="SAME", filters=64):
    def convolve(images, kernel):
        return convolution.conv2d(tf.identity(images), kernel, strides, padding)

    @tf.function
    def step(images, kernel):
        with tf.device(device):
            return gradients(convolve, images, kernel, None)

    images = tf.ones([1, 7, 7, channels], dtype)
    kernel = tf.ones([3, 3, channels, filters], dtype)
    return step.get_concrete_function(images, kernel).graph.get_operations()


GRADIENT_SIZES = [((4, 7, 7), (3, 3)), ((4, 5, 6), (5, 3)), ((4, 2, 2), (3, 5))]
WINOGRAD_SIZES = [(1, 15, 15), (3, 8, 4), (3, 7, 7), (1, 3, 3), (3, 2, 2)]
# dtype, channels, filters, the largest error as a part of the largest value
CASES = [("avx512_bf16", ("bfloat16", 64, 256, 0.07), size, (3, 3)) for size in WINOGRAD_SIZES]
CASES += [("amx_bf16", ("bfloat16", 16, 64, 0.01), *sizes) for sizes in GRADIENT_SIZES]
CASES += [("avx2", ("float32", 24, 64, 1e-5), *sizes) for sizes in GRADIENT_SIZES]
CASES += [("avx2", ("float32", 64, 128, 3e-5), size, (3, 3)) for size in WINOGRAD_SIZES]


def largest_error(values, true):
    return np.abs(tf.cast(values, tf.float64) - true).max()


@pytest.mark.parametrize(("feature", "layer", "shape", "window"), CASES)
@pytest.mark.parametrize("even", [False, True])
def test_values_and_gradients_equal_tensorflows(monkeypatch, feature, layer, shape, window, even):
    """The convolution is a SAME one, or one without the last row and column of an odd size."""
    processor(monkeypatch, feature)
    random = np.random.default_rng(0)
    dtype, channels, filters, rounding = layer
    images, high, wide = shape
    out_high = high - high % 2 if even else high
    out_wide = wide - wide % 2 if even else wide
    shapes = [
        (images, high, wide, channels),
        (*window, channels, filters),
        (images, out_high, out_wide, filters),
    ]
    exact = [tf.constant(random.normal(size=size)) for size in shapes]
    padding = convolution.even_padding(exact[0].shape, exact[1].shape) if even else "SAME"

    def convolve(x, k):
        return tf.nn.conv2d(x, k, 1, "SAME")[:, :out_high, :out_wide]

    narrow = [tf.cast(tensor, dtype) for tensor in exact]
    ours = gradients(lambda x, k: convolution.conv2d(x, k, 1, padding), *narrow)
    tensorflows = gradients(convolve, *narrow)
    true_values = gradients(convolve, *(tf.cast(tensor, "float64") for tensor in narrow))
    for actual, theirs, true in zip(ours, tensorflows, true_values, strict=True):
        error = largest_error(actual, true)
        allowed = largest_error(theirs, true)
        # some processors accumulate in bfloat16, with errors of this size
        assert error <= max(1.5 * allowed, rounding * np.abs(true).max())


CPU = "/CPU:1"
GPU = "/GPU:0"
AVX2 = ("avx2",)
AVX512 = ("avx2", "avx512f")
BFLOAT16 = (*AVX512, "avx512_bf16")
# processor, then dtype, channels, device, strides, padding and filters of 3x3 kernels: the form is
# faster
FORMS = [
    ("products", AVX2, [(tf.float32, 24, CPU)]),
    ("winograd gradient", BFLOAT16, [(tf.bfloat16, 64, CPU, 1, "SAME", 256)]),
    ("winograd gradient", BFLOAT16, [(tf.bfloat16, 128, CPU, 1, "SAME", 128)]),
    ("winograd", AVX2, [(tf.float32, 64, CPU, 1, "SAME", 128)]),
    ("winograd", AVX512, [(tf.float32, 128, CPU, 1, "SAME", 128)]),
]
OTHERS = [  # ... and it is not
    (
        "products",
        AVX2,
        [(tf.float64, 128, CPU), (tf.float32, 16, CPU), (tf.float32, 24, CPU, 1, "SAME", 32)],
    ),
    ("products", AVX2, [(tf.float32, 24, GPU), (tf.bfloat16, 128, CPU)]),
    ("products", AVX2, [(tf.float32, 24, CPU, 2), (tf.float32, 24, CPU, 1, "VALID")]),
    ("products", AVX512, [(tf.float32, 128, CPU)]),
    (
        "winograd gradient",
        BFLOAT16,
        [(tf.bfloat16, 64, CPU, 1, "SAME", 128), (tf.bfloat16, 32, CPU, 1, "SAME", 512)],
    ),
    (
        "winograd gradient",
        BFLOAT16,
        [(tf.bfloat16, 256, CPU, 1, "VALID", 256), (tf.bfloat16, 256, CPU, 2, "SAME", 256)],
    ),
    (
        "winograd gradient",
        (*BFLOAT16, "amx_bf16"),
        [(tf.bfloat16, 256, CPU, 1, "SAME", 256)],
    ),
    ("winograd gradient", BFLOAT16, [(tf.bfloat16, 256, GPU, 1, "SAME", 256)]),
    ("winograd gradient", AVX512, [(tf.bfloat16, 256, CPU, 1, "SAME", 256)]),
    (
        "winograd",
        AVX2,
        [(tf.float32, 64, CPU, 1, "SAME", 64), (tf.float32, 32, CPU, 1, "SAME", 512)],
    ),
    (
        "winograd",
        AVX2,
        [(tf.float32, 64, CPU, 1, "VALID", 128), (tf.float32, 64, CPU, 2, "SAME", 128)],
    ),
    (
        "winograd",
        AVX2,
        [(tf.float32, 64, GPU, 1, "SAME", 128), (tf.float32, 256, CPU, 1, [(0, 0)] * 4, 256)],
    ),
    (
        "winograd",
        AVX2,
        [(tf.bfloat16, 256, CPU, 1, "SAME", 256), (tf.float64, 256, CPU, 1, "SAME", 256)],
    ),
    ("winograd", (), [(tf.float32, 256, CPU, 1, "SAME", 256)]),
    ("winograd", AVX512, [(tf.float32, 64, CPU, 1, "SAME", 128)]),
]
MEASURED = [(*row, True) for row in FORMS]
MEASURED += [(*row, False) for row in OTHERS]


@pytest.mark.parametrize(("form", "features", "convolutions", "faster"), MEASURED)
def test_forms_are_used_only_where_they_were_measured_to_be_faster(
    monkeypatch, form, features, convolutions, faster
):
    processor(monkeypatch, *features)
    replaced = "Conv2D" if form == "winograd" else "Conv2DBackpropFilter"
    for arguments in convolutions:
        types = {op.type for op in ops(*arguments)}
        assert (replaced not in types) == faster, arguments


@pytest.mark.parametrize(
    ("feature", "dtype", "columns", "joined"),
    [  # four images of 7 columns, three of zeros between them
        ("amx_bf16", tf.bfloat16, 7, 31),
        ("amx_bf16", tf.bfloat16, 10, 10),
        ("amx_bf16", tf.float32, 7, 7),
        ("avx512_bf16", tf.bfloat16, 7, 7),
    ],
)
def test_narrow_images_are_put_side_by_side_with_amx(monkeypatch, feature, dtype, columns, joined):
    processor(monkeypatch, feature)
    images = tf.ones([4, 7, columns, 8], dtype)
    kernel = tf.ones([3, 3, 8, 8], dtype)

    @tf.function
    def step(images, kernel):
        return gradients(convolution.conv2d, images, kernel, None)

    operations = step.get_concrete_function(images, kernel).graph.get_operations()
    (to_kernel,) = [op for op in operations if op.type == "Conv2DBackpropFilter"]
    assert to_kernel.inputs[0].shape[2] == joined


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32])
@pytest.mark.parametrize(("device", "expected"), [(CPU, b"VALID"), (GPU, b"EXPLICIT")])
def test_gradient_to_kernel_has_no_explicit_padding_on_cpus(monkeypatch, dtype, device, expected):
    """There oneDNN does not have it, and TensorFlow's own takes up to 60 times as long."""
    processor(monkeypatch, "avx2")
    padding = convolution.even_padding(tf.TensorShape([1, 7, 7, 3]), tf.TensorShape([3, 3, 3, 64]))
    operations = ops(dtype, 3, device, 1, padding)
    to_kernel = [op for op in operations if op.type == "Conv2DBackpropFilter"]
    assert [op.get_attr("padding") for op in to_kernel] == [expected]


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("padding", [[(0, 0)] * 4, [(0, 0), (1, 0), (0, 1), (0, 0)]])
def test_any_other_padding_is_as_in_tensorflow(monkeypatch, padding, strides):
    processor(monkeypatch, "avx2")
    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=(2, 7, 7, 64)), tf.float32)
    kernel = tf.constant(random.normal(size=(3, 3, 64, 128)), tf.float32)
    ours = gradients(lambda x, k: convolution.conv2d(x, k, strides, padding), images, kernel, None)
    theirs = gradients(lambda x, k: tf.nn.conv2d(x, k, strides, padding), images, kernel, None)
    for actual, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-3)


# ---- Winograd's algorithm


def as_fractions(matrix):
    """Return the matrix with the exact fractions that its numbers stand for."""
    return np.vectorize(lambda value: Fraction(value).limit_denominator(10_000), [object])(matrix)


@pytest.mark.parametrize("tile", convolution.WINOGRAD_TILES)
def test_winograd_transforms_are_exact(tile):
    """Every product of a pixel and a weight comes to exactly one in its output and to zero
    elsewhere.
    """
    from_image, from_kernel, to_output = convolution.winograd_transforms(tile)
    from_image = as_fractions(from_image)
    from_kernel = as_fractions(from_kernel)
    to_output = as_fractions(to_output)
    side = tile + 2
    weights = np.einsum("op,pi,pk->oik", to_output, from_image, from_kernel)
    expected = np.zeros_like(weights)
    for y, x, row, column in np.ndindex(tile, tile, 3, 3):
        expected[y * tile + x, (y + row) * side + x + column, row * 3 + column] = 1

    assert (weights == expected).all()


def test_winograd_of_any_number_of_images():
    convolve = tf.function(lambda x, k: convolution.winograd_conv2d(x, k, 7, 7))
    kernel = tf.random.normal([3, 3, 5, 6])
    traced = convolve.get_concrete_function(tf.TensorSpec([None, 7, 7, 5]), kernel)
    for count in (1, 3):
        images = tf.random.normal([count, 7, 7, 5])
        expected = tf.nn.conv2d(images, kernel, 1, "SAME")
        np.testing.assert_allclose(traced(images, kernel), expected, atol=1e-3)
