import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import ImageDraw

from cifar_towers.reporting import figures

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPES = ("chequered ring", "striped disc", "plain square")
LONG = "a title so long that a picture of its width would be wider than any page that it could stand on, and no page is"
EPOCHS = np.arange(1, 21)
CAPTION = "chequered ring 98 %\nis striped disc"
GAPS = np.outer(np.arange(10) != 2, np.arange(10) != 7)  # one class has no examples, and one is never predicted


def counts(classes, accuracy=0.94):
    """[C, C] as of a net of this accuracy, 1000 examples a class."""
    generator = np.random.default_rng(classes)
    off = generator.dirichlet(np.full(classes, 0.3), classes) * (1 - accuracy)
    return np.round(1000 * (off + accuracy * np.eye(classes))).astype(int)


def images(number, side=32):
    return np.random.default_rng(number).integers(0, 256, (number, side, side, 3), np.uint8)


def curve(bend):
    return EPOCHS, 94 - 60 * np.exp(-EPOCHS / bend)


def band(bend):
    x, y = curve(bend)
    return x, y, y - 2, y + 2


PICTURES = {
    "ten classes": lambda: figures.confusion_matrix(counts(10), CIFAR, "speed94, seed 0"),
    "untrained": lambda: figures.confusion_matrix(counts(10, 0.1), CIFAR, LONG),
    "gaps": lambda: figures.confusion_matrix(counts(10) * GAPS, CIFAR, "without birds"),
    "no examples": lambda: figures.confusion_matrix(np.zeros((3, 3), int), SHAPES, "none"),
    "three classes": lambda: figures.confusion_matrix(counts(3) * 100, SHAPES, "three"),
    "28 classes": lambda: figures.confusion_matrix(counts(28), [f"chequered ring {i}" for i in range(28)], "28"),
    "100 classes": lambda: figures.confusion_matrix(counts(100), [f"ring {i}" for i in range(100)], "100"),
    "no images": lambda: figures.image_grid(images(0), [], "mistakes"),
    "one image": lambda: figures.image_grid(images(1), ["cat 98 %\nis dog"], LONG),
    "images": lambda: figures.image_grid(images(13), [CAPTION] * 13, "13"),
    "images without a title": lambda: figures.image_grid(images(3, 24), CIFAR[:3], columns=2),
    "curves": lambda: figures.line_plot({f"chequered ring {i}": band(i + 1) for i in range(8)}, LONG),
    "a point": lambda: figures.line_plot({"$x$": ([1], [math.nan]), "_y": ([1], [0.5])}, "costs $1 or $2"),
    "no curves": lambda: figures.line_plot({}, "no curves"),
}


class Drawing:
    """The Matplotlib figures and the Pillow texts drawn inside `with`."""

    def __enter__(self):
        self.figures, self.pillow_texts, self.patch = [], [], pytest.MonkeyPatch()
        rasterize, draw, write = figures._rasterize, Text.draw, ImageDraw.ImageDraw.multiline_text

        def write_and_record(canvas, place, text, fill, font, **options):
            left, top, right, bottom = canvas.multiline_textbbox(place, text, font, **options)
            self.pillow_texts.append((text, np.array([[left, top], [right, bottom]]), None))
            write(canvas, place, text, fill, font, **options)

        self.patch.setattr(figures, "_rasterize", lambda figure: (self.figures.append(figure), rasterize(figure))[1])
        self.patch.setattr(Text, "draw", lambda text, renderer: (text.set_url("drawn"), draw(text, renderer))[1])
        self.patch.setattr(ImageDraw.ImageDraw, "multiline_text", write_and_record)
        return self

    def __exit__(self, *_):
        self.patch.undo()

    @property
    def axes(self):
        return self.figures[0].axes[0]

    def texts(self):
        """(text, its box [[left, top], [right, bottom]] in pixels of the picture, its Matplotlib artist if any)."""
        entries = list(self.pillow_texts)
        for figure in self.figures:
            figure.draw_without_rendering()  # legends lie where they were drawn last
            left, top = corner(figure)
            for text in figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_url()):
                box = text.get_window_extent()
                if text.get_text() and text.get_visible():
                    corners = [[box.x0 - left, top - box.y1], [box.x1 - left, top - box.y0]]
                    entries.append((text.get_text(), np.array(corners), text))
        return [entry for entry in entries if entry[0]]

    def lines(self):
        """All texts, line by line."""
        return [line for text, _, _ in self.texts() for line in text.split("\n")]


def corner(figure):
    """Return the position of a picture's upper left pixel on its figure."""
    left, _, _, top = figures.DPI * figure.get_tightbbox().padded(figures.MARGIN_INCHES).extents
    return math.floor(left), math.ceil(top)


@pytest.fixture(scope="module")
def drawn():
    """drawn(name): (picture, its `Drawing`) of one of `PICTURES`, drawn once."""
    cache = {}

    def draw(name):
        if name not in cache:
            with Drawing() as drawing:
                cache[name] = PICTURES[name](), drawing
        return cache[name]

    return draw


@pytest.fixture
def drawing():
    with Drawing() as recorded:
        yield recorded


def contrast(one, other):
    """WCAG 2's ratio of two colors [3] from 0 to 1."""
    linear = [np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in map(np.array, (one, other))]
    dark, light = sorted(color @ (0.2126, 0.7152, 0.0722) for color in linear)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", PICTURES)
def test_picture_has_margins_and_legible_texts(drawn, name):
    """Opaque RGB with a clean margin; each text lies inside and left its ink; none lies upon another."""
    picture, drawing = drawn(name)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
    assert max(picture.shape) < 2000
    inside = np.zeros(picture.shape[:2], bool)
    inside[16:-16, 16:-16] = True
    assert (picture[~inside] == 255).all()
    boxes = []
    for text, box, artist in drawing.texts():
        (left, top), (right, bottom) = box.round().astype(int)
        assert 0 <= left < right <= picture.shape[1] and 0 <= top < bottom <= picture.shape[0], text
        assert np.ptp(picture[top:bottom, left:right].astype(int), axis=(0, 1)).max() > 100, text
        if not artist or artist.get_rotation() != 45:
            boxes.append(box)
    starts, ends = np.swapaxes(boxes, 0, 1)
    common = (np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts)).min(2)  # of every two, in pixels
    assert np.triu(common, 1).max() <= 1.5


@pytest.mark.parametrize("name", ["ten classes", "untrained", "gaps", "three classes", "28 classes", "100 classes"])
def test_numbers_fit_their_cells_with_contrast(drawn, name):
    """Many classes have no numbers."""
    picture, drawing = drawn(name)
    side = drawing.axes.transData.transform([[0, 0], [1, 0]])[:, 0]
    cells = [(artist, box) for _, box, artist in drawing.texts() if artist.get_gid() == "cell"]
    assert bool(cells) == (name != "100 classes")
    for artist, box in cells:
        assert np.ptp(box, axis=0).max() < side[1] - side[0]
        (left, top), _ = box.round().astype(int)
        assert contrast(picture[top, left - 1] / 255, to_rgb(artist.get_color())) >= 4.5


def test_confusion_matrix_shows_shares_recall_precision_and_accuracy(drawing):
    figures.confusion_matrix(np.array([[95, 4, 1], [0, 100, 0], [0, 0, 0]]), SHAPES, "three")
    lines = drawing.lines()
    names = ("chequered ring  95.0", "striped disc  100", "plain square  -")  # with recall
    names += ("chequered ring  100", "striped disc  96.2", "plain square  0.0")  # with precision: 100 of 104
    for text in ("95.0", "95", "4.0", "100", "accuracy 97.5 %", *names):
        assert text in lines, text
    assert {"true class, recall in %", "predicted class, precision in %", "three"} <= set(lines)


def test_half_a_percent_of_errors_is_visible(drawing):
    matrix = np.diag(np.full(10, 995))
    matrix[3, 5] = 5
    picture = figures.confusion_matrix(matrix, CIFAR, "one confusion")
    left, top = corner(drawing.figures[0])
    columns_and_rows = np.array([(5, 3), (3, 5), (3, 3)])
    places = drawing.axes.transData.transform(columns_and_rows - 0.4)  # between a cell's border and its numbers
    error, empty, right = (picture[round(top - y), round(x - left)] / 255 for x, y in places)
    assert np.abs(error - empty).max() > 0.08
    assert contrast(right, error) > 4.5


@pytest.mark.parametrize(("number", "side", "columns"), [(1, 32, 8), (5, 32, 3), (3, 28, 8), (2, 64, 8)])
def test_image_grid_enlarges_every_pixel(number, side, columns):
    shown = images(number, side)
    sheet = figures.image_grid(shown, [f"cat 9{i} %\nis dog" for i in range(number)], "mistakes", columns)
    factor = round(96 / side)
    for image in shown:
        big = image.repeat(factor, 0).repeat(factor, 1)
        starts = np.argwhere((sheet[: 1 - big.shape[0], : 1 - big.shape[1]] == big[0, 0]).all(2))
        assert any(np.array_equal(sheet[y:, x:][: len(big), : len(big)], big) for y, x in starts)
    if number > columns:
        assert sheet.shape[0] > 2 * factor * side


def test_captions_of_neighbors_stand_apart(drawn):
    """By the width of a few letters, also where a caption is wider than its image."""
    assert drawn("no images")[1].lines() == ["mistakes: none"]
    boxes = [box for text, box, _ in drawn("images")[1].texts() if text == CAPTION]
    (_, top), (right, _) = boxes[0]
    assert min(left - right for (left, other), _ in boxes if other == top and left > right) >= 24


def test_legend_is_beside_the_plot_in_the_order_of_last_values(drawing):
    figures.line_plot({"low": curve(9), "high": band(1), "middle": curve(5)}, "three")
    legend = drawing.axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["high", "middle", "low"]
    assert legend.get_window_extent().x0 > drawing.axes.get_window_extent().x1


def test_line_styles_are_distinct_and_visible_on_white():
    colors, dashes = zip(*figures.LINE_STYLES, strict=True)
    assert len(set(colors)) == len(set(dashes)) == 8
    assert all(contrast(to_rgb(color), (1, 1, 1)) > 3 for color in colors)


def test_dollars_are_not_parsed_as_mathematics(drawn):
    parsed = [artist.get_parse_math() for text, _, artist in drawn("a point")[1].texts() if "$" in text]
    assert parsed == [False] * 2


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0"), (0.0004, "<0.1"), (0.0005, "0.1"), (0.943, "94.3"), (0.9999, "99.9"), (1, "100"), (math.nan, "-")],
)
def test_percent_takes_at_most_four_characters(share, text):
    assert figures._percent(share) == text


def test_drawing_changes_no_global_state():
    """Neither pyplot nor TensorFlow is loaded, and no setting changed."""
    program = """if True:
        import sys, matplotlib, numpy as np
        names = sorted({*matplotlib.rcParams} - {"backend"})  # reading that one loads pyplot
        before = [matplotlib.rcParams[name] for name in names]
        from cifar_towers.reporting import figures
        figures.confusion_matrix(np.eye(2, dtype=int), "ab", "title")
        figures.line_plot({"a": ([1, 2], [3, 4])}, "title")
        assert not {"matplotlib.pyplot", "tensorflow"} & set(sys.modules)
        assert [matplotlib.rcParams[name] for name in names] == before
    """
    subprocess.run([sys.executable, "-c", program], check=True)
