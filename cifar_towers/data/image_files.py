"""Image files of any format, mode and size as square uint8 arrays. Headers are checked before pixels are decoded."""

import os
import stat
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from cifar_towers.errors import error_text

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp")
MAX_PIXELS, MAX_BYTES = 25_000_000, 20_000_000
MAX_WEBP_PIXELS = 16_000_000  # decoding one takes sixteen bytes a pixel
MIRRORED_X, MIRRORED_Y = (2, 3, 7, 8), (3, 4, 6, 7)  # EXIF orientations whose stored axis runs against the upright one
FILE_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class PictureError(Exception):
    """A file that cannot be read as an image; the message is one line without the file's name."""


def read_all(paths: Sequence[Path], side: int, num_threads: int | None = None) -> tuple[np.ndarray, dict[int, str]]:
    """Read files in threads: ([n, side, side, 3] uint8 as from `read`, {index: error} of those that failed).

    Images that cannot be read are black. Each thread may take 300 MB; by default there is one for each processor.
    """
    levels = np.zeros((len(paths), side, side, 3), np.uint8)

    def read_into(index: int) -> str:
        try:
            levels[index] = read(paths[index], side)
        except PictureError as error:
            return str(error)
        return ""

    with warnings.catch_warnings(), ThreadPoolExecutor(num_threads or os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow's, of large or damaged images; here, as threads share the filters
        errors = {index: error for index, error in enumerate(pool.map(read_into, range(len(paths)))) if error}
    return levels, errors


def read(path: Path, side: int) -> np.ndarray:
    """[side, side, 3] uint8: the first frame, upright, over white where transparent, its central square resized.

    Raises:
      PictureError: not a regular file, too large, or damaged.
    """
    try:
        _check_file(os.stat(path))
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            _check_file(os.fstat(file.fileno()))
            return _decode(file, side)
    except PictureError:
        raise
    except OSError as error:
        raise PictureError(f"cannot be read: {error_text(error)}") from error


def resize_all(images: np.ndarray, side: int) -> np.ndarray:
    """[n, H, W, 3] uint8 -> [n, side, side, 3], each as by `resize_square`."""
    if images.shape[1:3] == (side, side):
        return images
    return np.stack([resize_square(Image.fromarray(image), side) for image in images])


def resize_square(image: Image.Image, side: int) -> np.ndarray:
    """[side, side, 3] uint8: the central square, upright by its EXIF orientation, resized by antialiased bilinear
    resampling. `inference.resizing` does the same in exported models, to the bit."""
    sixteen_bits = image.mode.startswith("I")  # Pillow clips them when it converts to 8 bits
    transparent = image.has_transparency_data
    square = _central_square(image, "I" if sixteen_bits else "RGBA" if transparent else "RGB")
    if square.size != (side, side):
        square = square.resize((side, side), Image.Resampling.BILINEAR)
    if sixteen_bits:
        levels = np.clip(np.asarray(square) // 257, 0, 255).astype(np.uint8)
        return np.repeat(levels[:, :, None], 3, 2)
    if transparent:
        square = Image.alpha_composite(Image.new("RGBA", square.size, "white"), square).convert("RGB")
    return np.array(square)


def is_picture(path: Path) -> bool:
    """Whether a file's name has the suffix of a supported image format."""
    return path.name.lower().endswith(SUFFIXES)


def describe_ignored(count: int) -> str:
    """Message about `count` files that are not images."""
    return f"{count} file{'s' * (count > 1)} of other types ignored (images are {', '.join(SUFFIXES)})"


def _check_file(status: os.stat_result) -> None:
    file_type = FILE_TYPES.get(stat.S_IFMT(status.st_mode))
    if file_type:
        raise PictureError(f"is {file_type}, not an image file")
    if status.st_size > MAX_BYTES:
        raise PictureError(f"has {status.st_size / 1e6:.1f} MB; the limit is {MAX_BYTES // 1_000_000} MB")
    if not status.st_size:
        raise PictureError("is empty")


def _decode(file, side: int) -> np.ndarray:
    """Check the size in the header, then decode. Decoders raise errors of all kinds on damaged files."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            limit = MAX_WEBP_PIXELS if image.format == "WEBP" else MAX_PIXELS
            if image.width * image.height > limit:
                kind = " of a WebP image" if limit < MAX_PIXELS else ""
                size = f"{image.width} x {image.height} pixels"
                raise PictureError(f"declares {size}; the limit{kind} is {limit // 1_000_000} megapixels")
            image.getexif()  # before the pixels: some formats cannot read it afterwards
            return resize_square(image, side)
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        raise PictureError("is not a JPEG, PNG, GIF, BMP or WebP image, or its header is damaged") from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"declares far more than the limit of {MAX_PIXELS // 1_000_000} megapixels") from error
    except Exception as error:
        raise PictureError(f"is damaged: {error_text(error, 100) or type(error).__name__}") from error


def _central_square(image: Image.Image, mode: str) -> Image.Image:
    """The central square in a mode, upright. Of two squares that are equally central, the upright top or left one."""
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    (width, height), side = image.size, min(image.size)
    left = (width - side + (orientation in MIRRORED_X)) // 2
    top = (height - side + (orientation in MIRRORED_Y)) // 2
    square = image.crop((left, top, left + side, top + side))
    if square.mode != mode:
        square = square.convert(mode)
    square.info.clear()  # other EXIF tags, which `exif_transpose` writes anew, may be damaged
    square.getexif()[ExifTags.Base.Orientation] = orientation
    ImageOps.exif_transpose(square, in_place=True)
    return square
