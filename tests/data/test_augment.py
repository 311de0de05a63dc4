import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.data import augment
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import RandomDraws
from cifar_towers.data.dataset import CIFAR10


def draws(count, **given):
    """Random draws that change nothing, except those given."""
    zeros, centers = np.zeros(count), np.full((count, 2), 0.5)
    neutral = {"flip": zeros, "window": centers, "cutout": centers, "brightness": zeros, "contrast": zeros}
    neutral |= {"own": np.zeros((count, 0))}
    types = {"flip": tf.bool, "example_index": tf.int64}
    values = neutral | {"example_index": np.arange(count)} | given
    return RandomDraws(**{name: tf.cast(value, types.get(name, tf.float32)) for name, value in values.items()})


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)


@pytest.mark.parametrize(("pad", "fill", "mode"), [(2, "reflect", "reflect"), (4, "zeros", "constant")])
def test_shift_is_a_window_of_the_padded_image(images, pad, fill, mode):
    position = np.random.default_rng(1).uniform(size=(6, 2)).astype("f4")
    shifted = augment.random_window(
        tf.constant(images), tf.constant(position), tf.zeros(6, tf.bool), 32, pad, fill
    ).numpy()
    padded = np.pad(images, [(0, 0), (pad, pad), (pad, pad), (0, 0)], mode)
    for i, (y, x) in enumerate((position * (2 * pad + 1)).astype(int)):
        np.testing.assert_array_equal(shifted[i], padded[i, y : y + 32, x : x + 32])


def test_crop_positions_are_uniform():
    positions = tf.constant(np.arange(32 * 32).reshape(1, 32, 32, 1).repeat(20_000, 0))
    position = tf.random.stateless_uniform([20_000, 2], [3, 4])
    corners = augment.random_window(positions, position, tf.zeros(20_000, tf.bool), 24)[:, 0, 0, 0].numpy()
    rows, columns = np.bincount(corners // 32, minlength=9), np.bincount(corners % 32, minlength=9)
    assert len(rows) == len(columns) == 9
    assert abs(rows / 20_000 - 1 / 9).max() < 0.01 and abs(columns / 20_000 - 1 / 9).max() < 0.01


def test_normalize_by_moments_of_the_data_set_or_of_the_image(images):
    levels = tf.constant([[[[20.0, 30, 40], [21, 32, 43]]]])
    normalized = augment.Augmentation(mean=(20.0, 30.0, 40.0), std=(1.0, 2.0, 3.0)).normalize(levels)
    np.testing.assert_allclose(normalized[0, 0], [[0] * 3, [1] * 3], atol=1e-6)
    own = augment.Augmentation(standardize="image").normalize(tf.cast(images, tf.float32)).numpy()
    np.testing.assert_allclose(own.mean((1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(own.std((1, 2, 3)), 1, rtol=1e-4)


def test_flip_and_color_by_hand(images):
    mirrored = tf.constant([True, False] * 3)
    flipped = augment.random_window(tf.constant(images), tf.zeros([6, 2]), mirrored, 32).numpy()
    np.testing.assert_array_equal(flipped[0], images[0][:, ::-1])
    np.testing.assert_array_equal(flipped[1], images[1])
    center = np.array(CIFAR10.mean)
    image = tf.constant(center + 10, tf.float32, shape=[1, 1, 1, 3])
    changed = augment.adjust_color(image, tf.constant([5.0]), tf.constant([2.0]), CIFAR10.mean)
    np.testing.assert_allclose(changed[0, 0, 0], center + 30, rtol=1e-6)


def test_cutout_blanks_a_full_square():
    position = tf.constant([[0.0, 0.0], [0.999, 0.999], [0.5, 0.2]])
    blanked = augment.cutout(tf.ones([3, 32, 32, 3]), position, 12).numpy()[..., 0]
    assert [(image == 0).sum() for image in blanked] == [144] * 3
    assert blanked[0, :12, :12].max() == 0 and blanked[1, 20:, 20:].max() == 0


def test_downsample_keeps_constants_and_agrees_with_tensorflow(images):
    flat = augment.downsample(tf.fill([1, 32, 32, 3], 7.0), 24)
    np.testing.assert_allclose(flat, np.full((1, 24, 24, 3), 7.0), rtol=1e-6)
    levels = tf.cast(images, tf.float32)
    witness = tf.image.resize(levels, (24, 24), antialias=True)
    np.testing.assert_allclose(augment.downsample(levels, 24), witness, atol=0.05)


def test_tta_views_are_weighted_to_one_and_hold_the_mirror(images):
    levels = tf.cast(images, tf.float32)
    for level, count in ((0, 1), (1, 2), (2, 6)):
        views = augment.tta_views(levels, level)
        assert len(views) == count and sum(weight for weight, _ in views) == 1
        np.testing.assert_array_equal(views[0][1], levels)
    np.testing.assert_array_equal(views[1][1], levels[:, :, ::-1])
    up_left, mirrored, down_right, _ = (view.numpy() for _, view in views[2:])
    np.testing.assert_array_equal(up_left[:, 1:, 1:], levels[:, :-1, :-1])
    np.testing.assert_array_equal(down_right[:, :-1, :-1], levels[:, 1:, 1:])
    np.testing.assert_array_equal(mirrored, up_left[:, :, ::-1])


def test_neutral_draws_change_nothing(images):
    augmentation, images = Augmentation(shift=2, brightness=9, contrast=0.1), tf.constant(images)
    np.testing.assert_allclose(augmentation.augment(images, draws(6)), augmentation.evaluate(images), atol=1e-5)


def test_evaluation_uses_the_central_crop(images):
    crop = Augmentation(crop=24, standardize="image").evaluate(tf.constant(images))
    witness = tf.image.per_image_standardization(images[:, 4:28, 4:28].astype("f4"))
    np.testing.assert_allclose(crop, witness, atol=1e-5)


def test_augmentation_does_not_depend_on_the_shard(images):
    everything = Augmentation(shift=3, cutout=8, brightness=20, contrast=0.3)
    random = np.random.default_rng(2)
    given = {"flip": random.random(6) < 0.5, "window": random.random((6, 2)), "cutout": random.random((6, 2))}
    drawn = draws(6, **given, brightness=random.random(6), contrast=random.random(6))
    drawn_for_part = tf.nest.map_structure(lambda d: d[2:5], drawn)
    for image_size, rounding in ((32, 0), (24, 1e-6)):  # some processors round matrix products differently
        full = everything.augment(tf.constant(images), drawn, image_size).numpy()
        part = everything.augment(tf.constant(images[2:5]), drawn_for_part, image_size)
        np.testing.assert_allclose(part, full[2:5], rtol=0, atol=rounding)


def test_no_large_int32_tensors(images):
    """TensorFlow's GPU kernels for int32 use host memory, so a tower would wait for it."""
    augmentation = Augmentation(shift=2, cutout=12, brightness=8.0, contrast=0.1)
    function = tf.function(augmentation.augment, autograph=False).get_concrete_function(images, draws(6), 24)
    outputs = [output for op in function.graph.get_operations() for output in op.outputs]
    sizes = [output.shape.num_elements() for output in outputs if output.dtype == tf.int32]
    assert sizes and max(sizes) < 32 * 32
