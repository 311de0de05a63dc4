"""A CIFAR-shaped set that can be learned and needs no download: five shapes in two textures make ten classes.

Position, size, turn, colours and noise are drawn at random, so that a net has something to generalise over.
"""

import numpy as np

from cifar_towers.data.dataset import DatasetInfo, Split

NUM_TRAIN_EXAMPLES = 10_000
NUM_TEST_EXAMPLES = 2_000
SHAPES = ("disc", "square", "triangle", "cross", "ring")
TEXTURES = ("striped", "chequered")
CLASSES = tuple(f"{texture} {shape}" for texture in TEXTURES for shape in SHAPES)
SIDE = 32


def load(seed: int = 0) -> tuple[Split, Split]:
    """Train and test of 10,000 and 2,000 images, the same for the same seed."""
    return make(NUM_TRAIN_EXAMPLES, seed, stream=0), make(NUM_TEST_EXAMPLES, seed, stream=1)


def make(count: int, seed: int, stream: int) -> Split:
    """`count` examples, as many of each class, in random order; streams of one seed share nothing."""
    random = np.random.Generator(np.random.Philox(key=[seed, stream]))
    labels = random.permutation(np.arange(count) % len(CLASSES)).astype(np.int64)
    shape, texture = labels % len(SHAPES), labels // len(SHAPES)
    u, v = _turned_grid(random, count)
    inside = np.choose(shape[:, None, None], _shapes(u, v))
    marks = np.choose(texture[:, None, None], _textures(u, v, random, count))
    figure, mark, ground = _colours(random, count)
    painted = np.where(marks[..., None], mark, figure)
    images = np.where(inside[..., None], painted, ground) + random.normal(0, 12, (count, SIDE, SIDE, 3)).astype("f4")
    return Split(np.clip(images, 0, 255).astype(np.uint8), labels, DatasetInfo(CLASSES))


def _turned_grid(random, count):
    """[count, 32, 32] coordinates of each pixel in the figure's own frame, where its radius is 1."""
    centre = random.uniform(12, 20, (2, count, 1, 1)).astype("f4")
    radius = random.uniform(7, 11, (count, 1, 1)).astype("f4")
    angle = random.uniform(-0.5, 0.5, (count, 1, 1)).astype("f4")
    y, x = np.mgrid[:SIDE, :SIDE].astype("f4")
    y, x = (y - centre[0]) / radius, (x - centre[1]) / radius
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)


def _shapes(u, v):
    distance = np.hypot(u, v)
    square = np.maximum(abs(u), abs(v))
    return (
        distance < 1,
        square < 0.85,
        (v < 0.7) & (v > 1.9 * abs(u) - 1.1),
        (square < 1) & (np.minimum(abs(u), abs(v)) < 0.33),
        (distance < 1) & (distance > 0.55),
    )


def _textures(u, v, random, count):
    wave = random.uniform(7, 10, (count, 1, 1)).astype("f4")
    stripes = np.sin(wave * u) > 0
    return stripes, stripes ^ (np.sin(wave * v) > 0)


def _colours(random, count):
    """Three colours an image, [count, 1, 1, 3] each: the figure's two stand apart from each other and the ground."""
    ground = random.uniform(60, 195, (count, 1, 1, 3)).astype("f4")
    towards = np.where(ground > 127, -1, 1)
    figure = ground + towards * random.uniform(30, 60, ground.shape).astype("f4")
    return figure, figure + towards * random.uniform(40, 80, ground.shape).astype("f4"), ground
