import contextlib
import functools
import gc
import io
import math
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from cifar_towers.reporting import figures as pictures

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPES = ("chequered ring", "striped disc", "plain square")
LONG = "a title that goes on and on until a picture of its width would be wider than any page that it could stand on"
EPOCHS = np.arange(1, 21)


def counts(classes, accuracy=0.94):
    """[C, C] as of a net of this accuracy, 1000 examples a class."""
    generator = np.random.default_rng(classes)
    off = generator.dirichlet(np.full(classes, 0.3), classes) * (1 - accuracy)
    return np.round(1000 * (off + accuracy * np.eye(classes))).astype(int)


def missing():
    """Counts of ten classes: no example of one, and one is never predicted."""
    matrix = counts(10)
    matrix[2], matrix[:, 7] = 0, 0
    return matrix


def images(number, side=32):
    return np.random.default_rng(number).integers(0, 256, (number, side, side, 3), np.uint8)


def curve(bend):
    return EPOCHS, 94 - 60 * np.exp(-EPOCHS / bend)


def band(bend):
    x, y = curve(bend)
    return x, y, y - 2, y + 2


DRAWN = {
    "ten classes": lambda: pictures.confusion_matrix(counts(10), CIFAR, "speed94, seed 0"),
    "untrained": lambda: pictures.confusion_matrix(counts(10, 0.1), CIFAR, LONG),
    "missing": lambda: pictures.confusion_matrix(missing(), CIFAR, "without birds"),
    "no examples": lambda: pictures.confusion_matrix(np.zeros((3, 3), int), SHAPES, "none"),
    "three classes": lambda: pictures.confusion_matrix(counts(3) * 100, SHAPES, "three"),
    "28 classes": lambda: pictures.confusion_matrix(counts(28), [f"chequered ring {i}" for i in range(28)], "28"),
    "a hundred classes": lambda: pictures.confusion_matrix(counts(100), [f"ring {i}" for i in range(100)], "100"),
    "no mistakes": lambda: pictures.contact_sheet(images(0), [], "no mistakes"),
    "one mistake": lambda: pictures.contact_sheet(images(1), ["cat 98 %\nis dog"], LONG),
    "mistakes": lambda: pictures.contact_sheet(images(13), ["chequered ring 98 %\nis striped disc"] * 13, "13"),
    "curves": lambda: pictures.lines({f"chequered ring {i}": band(i + 1) for i in range(8)}, LONG, "epoch", "acc., %"),
    "a point": lambda: pictures.lines({"$x$": ([1], [math.nan]), "_y": ([1], [0.5])}, "costs $1 or $2", "$", "$"),
    "no curves": lambda: pictures.lines({}, "no curves", "epoch", "accuracy"),
}


@contextlib.contextmanager
def recording():
    """The figures drawn inside, in order, with what they drew marked."""
    seen, drawn, draw = [], pictures._drawn, Text.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "_drawn", lambda figure: (seen.append(figure), drawn(figure))[1])
        patch.setattr(Text, "draw", lambda text, renderer: (text.set_url("drawn"), draw(text, renderer))[1])
        yield seen


@pytest.fixture
def figures():
    """The figures drawn since, in order."""
    with recording() as seen:
        yield seen


@functools.cache
def drawn(name):
    """(picture, its figure) of one of `DRAWN`."""
    with recording() as seen:
        return DRAWN[name](), seen[0]


def corner(figure):
    """Where a picture's upper left pixel lies on its figure."""
    left, _, _, top = pictures.DPI * figure.get_tightbbox().padded(pictures.MARGIN).extents
    return math.floor(left), math.ceil(top)


def texts(figure):
    """The texts drawn and their boxes [[left, top], [right, bottom]] in pixels of the picture."""
    figure.draw_without_rendering()  # legends lie where they were drawn last
    left, top = corner(figure)
    for text in figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_url() and artist.get_visible()):
        box = text.get_window_extent()
        if text.get_text():
            yield text, np.array([[box.x0 - left, top - box.y1], [box.x1 - left, top - box.y0]])


def contrast(one, other):
    """WCAG 2's ratio of two colours [3] from 0 to 1."""
    linear = [np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for c in map(np.array, (one, other))]
    dark, light = sorted(color @ (0.2126, 0.7152, 0.0722) for color in linear)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_whole(name):
    """Opaque RGB with a clean margin; each text lies inside and left its ink; none lies upon another."""
    picture, figure = drawn(name)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
    assert max(picture.shape) < 2000
    inside = np.zeros(picture.shape[:2], bool)
    inside[16:-16, 16:-16] = True
    assert (picture[~inside] == 255).all()
    boxes = []
    for text, box in texts(figure):
        (left, top), (right, bottom) = box.round().astype(int)
        assert 0 <= left < right <= picture.shape[1] and 0 <= top < bottom <= picture.shape[0], text
        assert np.ptp(picture[top:bottom, left:right].astype(int), axis=(0, 1)).max() > 100, text
        if text.get_rotation() != 45:
            boxes.append(box)
    starts, ends = np.swapaxes(boxes, 0, 1)
    common = (np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts)).min(2)  # of every two, in pixels
    assert np.triu(common, 1).max() <= 1.5


@pytest.mark.parametrize("name", ["ten classes", "untrained", "missing", "three classes", "28 classes"])
def test_figures_are_read_on_their_cells_and_fit_them(name):
    picture, figure = drawn(name)
    axes = figure.axes[0]
    side = axes.transData.transform([[0, 0], [1, 0]])[:, 0]
    cells = [(text, box) for text, box in texts(figure) if text.get_gid() == "cell"]
    assert cells
    for text, box in cells:
        assert np.ptp(box[:, 0]) < side[1] - side[0]
        (left, top), _ = box.round().astype(int)
        assert contrast(picture[top, left - 1] / 255, to_rgb(text.get_color())) >= 4.5


@pytest.mark.parametrize("name", ["Blues", "Oranges"])
def test_ink_is_read_on_every_colour(name):
    for fill in colormaps[name](np.linspace(0, 1, 256))[:, :3]:
        assert contrast(fill, to_rgb(pictures._ink(fill))) >= 4.5


def told(figure):
    return [text.get_text() for text, _ in texts(figure)]


def test_what_a_confusion_matrix_says(figures):
    pictures.confusion_matrix(np.array([[95, 4, 1], [0, 100, 0], [0, 0, 0]]), SHAPES, "three")
    said = told(figures[0])
    for text in ("95.0", "95", "4.0", "100", "96.2", "0.0", "-", "97.5", "recall", "precision", *SHAPES):
        assert text in said, text  # 96.2: 100 of 104 said to be a striped disc are; 97.5: accuracy
    assert {"true class", "predicted class", "three"} <= set(said)


def cell_colour(picture, figure, row, column):
    """The colour in the upper left corner of a cell, between its border and its figures."""
    left, top = corner(figure)
    x, y = figure.axes[0].transData.transform((column - 0.4, row - 0.4))
    return picture[round(top - y), round(x - left)] / 255


def test_half_a_percent_is_seen_beside_the_diagonal(figures):
    matrix = np.diag(np.full(10, 995))
    matrix[3, 5] = 5
    picture = pictures.confusion_matrix(matrix, CIFAR, "one confusion")
    seen, empty, right = (cell_colour(picture, figures[0], *cell) for cell in ((3, 5), (5, 3), (3, 3)))
    assert np.abs(seen - empty).max() > 0.08
    assert contrast(right, seen) > 4.5


def test_with_many_classes_colour_speaks_alone():
    _, figure = drawn("a hundred classes")
    assert not [text for text in figure.findobj(Text) if text.get_gid() == "cell"]


@pytest.mark.parametrize(("number", "side", "columns"), [(1, 32, 8), (5, 32, 3), (64, 32, 8), (3, 28, 8), (2, 64, 8)])
def test_a_contact_sheet_holds_every_pixel_enlarged(number, side, columns, figures):
    shown = images(number, side)
    sheet = pictures.contact_sheet(shown, [f"cat 9{i} %\nis dog" for i in range(number)], "mistakes", columns)
    factor = round(96 / side)
    for image in shown:
        big = image.repeat(factor, 0).repeat(factor, 1)
        starts = np.argwhere((sheet[: 1 - big.shape[0], : 1 - big.shape[1]] == big[0, 0]).all(2))
        cuts = (sheet[y : y + big.shape[0], x : x + big.shape[1]] for y, x in starts)
        assert any(np.array_equal(cut, big) for cut in cuts)
    if number > columns:
        assert sheet.shape[0] > 2 * factor * side


def test_an_empty_contact_sheet_says_so():
    assert "none" in told(drawn("no mistakes")[1])


def test_every_image_of_a_contact_sheet_has_a_caption():
    with pytest.raises(ValueError):
        pictures.contact_sheet(images(2), ["cat 98 %\nis dog"], "mistakes")


@pytest.mark.parametrize(("number", "columns"), [(0, 1), (1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4)])
def test_a_sprite_is_a_square_in_rows_filled_up_with_white(number, columns):
    shown = images(number, 8)
    mosaic = pictures.sprite(shown, side=8)
    assert mosaic.shape == (8 * columns, 8 * columns, 3) and mosaic.dtype == np.uint8
    for place in range(columns**2):
        row, column = divmod(place, columns)
        tile = mosaic[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        assert (tile == (shown[place] if place < number else 255)).all()


def test_curves_are_named_in_the_order_they_end_in_beside_the_plot(figures):
    pictures.lines({"low": curve(9), "high": band(1), "middle": curve(5)}, "three", "epoch", "accuracy")
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["high", "middle", "low"]
    assert axes.get_legend().get_window_extent().x0 > axes.get_window_extent().x1


def test_curves_differ_in_colour_and_dashes_and_are_seen_on_paper():
    colours, dashes = zip(*pictures.STROKES, strict=True)
    assert len(set(colours)) == len(set(dashes)) == 8
    assert all(contrast(to_rgb(color), (1, 1, 1)) > 3 for color in colours)


def test_more_curves_than_can_be_told_apart():
    with pytest.raises(ValueError, match="9 curves, of which 8 can be told apart"):
        pictures.lines({str(i): curve(i + 1) for i in range(9)}, "nine", "epoch", "accuracy")


def test_dollars_are_dollars():
    priced = [text for text, _ in texts(drawn("a point")[1]) if "$" in text.get_text()]
    assert len(priced) == 4 and not any(text.get_parse_math() for text in priced)


def test_few_epochs_are_not_cut_in_halves(figures):
    pictures.lines({"short": ([1, 2, 3], [0.1, 0.2, 0.3])}, "short", "epoch", "accuracy")
    assert all(tick == int(tick) for tick in figures[0].axes[0].get_xticks())


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0"), (0.0004, "<0.1"), (0.0005, "0.1"), (0.943, "94.3"), (0.9999, "99.9"), (1, "100"), (math.nan, "-")],
)
def test_a_share_takes_four_characters(share, text):
    assert pictures._percent(share) == text


def test_a_png_holds_the_array():
    array = images(1)[0]
    assert (np.array(Image.open(io.BytesIO(pictures.png(array)))) == array).all()


def test_threads_draw_what_one_draws():
    names = ["ten classes", "mistakes", "curves", "three classes"]
    alone = [drawn(name)[0] for name in names]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda name: DRAWN[name](), names))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_figures_are_let_go(monkeypatch):
    seen, drawn = [], pictures._drawn
    monkeypatch.setattr(pictures, "_drawn", lambda figure: (seen.append(weakref.ref(figure)), drawn(figure))[1])
    DRAWN["curves"](), DRAWN["three classes"]()
    gc.collect()
    assert [figure() for figure in seen] == [None, None]


def test_nothing_global_is_touched():
    """Neither pyplot nor TensorFlow is loaded, and no setting changed."""
    program = """if True:
        import sys, matplotlib, numpy as np
        names = sorted({*matplotlib.rcParams} - {"backend"})  # to look at which loads pyplot
        before = [matplotlib.rcParams[name] for name in names]
        from cifar_towers.reporting import figures as pictures
        pictures.confusion_matrix(np.eye(2, dtype=int), "ab", "title")
        pictures.lines({"a": ([1, 2], [3, 4])}, "title", "x", "y")
        assert not {"matplotlib.pyplot", "tensorflow"} & set(sys.modules)
        assert [matplotlib.rcParams[name] for name in names] == before
    """
    subprocess.run([sys.executable, "-c", program], check=True)
