"""A synthetic data set in CIFAR-10's format that needs no download: five shapes in two textures
make ten classes.

Position, size, rotation, colors and noise are random.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from cifar_towers.data.dataset import DatasetInfo, Split

SHAPES = ("disc", "square", "triangle", "cross", "ring")
TEXTURES = ("striped", "chequered")
CLASSES = tuple(f"{texture} {shape}" for texture, shape in itertools.product(TEXTURES, SHAPES))
IMAGE_SIZE = 32


def load() -> tuple[Split, Split]:
    """Return train and test of 10,000 and 2,000 images, the same in every call."""
    return make(10_000, seed=0, stream=0), make(2_000, seed=0, stream=1)


def make(count: int, seed: int, stream: int) -> Split:
    """Return `count` examples, balanced over the classes, in random order. Other streams give other
    examples.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, stream]))
    labels = random.permutation(np.arange(count) % len(CLASSES)).astype(np.int64)
    # two coordinates of the center, radius, angle and frequency of a figure
    ranges = ((12, 20), (12, 20), (7, 11), (-0.5, 0.5), (7, 10))
    figures = [random.uniform(low, high, (count, 1, 1)).astype("f4") for low, high in ranges]
    background = random.uniform(60, 195, (count, 3)).astype("f4")
    direction = np.where(background > 127, -1, 1)
    fill = background + direction * random.uniform(30, 60, background.shape).astype("f4")
    marks = fill + direction * random.uniform(40, 80, background.shape).astype("f4")
    colors = np.stack([fill, marks, background], 1)  # [count, 3, 3]
    images = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    for start in range(0, count, 500):  # what stays in the processor's cache takes half the time
        part = slice(start, start + 500)
        painted = _paint(labels[part], [values[part] for values in figures], colors[part])
        painted += random.normal(0, 12, painted.shape).astype("f4")
        images[part] = np.clip(painted, 0, 255)
    return Split(images, labels, DatasetInfo(CLASSES))


def _paint(labels: np.ndarray, figure: Sequence[np.ndarray], colors: np.ndarray) -> np.ndarray:
    """Return figures on their backgrounds, [n, 32, 32, 3]. A figure is drawn from the values that
    `make` draws.
    """
    y0, x0, radius, angle, frequency = figure
    y, x = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE].astype("f4")
    y = (y - y0) / radius
    x = (x - x0) / radius
    # in the figure's own frame
    u = x * np.cos(angle) + y * np.sin(angle)
    v = y * np.cos(angle) - x * np.sin(angle)
    texture, shape = np.divmod(labels[:, None, None], len(SHAPES))
    stripes = np.sin(frequency * u) > 0
    marks = stripes ^ ((np.sin(frequency * v) > 0) & (texture == 1))
    layer = np.where(np.choose(shape, _shapes(u, v)), marks, 2)
    return colors[np.arange(len(labels))[:, None, None], layer]


def _shapes(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return whether each pixel is inside the figure, for each of `SHAPES`."""
    distance = np.hypot(u, v)
    square = np.maximum(abs(u), abs(v))
    return (
        distance < 1,
        square < 0.85,
        (v < 0.7) & (v > 1.9 * abs(u) - 1.1),
        (square < 1) & (np.minimum(abs(u), abs(v)) < 0.33),
        (distance < 1) & (distance > 0.55),
    )
