import numpy as np
import pytest
import tensorflow as tf

from cifar_towers.config.train_config import AugmentationSettings
from cifar_towers.data import augment
from cifar_towers.data.augment import Augmentation
from cifar_towers.data.batches import RandomDraws
from cifar_towers.data.dataset import CIFAR10


def draws(count, **given):
    """Random draws that change nothing, except those given."""
    zeros = np.zeros(count)
    centers = np.full((count, 2), 0.5)
    neutral = {
        "flip": zeros,
        "window": centers,
        "cutout": centers,
        "brightness": zeros,
        "contrast": zeros,
        "user": np.zeros((count, 0)),
        "example_index": np.arange(count),
    }
    values = neutral | given
    types = {"flip": tf.bool, "example_index": tf.int64}
    tensors = {name: tf.cast(value, types.get(name, tf.float32)) for name, value in values.items()}
    return RandomDraws(**tensors)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)


@pytest.mark.parametrize(
    ("size", "pad", "fill", "mode"),
    [(32, 2, "reflect", "reflect"), (32, 4, "zeros", "constant"), (24, 0, "zeros", "edge")],
)
def test_shift_and_crop_are_a_window_of_the_padded_image_or_its_mirror_image(
    images, size, pad, fill, mode
):
    position = np.random.default_rng(1).uniform(size=(6, 2)).astype("f4")
    mirrored = np.array([True, False] * 3)
    windows = augment.random_window(
        tf.constant(images), tf.constant(position), tf.constant(mirrored), size, pad, fill
    )
    padded = np.pad(images, [(0, 0), (pad, pad), (pad, pad), (0, 0)], mode)
    # each place is equally likely
    for i, (y, x) in enumerate((position * (32 + 2 * pad - size + 1)).astype(int)):
        window = padded[i, y : y + size, x : x + size]
        np.testing.assert_array_equal(windows[i], window[:, ::-1] if mirrored[i] else window)


def test_normalize_by_moments_of_the_data_set_or_of_the_image(images):
    levels = tf.constant([[[[20.0, 30, 40], [21, 32, 43]]]])
    by_data_set = Augmentation(mean=(20.0, 30.0, 40.0), std=(1.0, 2.0, 3.0))
    normalized = by_data_set.normalize(levels)

    np.testing.assert_allclose(normalized[0, 0], [[0] * 3, [1] * 3], atol=1e-6)

    by_image = Augmentation(AugmentationSettings(standardize="image"))
    own = by_image.normalize(tf.cast(images, tf.float32)).numpy()

    np.testing.assert_allclose(own.mean((1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(own.std((1, 2, 3)), 1, rtol=1e-4)


def test_brightness_is_added_and_contrast_scales_about_the_center():
    center = np.array(CIFAR10.mean)
    image = tf.constant(center + 10, tf.float32, shape=[1, 1, 1, 3])
    changed = augment.adjust_color(image, tf.constant([5.0]), tf.constant([2.0]), CIFAR10.mean)
    np.testing.assert_allclose(changed[0, 0, 0], center + 30, rtol=1e-6)


def test_cutout_blanks_a_full_square():
    position = tf.constant([[0.0, 0.0], [0.999, 0.999], [0.5, 0.2]])
    blanked = augment.cutout(tf.ones([3, 32, 32, 3]), position, 12).numpy()[..., 0]
    assert [(image == 0).sum() for image in blanked] == [144] * 3
    assert blanked[0, :12, :12].max() == 0
    assert blanked[1, 20:, 20:].max() == 0


def test_downsample_agrees_with_tensorflow(images):
    levels = tf.cast(images, tf.float32)
    witness = tf.image.resize(levels, (24, 24), antialias=True)
    np.testing.assert_allclose(augment.downsample(levels, 24), witness, atol=0.05)


def test_tta_views_are_weighted_to_one_and_hold_the_mirror(images):
    levels = tf.cast(images, tf.float32)
    views = augment.tta_views(levels)

    assert len(views) == 6
    assert sum(weight for weight, _ in views) == 1
    np.testing.assert_array_equal(views[0][1], levels)
    np.testing.assert_array_equal(views[1][1], levels[:, :, ::-1])

    up_left = views[2][1].numpy()
    mirrored = views[3][1].numpy()
    down_right = views[4][1].numpy()
    np.testing.assert_array_equal(up_left[:, 1:, 1:], levels[:, :-1, :-1])
    np.testing.assert_array_equal(down_right[:, :-1, :-1], levels[:, 1:, 1:])
    np.testing.assert_array_equal(mirrored, up_left[:, :, ::-1])


def test_neutral_draws_change_nothing(images):
    augmentation = Augmentation(AugmentationSettings(shift=2, brightness=9, contrast=0.1))
    images = tf.constant(images)
    augmented = augmentation.augment(images, draws(6))
    np.testing.assert_allclose(augmented, augmentation.evaluate(images), atol=1e-5)


def test_evaluation_uses_the_central_crop(images):
    augmentation = Augmentation(AugmentationSettings(crop=24, standardize="image"))
    crop = augmentation.evaluate(tf.constant(images))
    witness = tf.image.per_image_standardization(images[:, 4:28, 4:28].astype("f4"))
    np.testing.assert_allclose(crop, witness, atol=1e-5)


def test_augmentation_does_not_depend_on_the_shard(images):
    everything = Augmentation(AugmentationSettings(shift=3, cutout=8, brightness=20, contrast=0.3))
    random = np.random.default_rng(2)
    given = {
        "flip": random.random(6) < 0.5,
        "window": random.random((6, 2)),
        "cutout": random.random((6, 2)),
    }
    drawn = draws(6, **given, brightness=random.random(6), contrast=random.random(6))
    drawn_for_part = tf.nest.map_structure(lambda d: d[2:5], drawn)
    # some processors round matrix products differently
    for image_size, rounding in ((32, 0), (24, 1e-6)):
        full = everything.augment(tf.constant(images), drawn, image_size).numpy()
        part = everything.augment(tf.constant(images[2:5]), drawn_for_part, image_size)
        np.testing.assert_allclose(part, full[2:5], rtol=0, atol=rounding)


@pytest.mark.parametrize("standardize", ["dataset", "image"])
@pytest.mark.parametrize("crop", [0, 28])
def test_all_parts_together_are_those_of_numpy(images, standardize, crop):
    """In this order: window and mirror, color, normalization, cutout, then the smaller size."""
    random = np.random.default_rng(3)
    given = {
        "flip": np.array([True, False] * 3),
        "window": random.random((6, 2)).astype("f4"),
        "cutout": random.random((6, 2)).astype("f4"),
        "brightness": random.uniform(-1, 1, 6).astype("f4"),
        "contrast": random.uniform(-1, 1, 6).astype("f4"),
    }
    settings = AugmentationSettings(
        shift=3, crop=crop, cutout=7, brightness=20.0, contrast=0.3, standardize=standardize
    )
    found = Augmentation(settings).augment(tf.constant(images), draws(6, **given), 20).numpy()

    size = crop or 32
    padded = np.pad(images.astype(float), [(0, 0), (3, 3), (3, 3), (0, 0)], "reflect")
    mean = np.array(CIFAR10.mean)
    for index, image in enumerate(padded):
        y, x = (given["window"][index] * (32 + 2 * 3 - size + 1)).astype(int)
        image = image[y : y + size, x : x + size]
        if given["flip"][index]:
            image = image[:, ::-1]

        center = mean if standardize == "dataset" else image.mean((0, 1))
        contrast = 1 + 0.3 * given["contrast"][index]
        image = (image + 20 * given["brightness"][index] - center) * contrast + center
        if standardize == "dataset":
            image = (image - mean) / np.array(CIFAR10.std)
        else:
            image = (image - image.mean()) / image.std()

        y, x = (given["cutout"][index] * (size - 7 + 1)).astype(int)
        image[y : y + 7, x : x + 7] = 0
        if not crop:
            image = tf.image.resize(image, [20, 20], antialias=True).numpy()
        np.testing.assert_allclose(found[index], image, atol=2e-5)
