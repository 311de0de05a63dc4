"""A synthetic data set in CIFAR-10's format that needs no download: five shapes in two textures make ten classes.

Position, size, rotation, colors and noise are random.
"""

import numpy as np

from cifar_towers.data.dataset import DatasetInfo, Split

SHAPES = ("disc", "square", "triangle", "cross", "ring")
TEXTURES = ("striped", "chequered")
CLASSES = tuple(f"{texture} {shape}" for texture in TEXTURES for shape in SHAPES)
IMAGE_SIZE = 32


def load() -> tuple[Split, Split]:
    """Return train and test of 10,000 and 2,000 images, the same in every call."""
    return make(10_000, seed=0, stream=0), make(2_000, seed=0, stream=1)


def make(count: int, seed: int, stream: int) -> Split:
    """Return `count` examples, balanced over the classes, in random order. Other streams give other examples."""
    random = np.random.Generator(np.random.Philox(key=[seed, stream]))
    labels = random.permutation(np.arange(count) % len(CLASSES)).astype(np.int64)
    shape, texture = labels % len(SHAPES), labels // len(SHAPES)
    u, v = _rotated_grid(random, count)
    inside = np.choose(shape[:, None, None], _shapes(u, v))
    wave = random.uniform(7, 10, (count, 1, 1)).astype("f4")
    stripes = np.sin(wave * u) > 0
    marks = np.where(texture[:, None, None] == 0, stripes, stripes ^ (np.sin(wave * v) > 0))
    figure, mark, background = _colors(random, count)
    painted = np.where(marks[..., None], mark, figure)
    images = np.where(inside[..., None], painted, background)
    images += random.normal(0, 12, (count, IMAGE_SIZE, IMAGE_SIZE, 3)).astype("f4")
    return Split(np.clip(images, 0, 255).astype(np.uint8), labels, DatasetInfo(CLASSES))


def _rotated_grid(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each pixel's coordinates u and v, [count, 32, 32], in the rotated frame of a figure of radius 1."""
    center = random.uniform(12, 20, (2, count, 1, 1)).astype("f4")
    radius = random.uniform(7, 11, (count, 1, 1)).astype("f4")
    angle = random.uniform(-0.5, 0.5, (count, 1, 1)).astype("f4")
    y, x = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE].astype("f4")
    y, x = (y - center[0]) / radius, (x - center[1]) / radius
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)


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


def _colors(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three different colors per image, [count, 1, 1, 3] each: figure, marks on the figure, background."""
    background = random.uniform(60, 195, (count, 1, 1, 3)).astype("f4")
    direction = np.where(background > 127, -1, 1)
    figure = background + direction * random.uniform(30, 60, background.shape).astype("f4")
    return figure, figure + direction * random.uniform(40, 80, background.shape).astype("f4"), background
