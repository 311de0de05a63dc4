"""Pictures as arrays [height, width, 3] of uint8 for TensorBoard and for the HTML report.

Each picture has a white background, grows until nothing is cut off, and uses no state that threads
share, as pyplot would.
"""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image, ImageDraw, ImageFont

DPI = 120
MAX_MARKERS = 20  # points of a curve that are marked one by one
MARGIN_INCHES, MARGIN_PIXELS = 0.15, 18
BACKGROUND, NO_EXAMPLES = "white", "#d0d0d0"
MAX_CLASSES = 200  # of a confusion matrix: a cell takes 15 pixels at least
MAX_CLASSES_WITH_COUNTS, MAX_CLASSES_WITH_SHARES = (
    12,
    28,
)  # what is written into the cells of a confusion matrix
SHARE_POWER = 0.4  # of a share before it is colored: 1 % is visible beside 50 %
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


def confusion_matrix(counts: np.ndarray, class_names: Sequence[str], title: str) -> np.ndarray:
    """Draw counts [C, C], a row for each true class and a column for each predicted class.

    A cell has its percentage of the row and, with few classes, its count. Rows without examples are
    gray.
    """
    classes, correct = len(class_names), np.diag(counts)
    with np.errstate(invalid="ignore"):
        shares = counts / counts.sum(1, keepdims=True)
        recall, precision, accuracy = (
            correct / counts.sum(1),
            correct / counts.sum(0),
            correct.sum() / counts.sum(),
        )
    cell = min(1.2, max(0.125, 6.4 / classes))  # inches
    size = min(10, max(6, 36 * cell))
    figure, axes = _new_axes(
        classes * cell, classes * cell, f"{title}\naccuracy {_percent(accuracy)} %"
    )
    axes.set_facecolor(NO_EXAMPLES)
    image = axes.imshow(shares, "Blues", norm=PowerNorm(SHARE_POWER, 0, 1))
    columns, rows = (
        [f"{name}  {_percent(share)}" for name, share in zip(class_names, of_classes, strict=True)]
        for of_classes in (precision, recall)
    )
    axes.set_xticks(
        range(classes), columns, size=size, rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.set_yticks(range(classes), rows, size=size)
    axes.set(xlabel="predicted class, precision in %", ylabel="true class, recall in %")
    scale = figure.colorbar(image, axes.inset_axes((1.03, 0, 0.02, 1)), label="% of class")
    scale.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1], labels=["0", "1", "5", "20", "50", "100"])
    if classes <= MAX_CLASSES_WITH_SHARES:
        for row, column in np.argwhere(counts > 0):
            text = _percent(shares[row, column])
            text += f"\n{counts[row, column]:,.0f}" * (classes <= MAX_CLASSES_WITH_COUNTS)
            color = _text_color(np.array(image.to_rgba(shares[row, column])[:3]))
            style = {"color": color, "size": min(10, 26.6 * cell), "gid": "cell"}
            axes.text(column, row, text, style, ha="center", va="center", in_layout=False)
    return _rasterize(figure)


def line_plot(curves: Mapping[str, tuple], title: str) -> np.ndarray:
    """Draw up to eight curves {name: (epochs, y) or (epochs, y, low, high)}, the highest last value
    first.
    """
    figure, axes = _new_axes(6.4, 3.6, title)
    lines = {}
    for (name, (x, y, *band)), (color, dashes) in zip(curves.items(), LINE_STYLES, strict=False):
        (lines[name],) = axes.plot(
            x, y, color=color, linestyle=dashes, marker="o" if len(x) <= MAX_MARKERS else ""
        )
        if band:
            axes.fill_between(x, *band, color=color, alpha=0.15, linewidth=0)
    names = sorted(curves, key=lambda name: -np.nansum(curves[name][1][-1:]))
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
    return _rasterize(figure)


def image_grid(
    images: np.ndarray, captions: Sequence[str], title: str = "", columns: int = 8
) -> np.ndarray:
    """Draw images [n, height, width, 3] of uint8 in rows, enlarged without smoothing, each above
    its caption.

    Pillow draws them in milliseconds; Matplotlib would take a tenth of a second.
    """
    zoom = max(1, round(96 / max(images.shape[1:3])))
    height, width = (zoom * size for size in images.shape[1:3])
    columns = max(1, min(columns, len(images)))
    path = Path(
        matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"
    )  # knows more scripts than Pillow's
    font, title_font = (ImageFont.truetype(path, pixels) for pixels in (13, 20))
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1))).multiline_textbbox
    boxes = np.array(
        [(0, 0, width, 0), *(measure((0, 0), caption, font, spacing=2) for caption in captions)]
    )
    caption_width, caption_height = map(math.ceil, boxes.max(0)[2:])
    across, down = caption_width + 28, height + caption_height + 16
    title = (
        textwrap.fill(title, max(56, across * columns // 12)) if len(images) else f"{title}: none"
    )
    _, _, title_width, title_height = map(math.ceil, measure((0, 0), title, title_font))
    top = MARGIN_PIXELS + (title_height + 14 if title else 0)
    rows = math.ceil(len(images) / columns)
    size = max(across * columns, title_width) + 2 * MARGIN_PIXELS, top + down * rows + MARGIN_PIXELS
    sheet = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.multiline_text((MARGIN_PIXELS, MARGIN_PIXELS), title, "black", title_font)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(index, columns)
        x, y = MARGIN_PIXELS + across * column, top + down * row
        sheet.paste(
            Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST), (x, y)
        )
        draw.multiline_text((x, y + height + 2), caption, "black", font, spacing=2)
    return np.array(sheet)


def png(array: np.ndarray) -> bytes:
    """Encode an array [height, width, 3] of uint8 as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def _new_axes(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """Make a figure with axes of width by height inches; the picture grows by what stands around
    them.
    """
    figure = Figure((width, height), DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    lines = [textwrap.fill(line, max(56, int(10 * width))) for line in title.splitlines()]
    axes.set_title("\n".join(lines), loc="left", pad=10)
    return figure, axes


def _rasterize(figure: Figure) -> np.ndarray:
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name may hold dollars
    buffer = io.BytesIO()
    figure.savefig(
        buffer, dpi=DPI, facecolor=BACKGROUND, bbox_inches="tight", pad_inches=MARGIN_INCHES
    )
    return np.array(Image.open(buffer).convert("RGB"))


def _text_color(fill: np.ndarray) -> str:
    """Return black or white, whichever has more contrast to the color [3], by its relative
    luminance (WCAG 2).
    """
    return "black" if fill**2.2 @ (0.2126, 0.7152, 0.0722) > 0.179 else "white"


def _percent(share: float) -> str:
    """Return a share as percent in at most four characters, `-` for NaN."""
    if math.isnan(share):
        return "-"
    return (
        "<0.1" if 0 < share < 0.0005 else "100" if share == 1 else f"{min(99.9, 100 * share):.1f}"
    )
