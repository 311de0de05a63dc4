"""Picture files of any kind, mode and size as squares of uint8 levels. Nothing is decoded before it was looked at."""

import os
import stat
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from cifar_towers.errors import error_text

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp")
MOST_PIXELS, MOST_BYTES = 25_000_000, 20_000_000
WEBP_PIXELS = 16_000_000  # decoding one takes sixteen bytes a pixel
OVERSIZE = 8  # times the side: what is larger is decoded or reduced to not less than this before it is resampled
AT_ONCE = 1_000_000  # pixels that are reduced at a time
ORIENTATION = 0x0112  # EXIF's tag
TURNS = {
    2: [Image.Transpose.FLIP_LEFT_RIGHT],
    3: [Image.Transpose.ROTATE_180],
    4: [Image.Transpose.FLIP_TOP_BOTTOM],
    5: [Image.Transpose.TRANSPOSE],
    6: [Image.Transpose.ROTATE_270],
    7: [Image.Transpose.TRANSVERSE],
    8: [Image.Transpose.ROTATE_90],
}


class PictureError(Exception):
    """A file that is no picture, or none that is read here; the message is one line without its name."""


def is_picture(path: Path) -> bool:
    """Whether a file's name says that it is of a kind which is read here."""
    return path.name.lower().endswith(SUFFIXES)


def left_out(count: int) -> str:
    """What is to be said of so many files of other kinds."""
    return f"{count} file{'s' * (count > 1)} of other kinds left out (pictures are {', '.join(SUFFIXES)})"


def read_all(paths: Sequence[Path], side: int, at_once: int | None = None) -> tuple[np.ndarray, dict[int, str]]:
    """[n, side, side, 3] uint8, each as `read` does it, and by their places what is wrong with those that cannot be
    read, which are black; so many `at_once`, each of which may take 235 MB, or one for each processor."""
    levels = np.zeros((len(paths), side, side, 3), np.uint8)

    def place(index: int) -> str:
        try:
            levels[index] = read(paths[index], side)
        except PictureError as error:
            return str(error)
        return ""

    with warnings.catch_warnings(), ThreadPoolExecutor(at_once or os.cpu_count()) as pool:
        # Pillow's warnings of large and odd pictures; ours are what is returned. Threads share one list of filters.
        warnings.simplefilter("ignore")
        wrong = {index: told for index, told in enumerate(pool.map(place, range(len(paths)))) if told}
    return levels, wrong


def read(path: Path, side: int) -> np.ndarray:
    """[side, side, 3] uint8: the picture's first frame, upright, over white where it is transparent, its central
    square resized to `side`.

    Raises:
      PictureError: not a regular file, too large, or damaged.
    """
    try:
        _refuse_what_is_no_file(os.stat(path))
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            _refuse_what_is_no_file(os.fstat(file.fileno()))
            return _decode(file, side)
    except PictureError:
        raise
    except OSError as error:
        raise PictureError(f"cannot be read: {error_text(error)}") from error


def fit(image: Image.Image, side: int) -> np.ndarray:
    """[side, side, 3] uint8: the central square, by area-weighted (antialiased, triangular) resampling. One that is
    many times as large is first reduced to means of whole blocks."""
    deep = image.mode.startswith("I")  # 16 bits, which Pillow would clip
    transparent = image.has_transparency_data
    square = _central_square(image, "I" if deep else "RGBA" if transparent else "RGB", OVERSIZE * side)
    if square.size != (side, side):
        square = square.resize((side, side), Image.Resampling.BILINEAR)
    if deep:
        levels = np.clip(np.asarray(square) // 257, 0, 255).astype(np.uint8)
        return np.repeat(levels[:, :, None], 3, 2)
    if transparent:
        square = Image.alpha_composite(Image.new("RGBA", square.size, "white"), square).convert("RGB")
    return np.array(square)


def _central_square(image: Image.Image, mode: str, enough: int) -> Image.Image:
    """The central square in a mode; a large one reduced by a whole factor to not less than `enough` pixels, some rows
    after others, so that no second copy of it is in memory."""
    (width, height), square = image.size, min(image.size)
    factor = max(1, square // enough)
    square -= square % factor
    left, top = (width - square) // 2, (height - square) // 2
    rows = square if factor == 1 else factor * max(1, AT_ONCE // (factor * square))
    found = Image.new(mode, (square // factor, square // factor))
    for row in range(0, square, rows):
        strip = image.crop((left, top + row, left + square, top + min(row + rows, square))).convert(mode)
        found.paste(strip.reduce(factor) if factor > 1 else strip, (0, row // factor))
    return found


def fit_all(images: np.ndarray, side: int) -> np.ndarray:
    """[n, H, W, 3] uint8 -> [n, side, side, 3], each as `fit` does it."""
    if images.shape[1:3] == (side, side):
        return images
    return np.stack([fit(Image.fromarray(image), side) for image in images])


def _refuse_what_is_no_file(status: os.stat_result) -> None:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    kind = kinds.get(stat.S_IFMT(status.st_mode))
    if kind:
        raise PictureError(f"is {kind}, not a picture")
    if status.st_size > MOST_BYTES:
        raise PictureError(f"has {status.st_size / 1e6:.1f} MB; {MOST_BYTES // 1_000_000} MB are the most")
    if not status.st_size:
        raise PictureError("is empty")


def _decode(file, side: int) -> np.ndarray:
    """Looks at the header, and if that is as it should be decodes the rest. Whatever a decoder makes of damage is one
    kind of error."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            _refuse_large(image)
            orientation = image.getexif().get(ORIENTATION)
            image.draft("RGB", (OVERSIZE * side, OVERSIZE * side))
            levels = fit(image, side)
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        raise PictureError("is not a JPEG, PNG, GIF, BMP or WebP picture, or its beginning is damaged") from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"declares far more than {MOST_PIXELS // 1_000_000} megapixels, the most") from error
    except Exception as error:
        raise PictureError(f"is damaged: {error_text(error, 100) or type(error).__name__}") from error
    for turn in TURNS.get(orientation, []):
        levels = np.array(Image.fromarray(levels).transpose(turn))
    return levels


def _refuse_large(image: Image.Image) -> None:
    width, height = image.size
    most = WEBP_PIXELS if image.format == "WEBP" else MOST_PIXELS
    if width * height > most:
        what = "in a WebP picture" if most < MOST_PIXELS else "in any"
        raise PictureError(f"declares {width} x {height} pixels; {most // 1_000_000} megapixels are the most {what}")
