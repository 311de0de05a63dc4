"""What a run shows, drawn as arrays [height, width, 3] of uint8 for TensorBoard and for the report.

Every picture brings its own white paper, grows until nothing is cut off, and touches no state that threads share.
"""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image, ImageDraw, ImageFont

DPI = 120
MARGIN = 0.15  # inches of paper around everything
PAPER, INK, MUTED, GRID, NOTHING = "white", "black", "#555555", "#dddddd", "#d0d0d0"
MOST_CLASSES = 200  # of a confusion matrix that is drawn: a cell takes 15 pixels at least
ERROR_POWER = 0.4  # what confusions are raised to before they are coloured: 1 % is seen beside 50 %
STROKES = (  # told apart by all, in colour or by their dashes, and on white paper
    ("#0072b2", "-"),
    ("#d55e00", (0, (6, 2))),
    ("#009e73", (0, (1, 1.2))),
    ("#000000", (0, (6, 2, 1, 2))),
    ("#cc79a7", (0, (3, 1.5))),
    ("#4b0092", (0, (6, 2, 1, 2, 1, 2))),
    ("#882255", (0, (12, 3))),
    ("#5b3a1e", (0, (3, 2, 1, 2))),
)


def confusion_matrix(counts: np.ndarray, class_names: Sequence[str], title: str) -> np.ndarray:
    """Counts [C, C] of examples of class (row) taken for class (column): shares of the row, recall and precision.

    With more than 28 classes colour speaks alone. The row of a class without examples is grey.
    """
    classes, right = len(class_names), np.diag(counts)
    with np.errstate(invalid="ignore"):
        shares = counts / counts.sum(1, keepdims=True)
        recall, precision, accuracy = right / counts.sum(1), right / counts.sum(0), right.sum() / counts.sum()
    kept, mistaken = (matplotlib.colormaps[name].with_extremes(bad=NOTHING) for name in ("Blues", "Oranges"))
    fill = np.where(np.eye(classes, dtype=bool)[..., None], kept(shares), mistaken(shares**ERROR_POWER))[..., :3]

    cell = min(1.2, max(0.125, 6.4 / classes))  # inches
    points, margin = 72 * cell, 0.56 / cell  # a cell in points; cells that recall and precision take
    edge, middle, end = classes - 0.5, classes - 0.5 + margin / 2, classes - 0.5 + margin
    axes = _axes((end + 0.5) * cell, (end + 0.5) * cell, title)
    axes.imshow(fill, extent=(-0.5, edge, edge, -0.5), interpolation="nearest")
    axes.set(xlim=(-0.5, end), ylim=(end, -0.5))
    borders = np.arange(classes + 1) - 0.5
    axes.hlines(borders, -0.5, edge, PAPER, linewidth=points / 40)
    axes.vlines(borders, -0.5, edge, PAPER, linewidth=points / 40)
    _write_cells(axes, counts, shares, fill, cell)

    size = min(10, max(6, 0.5 * points))
    style = {"ha": "center", "va": "center", "size": size}
    for place in range(classes):
        axes.text(middle, place, _percent(recall[place]), **style)
        axes.text(place, middle, _percent(precision[place]), rotation=90 if points < 3 * size else 0, **style)
    axes.text(middle, middle, _percent(accuracy), weight="bold", **style)
    small = style | {"size": max(6, 0.7 * size), "va": "top"}
    axes.annotate("accuracy", (middle, middle), (0, -0.6 * size), textcoords="offset points", **small)

    slanted = _width([*class_names, "recall"], size) > cell * DPI - 6
    tilt = {"rotation": 45, "ha": "left", "va": "baseline", "rotation_mode": "anchor"} if slanted else {}
    places = [*range(classes), middle]
    axes.set_xticks(places, [*class_names, "recall"], size=size, **tilt)
    axes.set_yticks(places, [*class_names, "precision"], size=size)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.spines[:].set_visible(False)
    axes.set_xlabel("predicted class", size=10, color=MUTED, labelpad=8)
    axes.set_ylabel("true class", size=10, color=MUTED, labelpad=8)

    _key(axes, 0, "right", kept, 1, (0, 25, 50, 75, 100))
    _key(axes, 0.54, "mistaken", mistaken, ERROR_POWER, (0, 1, 5, 20, 50, 100))
    return _drawn(axes.figure)


def contact_sheet(images: np.ndarray, captions: Sequence[str], title: str, columns: int = 8) -> np.ndarray:
    """Images [n, height, width, 3] of uint8, enlarged without smoothing, each over its caption of two lines."""
    if not len(images):
        axes = _axes(4, 0.3, title)
        axes.axis("off")
        axes.text(0, 0.5, "none", size=10, va="center", color=MUTED)
        return _drawn(axes.figure)
    height, width = np.array(images.shape[1:3]) * max(1, round(96 / max(images.shape[1:3])))  # pixels, from here on
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    across = max(width, _width("\n".join(captions).split("\n"), 8)) + 14
    down = height + 46
    axes = _axes(across * columns / DPI, down * rows / DPI, title)
    axes.axis("off")
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = across * (place % columns), down * (place // columns)
        axes.imshow(image, extent=(left, left + width, top + height, top), interpolation="nearest")
        axes.text(left, top + height + 4, caption, size=8, va="top", color=INK, linespacing=1.15)
    axes.set(xlim=(0, across * columns), ylim=(down * rows, 0))
    return _drawn(axes.figure)


def labelled(images: np.ndarray, labels: Sequence[str], columns: int = 4) -> np.ndarray:
    """Images [n, height, width, 3] of uint8 in rows, enlarged without smoothing, each over its label.

    Drawn in some milliseconds, where `contact_sheet` takes a tenth of a second.
    """
    font, enlarged = ImageFont.load_default(14), max(1, round(96 / max(images.shape[1:3])))
    height, width = (enlarged * size for size in images.shape[1:3])
    across, down = max(width, *(math.ceil(font.getlength(label)) for label in labels)) + 8, height + 26
    columns = min(columns, len(images))
    sheet = Image.new("RGB", (across * columns, down * math.ceil(len(images) / columns)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        left, top = across * (place % columns) + 4, down * (place // columns) + 4
        sheet.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST), (left, top))
        draw.text((left, top + height + 2), label, INK, font)
    return np.array(sheet)


def sprite(images: np.ndarray, side: int = 32) -> np.ndarray:
    """Images [n, side, side, 3] of uint8 in the rows of a square filled up with white, for TensorBoard's projector."""
    columns = max(1, math.ceil(math.sqrt(len(images))))
    tiles = np.full((columns**2, side, side, 3), 255, np.uint8)
    tiles[: len(images)] = images
    grid = tiles.reshape(columns, columns, side, side, 3).swapaxes(1, 2)
    return grid.reshape(columns * side, columns * side, 3)


def lines(curves: Mapping[str, tuple], title: str, x_label: str, y_label: str) -> np.ndarray:
    """Up to eight curves {name: (x, y) or (x, y, low, high)}, named beside the plot in the order they end in."""
    if len(curves) > len(STROKES):
        raise ValueError(f"{len(curves)} curves, of which {len(STROKES)} can be told apart")
    axes = _axes(6.4, 3.6, title)
    handles = {}
    for (name, (x, y, *band)), (color, dashes) in zip(curves.items(), STROKES, strict=False):
        point = "o" if len(x) == 1 else ""
        (handles[name],) = axes.plot(x, y, color=color, linestyle=dashes, marker=point, linewidth=1.8)
        if band:
            axes.fill_between(x, *band, color=color, alpha=0.15, linewidth=0)
    ends = sorted(curves, key=lambda name: -np.nansum(curves[name][1][-1:]))
    axes.legend(
        [handles[name] for name in ends], ends, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0,
        frameon=False, handlelength=3.6, fontsize=9,
    )  # fmt: skip
    axes.margins(x=0.01)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.xaxis.set_major_formatter(_number)
    axes.set_xlabel(x_label, size=10)
    counted = all(np.asarray(x).dtype.kind in "iu" for x, *_ in curves.values())  # no half epochs
    axes.xaxis.get_major_locator().set_params(integer=counted)
    axes.yaxis.set_major_formatter(_number)
    axes.set_ylabel(y_label, size=10)
    return _drawn(axes.figure)


def png(array: np.ndarray) -> bytes:
    """Array [height, width, 3] of uint8 as a PNG file's bytes."""
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def _axes(width: float, height: float, title: str) -> Axes:
    """Axes of width by height inches; what stands around them is added to the picture."""
    axes = Figure((width, height), DPI).add_axes((0, 0, 1, 1))
    axes.set_title(textwrap.fill(title, max(56, int(10 * width))), loc="left", size=12, pad=10, color=INK)
    return axes


def _write_cells(axes: Axes, counts: np.ndarray, shares: np.ndarray, fill: np.ndarray, cell: float) -> None:
    """The share in every cell that is not empty, and the count under it, as far as cells of `cell` inches hold them."""
    size = min(10, 26.6 * cell)
    if size < 6:
        return
    for row, column in np.argwhere(counts > 0):
        share, count = _percent(shares[row, column]), f"{counts[row, column]:,.0f}"
        style = {"ha": "center", "color": _ink(fill[row, column]), "gid": "cell", "in_layout": False}
        if 72 * cell > 2.5 * size and _width([count], 0.75 * size) < DPI * cell - 4:
            axes.text(column, row, share, va="bottom", size=size, **style)
            axes.text(column, row + 0.06, count, va="top", size=0.75 * size, **style)
        else:
            axes.text(column, row, share, va="center", size=size, **style)


def _key(axes: Axes, left: float, name: str, colours: Colormap, power: float, percents: Sequence[int]) -> None:
    """A scale of colours under the axes, `left` of their width in, marked at the percents."""
    _, height = axes.figure.get_size_inches()
    key = axes.inset_axes((left, -0.5 / height, 0.46, 0.13 / height))
    key.imshow(colours(np.linspace(0, 1, 256))[None], extent=(0, 1, 0, 1), aspect="auto")
    key.set_xticks((np.array(percents) / 100) ** power, percents, size=8)
    key.set_yticks([])
    key.set_title(f"{name}, % of the true class", size=8, color=MUTED, loc="left", pad=3)


def _drawn(figure: Figure) -> np.ndarray:
    """[height, width, 3] with everything that the figure holds, its size or not."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name may hold dollars
    canvas = FigureCanvasAgg(figure)
    needed = DPI * figure.get_tightbbox(canvas.get_renderer()).padded(MARGIN).get_points()
    whole = Bbox([np.floor(needed[0]) / DPI, np.ceil(needed[1]) / DPI])  # pixels, for images to keep theirs
    buffer = io.BytesIO()
    canvas.print_figure(buffer, format="png", dpi=DPI, facecolor=PAPER, bbox_inches=whole)
    return np.array(Image.open(buffer).convert("RGB"))


def _width(texts: Sequence[str], size: float) -> int:
    """Pixels that the longest text takes."""
    renderer, font = RendererAgg(1, 1, DPI), FontProperties(size=size)
    return math.ceil(max(renderer.get_text_width_height_descent(text, font, False)[0] for text in texts))


def _ink(fill: np.ndarray) -> str:
    """Black or white, whichever is better read on the colour [3]: a contrast of at least 4.58 (WCAG 2)."""
    linear = np.where(fill <= 0.04045, fill / 12.92, ((fill + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "white"


def _percent(share: float) -> str:
    """A share in at most four characters; `-` where there is none.

    >>> [_percent(share) for share in (0.0004, 0.943, 1.0, math.nan)]
    ['<0.1', '94.3', '100', '-']
    """
    if math.isnan(share):
        return "-"
    return "<0.1" if 0 < share < 0.0005 else "100" if share == 1 else f"{min(99.9, 100 * share):.1f}"


def _number(value: float, _place: int = 0) -> str:
    return f"{value:,.10g}"
