"""Pictures show the numbers and images that they are given, and nothing is cut off or lies upon
something else.
"""

import io
import math

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from cifar_towers.reporting import figures

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPES = ("chequered ring", "striped disc", "plain square")
LONG = (
    "a title so long that a picture of its width would be wider than any page that it could "
    "stand on, and no page is"
)
EPOCHS = np.arange(1, 21)
# one class has no examples, and one is never predicted
GAPS = np.outer(np.arange(10) != 2, np.arange(10) != 7)


def counts(classes, accuracy=0.94):
    """[C, C] as of a net of this accuracy, 1000 examples a class."""
    generator = np.random.default_rng(classes)
    off = generator.dirichlet(np.full(classes, 0.3), classes) * (1 - accuracy)
    return np.round(1000 * (off + accuracy * np.eye(classes))).astype(int)


def images(number, side=32):
    return np.random.default_rng(number).integers(0, 256, (number, side, side, 3), np.uint8)


def band(bend):
    y = 94 - 60 * np.exp(-EPOCHS / bend)
    return EPOCHS, y, y - 2, y + 2


PICTURES = {
    "gaps": lambda: figures.confusion_matrix(counts(10, 0.3) * GAPS, CIFAR, LONG),
    "no examples": lambda: figures.confusion_matrix(np.zeros((3, 3), int), SHAPES, "none"),
    "30 classes": lambda: figures.confusion_matrix(
        counts(30), [f"chequered ring {i}" for i in range(30)], "30"
    ),
    "no images": lambda: figures.image_grid(images(0), [], "mistakes"),
    "one image": lambda: figures.image_grid(images(1), ["cat 98 %\nis dog"], LONG),
    "images": lambda: figures.image_grid(
        images(13), ["chequered ring 98 %\nis striped disc"] * 13, "13"
    ),
    "curves": lambda: figures.line_plot(
        {f"chequered ring {i}": band(i + 1) for i in range(8)}, LONG
    ),
    "a point": lambda: figures.line_plot(
        {"$x$": ([1], [math.nan]), "_y": ([1], [0.5])}, "costs $1 or $2"
    ),
    "no curves": lambda: figures.line_plot({}, "no curves"),
}


def decode(png):
    """Return a picture [height, width, 3]."""
    return np.array(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.fixture
def drawn(monkeypatch):
    """Return a function that returns Matplotlib's texts that the test has drawn."""
    texts = []
    draw = Text.draw

    def draw_and_record(text, renderer):
        texts.append(text)
        draw(text, renderer)

    monkeypatch.setattr(Text, "draw", draw_and_record)
    return lambda: [text for text in dict.fromkeys(texts) if text.get_text() and text.get_visible()]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "30 classes" else ())
        for name in PICTURES
    ],
)
def test_nothing_is_cut_off_and_no_text_lies_upon_another(drawn, name):
    picture = decode(PICTURES[name]())
    edges = [picture[0], picture[-1], picture[:, 0], picture[:, -1]]

    assert all((edge == 255).all() for edge in edges)
    assert np.ptp(picture) > 100

    texts = drawn()
    texts[0].figure.draw_without_rendering()  # legends lie where they were drawn last
    boxes = [text.get_window_extent() for text in texts if text.get_rotation() != 45]
    starts = np.array([box.min for box in boxes])
    ends = np.array([box.max for box in boxes])
    # of every two
    common = (np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts)).min(2)

    assert np.triu(common, 1).max() <= 1.5  # pixels


def test_confusion_matrix_shows_shares_recall_precision_and_accuracy(drawn):
    """Shares take at most four characters, and one that is not whole is not rounded to 0 or 100
    %.
    """
    figures.confusion_matrix(np.array([[9999, 1, 0], [4, 95, 1], [0, 0, 0]]), SHAPES, "$x$")
    texts = drawn()
    lines = set()
    for text in texts:
        lines |= set(text.get_text().split("\n"))

    assert {"99.9", "9,999", "<0.1", "4.0", "95.0", "1.0"} <= lines  # cells
    assert {"chequered ring  99.9", "striped disc  95.0", "plain square  -"} <= lines  # recall
    assert {"chequered ring  99.9", "striped disc  99.0", "plain square  0.0"} <= lines  # precision
    assert {"accuracy 99.9 %", "$x$"} <= lines
    assert not any(text.get_parse_math() for text in texts)  # dollars are no mathematics


def test_legend_is_beside_the_plot_in_the_order_of_last_values(drawn):
    figures.line_plot({"low": band(9), "high": band(1), "middle": band(5)[:2]}, "three")
    (axes,) = drawn()[0].figure.axes
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["high", "middle", "low"]
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1


@pytest.mark.parametrize(("number", "side", "columns"), [(5, 32, 3), (3, 28, 8), (2, 64, 8)])
def test_image_grid_enlarges_every_pixel_and_has_every_caption(drawn, number, side, columns):
    shown = images(number, side)
    captions = [f"cat $9{i} %\nis $dog" for i in range(number)]
    sheet = decode(figures.image_grid(shown, captions, "mistakes", columns))
    factor = round(96 / side)
    for image in shown:
        big = image.repeat(factor, 0).repeat(factor, 1)
        starts = np.argwhere((sheet[: 1 - big.shape[0], : 1 - big.shape[1]] == big[0, 0]).all(2))
        assert any(np.array_equal(sheet[y:, x:][: len(big), : len(big)], big) for y, x in starts)

    title, *texts = sorted(drawn(), key=lambda text: text.get_text() != "mistakes")
    assert [text.get_text() for text in texts] == captions

    boxes = [text.get_window_extent() for text in texts]
    enlarged = [image.get_window_extent() for image in title.axes.images]
    for image, box in zip(enlarged, boxes, strict=True):
        assert box.y1 <= image.y0
        assert box.x0 == pytest.approx(image.x0, abs=2)


@pytest.mark.parametrize("name", ["gaps", "images", "curves"])
def test_pictures_are_drawn_by_default_settings_of_matplotlib(name):
    """Otherwise settings of the user's program would end a run in its last evaluation."""
    expected = PICTURES[name]()
    changed = {"text.usetex": True, "savefig.format": "pdf", "font.size": 20}
    with matplotlib.rc_context(changed):
        assert PICTURES[name]() == expected
        assert {key: matplotlib.rcParams[key] for key in changed} == changed
