"""Common corruptions of images, computed with NumPy and Pillow.

Source: D. Hendrycks and T. Dietterich, arXiv 1903.12261. The constants are those of the authors' make_cifar_c.py, which
made CIFAR-10-C from images of 32x32 pixels; ImageNet-C has others. The random numbers are not those of its files.
"""

import fnmatch
import io
import zlib
from typing import Any

import numpy as np
from PIL import Image

from cifar_towers.errors import UsageError


def match(pattern: str) -> tuple[str, ...]:
    """Return the computed corruptions with severities, as `pixelate_3`, that a pattern matches; () if it is empty."""
    found = fnmatch.filter([f"{name}_{severity}" for name in CORRUPTIONS for severity in "12345"], pattern)
    if pattern and not found:
        raise UsageError(f"corruptions={pattern} matches none; write * or <name>_<1 to 5> of {', '.join(CORRUPTIONS)}")
    return tuple(found)


def corrupt(images: np.ndarray, name: str) -> np.ndarray:
    """Return [n, H, W, 3] uint8 images with a corruption of a severity, as `pixelate_3`.

    The random numbers of an image depend on the name and the image's index only.
    """
    corruption, _, severity = name.rpartition("_")
    function, constants = CORRUPTIONS[corruption]
    corrupted = np.empty_like(images)
    for index, image in enumerate(images):
        random = np.random.Generator(np.random.Philox(key=[zlib.crc32(name.encode()), index]))
        levels = function(image, constants[int(severity) - 1], random)
        corrupted[index] = np.clip(levels, 0, 255)  # fractions are cut off, as by the authors
    return corrupted


def _recolor(image: np.ndarray, constants: tuple[float, float, float], _: Any) -> np.ndarray:
    """Scale the saturation of each pixel, and add to its saturation and its value. Gray counts as red."""
    factor, more_saturation, more_value = constants
    value, low = image.max(2, keepdims=True), image.min(2, keepdims=True)
    hue = np.where(value > low, (value - image) / np.maximum(value - low, 1), [0, 1, 1])
    saturation = np.clip((value - low) / np.maximum(value, 1) * factor + more_saturation, 0, 1)
    return np.minimum(value + 255.0 * more_value, 255) * (1 - saturation * hue)


def _compress(image: np.ndarray, quality: int, _: Any) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.array(Image.open(file))


def _pixelate(image: np.ndarray, factor: float, _: Any) -> np.ndarray:
    picture, (height, width) = Image.fromarray(image), image.shape[:2]
    smaller = picture.resize((int(factor * width) or 1, int(factor * height) or 1), Image.Resampling.BOX)
    return np.array(smaller.resize(picture.size, Image.Resampling.BOX))


def _defocus(image: np.ndarray, constants: tuple[float, float], _: Any) -> np.ndarray:
    """Blur by a disk of at most 2 pixels radius, whose edge is itself blurred."""
    radius, sigma = constants
    disk = np.hypot(*np.mgrid[-3:4, -3:4])[..., None] <= radius
    return _filter(image, _filter(disk / disk.sum(), _gaussian(sigma, 1))[1:-1, 1:-1, 0])


def _gaussian(sigma: float, radius: int) -> np.ndarray:
    """Return a Gaussian kernel [2 radius + 1, 2 radius + 1] whose sum is 1."""
    taps = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
    return np.outer(taps, taps) / taps.sum() ** 2


def _filter(image: np.ndarray, kernel: np.ndarray, border: Any = "reflect") -> np.ndarray:
    """Filter [H, W, C] by a symmetric kernel [k, k]; `border` is a mode of `np.pad`."""
    (height, width), radius = image.shape[:2], len(kernel) // 2
    padded = np.pad(image, ((radius, radius), (radius, radius), (0, 0)), border)
    return np.sum([tap * padded[y:, x:][:height, :width] for (y, x), tap in np.ndenumerate(kernel)], 0)


# name -> function (levels [H, W, 3] uint8, constant of the severity, random numbers) -> levels; its constants
CORRUPTIONS: dict[str, tuple[Any, tuple]] = {
    "gaussian_noise": (lambda x, c, random: x + random.normal(0, 255 * c, x.shape), (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (lambda x, c, random: random.poisson(x / 255 * c) * 255 / c, (500, 250, 100, 75, 50)),
    "impulse_noise": (
        lambda x, c, random: np.where(random.random(x.shape) < c, 255 * random.integers(2, size=x.shape), x),
        (0.01, 0.02, 0.03, 0.05, 0.07),
    ),
    "speckle_noise": (lambda x, c, random: x + x * random.normal(0, c, x.shape), (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": (lambda x, c, _: _filter(x, _gaussian(c, int(4 * c + 0.5)), "edge"), (0.4, 0.6, 0.7, 0.8, 1)),
    "defocus_blur": (_defocus, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "brightness": (_recolor, tuple((1, 0, more) for more in (0.05, 0.1, 0.15, 0.2, 0.3))),
    "contrast": (lambda x, c, _: x.mean((0, 1)) + c * (x - x.mean((0, 1))), (0.75, 0.5, 0.4, 0.3, 0.15)),
    "saturate": (_recolor, ((0.3, 0, 0), (0.1, 0, 0), (1.5, 0, 0), (2, 0.1, 0), (2.5, 0.2, 0))),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (_compress, (80, 65, 58, 50, 40)),
}
