"""Pictures as PNG files, for TensorBoard and for the HTML report.

Each picture has a white background and grows until nothing is cut off.
"""

import contextlib
import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

DPI = 120
MARGIN_INCHES = 0.15
MAX_MARKERS = 20  # points of a curve that are marked one by one
MAX_CLASSES = 30  # of a confusion matrix
CELL_INCHES = 0.5  # of a confusion matrix
NO_EXAMPLES = "#d0d0d0"
SHARE_POWER = 0.4  # of a share before it is colored: 1 % is visible beside 50 %
DARK_SHARE = 0.4  # from here on the color is so dark that text on it is white
IMAGE_PIXELS = 96  # of an enlarged image in a grid
CAPTION_POINTS = 8
CHARACTER_INCHES = 0.61 * CAPTION_POINTS / 72  # of a monospaced font
LINE_INCHES = 1.3 * CAPTION_POINTS / 72
LINE_STYLES = (  # distinct in color and in dashes, for color-blind readers and for print
    ("#0072b2", "-"),
    ("#d55e00", (0, (6, 2))),
    ("#009e73", (0, (1, 1.2))),
    ("#000000", (0, (6, 2, 1, 2))),
    ("#cc79a7", (0, (3, 1.5))),
    ("#4b0092", (0, (6, 2, 1, 2, 1, 2))),
    ("#882255", (0, (12, 3))),
    ("#5b3a1e", (0, (3, 2, 1, 2))),
)


@contextlib.contextmanager
def _default_style() -> Iterator[None]:
    """Draw by Matplotlib's default settings, whatever the caller's program has set. A name may hold
    dollars, which are no mathematics.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False
        yield


@_default_style()
def confusion_matrix(counts: np.ndarray, class_names: Sequence[str], title: str) -> bytes:
    """Draw counts [C, C], a row for each true class and a column for each predicted class.

    A cell has its percentage of the row and its count. Rows without examples are gray.
    """
    classes = range(len(class_names))
    correct = np.diag(counts)
    with np.errstate(invalid="ignore"):
        shares = counts / counts.sum(1, keepdims=True)
        recall = correct / counts.sum(1)
        precision = correct / counts.sum(0)
        accuracy = correct.sum() / counts.sum()

    side = CELL_INCHES * len(class_names)
    figure, axes = _new_axes(side, side, f"{title}\naccuracy {_percent(accuracy)} %")
    axes.set_facecolor(NO_EXAMPLES)
    axes.imshow(shares, "Blues", norm=PowerNorm(SHARE_POWER, 0, 1))
    columns = [f"{class_names[c]}  {_percent(precision[c])}" for c in classes]
    rows = [f"{class_names[c]}  {_percent(recall[c])}" for c in classes]
    axes.set_xticks(classes, columns, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(classes, rows)
    axes.set(xlabel="predicted class, precision in %", ylabel="true class, recall in %")

    for row, column in np.argwhere(counts > 0):
        share = shares[row, column]
        text = f"{_percent(share)}\n{counts[row, column]:,.0f}"
        color = "white" if share > DARK_SHARE else "black"
        axes.text(column, row, text, color=color, size=7.5, ha="center", va="center")
    return _png(figure)


@_default_style()
def line_plot(curves: Mapping[str, tuple], title: str) -> bytes:
    """Draw up to eight curves {name: (epochs, y) or (epochs, y, low, high)}, the highest last value
    first.
    """
    figure, axes = _new_axes(6.4, 3.6, title)
    lines = {}
    for (name, curve), (color, dashes) in zip(curves.items(), LINE_STYLES, strict=False):
        x, y, *band = curve
        (lines[name],) = axes.plot(
            x, y, color=color, linestyle=dashes, marker="o" if len(x) <= MAX_MARKERS else ""
        )
        if band:
            axes.fill_between(x, *band, color=color, alpha=0.15, linewidth=0)

    def last_value(name: str) -> float:
        _, y, *_ = curves[name]
        return float(np.nan_to_num(y[-1]))

    names = sorted(curves, key=last_value, reverse=True)
    axes.legend(
        [lines[name] for name in names],
        names,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        handlelength=3.6,
    )
    axes.grid(alpha=0.4)
    axes.set_xlabel("epoch")
    axes.ticklabel_format(useOffset=False, style="plain")
    return _png(figure)


@_default_style()
def image_grid(
    images: np.ndarray, captions: Sequence[str], title: str = "", columns: int = 8
) -> bytes:
    """Draw images [n, size, size, 3] of uint8 in rows, enlarged without smoothing, each above its
    caption.
    """
    size = images.shape[1]
    side = size * max(1, round(IMAGE_PIXELS / size)) / DPI  # inches
    lines = "\n".join(captions).splitlines()
    longest = max(map(len, lines), default=0)
    highest = max((caption.count("\n") + 1 for caption in captions), default=0)
    width = max(side, longest * CHARACTER_INCHES) + MARGIN_INCHES
    height = side + highest * LINE_INCHES + MARGIN_INCHES

    columns = max(1, min(columns, len(images)))
    rows = max(1, math.ceil(len(images) / columns))
    figure, axes = _new_axes(columns * width, rows * height, title if lines else f"{title}: none")
    axes.set_axis_off()
    axes.set(xlim=(0, columns * width), ylim=(rows * height, 0))
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, columns)
        left = column * width
        top = row * height
        bottom = top + side
        axes.imshow(image, extent=(left, left + side, bottom, top), interpolation="nearest")
        axes.text(left, bottom + 0.03, caption, size=CAPTION_POINTS, family="monospace", va="top")
    return _png(figure)


def _new_axes(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """Make a figure with axes of width by height inches; the picture grows by what stands around
    them.
    """
    figure = Figure((width, height), DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    lines = [textwrap.fill(line, max(56, int(10 * width))) for line in title.splitlines()]
    axes.set_title("\n".join(lines), loc="left", pad=10)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", pad_inches=MARGIN_INCHES)
    return buffer.getvalue()


def _percent(share: float) -> str:
    """Return a share as percent in at most four characters, `-` for NaN."""
    if math.isnan(share):
        return "-"
    if share == 1:
        return "100"
    if 0 < share < 0.0005:
        return "<0.1"
    return f"{min(99.9, 100 * share):.1f}"
