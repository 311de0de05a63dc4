"""Corruptions of images: hand-worked values, and properties of each at every severity."""

import colorsys
import io

import numpy as np
import pytest
from PIL import Image

from cifar_towers.data import synthetic
from cifar_towers.data.arrays import CIFAR10_C
from cifar_towers.data.corruptions import CORRUPTIONS, corrupt, match
from cifar_towers.errors import UsageError

IMAGES = synthetic.make(12, 0, 1).images
GRAY = np.repeat(IMAGES[..., :1], 3, axis=3)


def gray(level, count=200):
    return np.full((count, 16, 16, 3), level, np.uint8)


def distance(images, corrupted):
    return np.abs(corrupted.astype(int) - images).mean()


def test_corruptions_have_the_authors_names_and_five_severities():
    assert {*CORRUPTIONS} < {*CIFAR10_C} and len({*CIFAR10_C}) == 19
    assert all(len(constants) == 5 for _, constants in CORRUPTIONS.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_keeps_type_and_shape_and_is_repeatable_and_stronger_at_five(name):
    original = IMAGES.copy()
    sets = [corrupt(IMAGES, f"{name}_{severity}") for severity in range(1, 6)]
    assert all((images.dtype, images.shape) == (np.uint8, IMAGES.shape) for images in sets)
    np.testing.assert_array_equal(IMAGES, original)
    assert len({images.tobytes() for images in sets}) == 5
    assert distance(IMAGES, sets[4]) > distance(IMAGES, sets[0]) > 0
    np.testing.assert_array_equal(corrupt(IMAGES[:5], f"{name}_3"), sets[2][:5])
    for images in (GRAY, IMAGES[:, :20], IMAGES[:, :, 3:], IMAGES[:, :1, :1], np.zeros_like(IMAGES), IMAGES[:0]):
        assert corrupt(images, f"{name}_5").shape == images.shape


def test_noise_has_the_published_deviation_and_differs_between_images_and_severities():
    for severity, scale in enumerate((0.04, 0.06, 0.08, 0.09, 0.10), 1):
        noisy = corrupt(gray(128), f"gaussian_noise_{severity}").astype(float)
        assert noisy.std() == pytest.approx(255 * scale, rel=0.01) and noisy.mean() == pytest.approx(127.5, abs=0.3)
    for severity, photons in enumerate((500, 250, 100, 75, 50), 1):  # the variance of a count is its mean
        noisy = corrupt(gray(100), f"shot_noise_{severity}").astype(float)
        assert noisy.std() == pytest.approx(255 * (100 / 255 / photons) ** 0.5, rel=0.02)
    for level in (40, 120):  # in proportion to the level
        assert corrupt(gray(level), "speckle_noise_2").std() == pytest.approx(0.1 * level, rel=0.02)
    assert not corrupt(gray(0), "speckle_noise_5").any()
    first, second = corrupt(gray(128, 2), "gaussian_noise_1").astype(int)
    assert (first != second).mean() > 0.9
    other = (corrupt(gray(128, 1), "gaussian_noise_2").astype(float) - 128) / 0.06
    assert np.abs(other[0] - (first - 128) / 0.04).max() > 255  # not the same noise, scaled


def test_impulses_are_black_or_white_in_equal_parts():
    noisy = corrupt(gray(100), "impulse_noise_4")
    assert {*np.unique(noisy)} == {0, 100, 255}
    for level in (0, 255):
        assert (noisy == level).mean() == pytest.approx(0.025, rel=0.05)


def test_contrast_keeps_the_mean_of_each_channel():
    for severity, factor in enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1):
        flat = corrupt(IMAGES, f"contrast_{severity}").astype(float)
        lost = IMAGES.mean((1, 2)) - flat.mean((1, 2))  # the fractions of levels that are cut off
        assert (lost >= -1e-9).all() and (lost < 0.75).all()
        np.testing.assert_allclose(flat.std((1, 2)), factor * IMAGES.std((1, 2)), atol=0.3)


def test_compression_and_pixels_are_those_of_pillow():
    picture, file = Image.fromarray(IMAGES[0]), io.BytesIO()
    picture.save(file, "JPEG", quality=58)
    np.testing.assert_array_equal(corrupt(IMAGES, "jpeg_compression_3")[0], np.asarray(Image.open(file)))
    smaller = picture.resize((20, 20), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
    np.testing.assert_array_equal(corrupt(IMAGES, "pixelate_5")[0], np.asarray(smaller))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("brightness_3", lambda h, s, v: (h, s, min(v + 0.15, 1))),
        ("saturate_1", lambda h, s, v: (h, 0.3 * s, v)),
        ("saturate_5", lambda h, s, v: (h, min(2.5 * s + 0.2, 1), v)),
    ],
)
def test_colors_change_as_by_the_standard_library(name, change):
    pixels = np.array([[0, 0, 0], [255, 255, 255], [100, 100, 100], [255, 0, 0], [3, 200, 77], [90, 80, 250]], np.uint8)
    pixels = np.concatenate([pixels, IMAGES[0].reshape(-1, 3)[:58]])
    expected = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in pixels / 255]
    found = corrupt(pixels.reshape(1, 8, 8, 3), name).reshape(-1, 3)
    np.testing.assert_allclose(found, np.floor(255 * np.array(expected) + 1e-6), atol=1)  # a rounding below a level
    assert (found == np.floor(255 * np.array(expected) + 1e-6)).mean() > 0.95


def test_blurs_spread_a_point_as_their_kernels_do_and_leave_even_images():
    point = np.zeros((1, 15, 15, 3), np.uint8)
    point[0, 7, 7] = 255
    taps = np.exp(-(np.arange(-4.0, 5) ** 2) / 2)  # sigma 1
    expected = 255 * np.outer(taps, taps) / taps.sum() ** 2
    np.testing.assert_array_equal(corrupt(point, "gaussian_blur_5")[0, 3:12, 3:12, 1], np.floor(expected + 1e-9))
    # The disk of radius 1 is a plus of five fifths; the kernel of sigma 0.2 has exp(-12.5) beside its center.
    (blurred,) = corrupt(point, "defocus_blur_4")
    assert np.abs(blurred[7, 6:9, 0].astype(int) - 51).max() <= 1 and blurred[6, 6, 0] == 0
    assert (blurred > 0).sum() == 5 * 3
    (blurred,) = corrupt(point, "defocus_blur_5")  # radius 1.5: nine ninths
    assert np.abs(blurred[6:9, 6:9].astype(int) - 255 // 9).max() <= 1 and (blurred > 0).sum() == 9 * 3
    for name in ("gaussian_blur_5", "defocus_blur_5", "defocus_blur_1"):
        assert np.abs(corrupt(gray(90, 1), name).astype(int) - 90).max() <= 1


def test_patterns():
    assert len(match("*")) == 5 * len(CORRUPTIONS)
    assert match("contrast_*") == tuple(f"contrast_{severity}" for severity in "12345")
    assert match("*_3") == tuple(f"{name}_3" for name in CORRUPTIONS) and match("pixelate_2") == ("pixelate_2",)
    with pytest.raises(UsageError, match=r"corruptions=fog_\* matches none; write \* or <name>_<1 to 5> of gaussian_n"):
        match("fog_*")
