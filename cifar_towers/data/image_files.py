"""Image files of any format, mode and size as uint8 arrays. Headers are checked before pixels are decoded."""

import os
import stat
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from cifar_towers.errors import error_text
from cifar_towers.hardware import available_cores

FORMATS = {"JPEG": (".jpg", ".jpeg", ".jfif"), "PNG": (".png",), "GIF": (".gif",), "BMP": (".bmp",), "WebP": (".webp",)}
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)
MAX_PIXELS, MAX_BYTES = 25_000_000, 20_000_000
MAX_WEBP_PIXELS = 16_000_000  # decoding one takes sixteen bytes a pixel
FILE_TYPES = {"d": "a directory", "p": "a pipe", "c": "a device", "b": "a device", "s": "a socket"}  # as `ls -l`
UPRIGHT = {  # EXIF orientation -> what turns the stored image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PictureError(Exception):
    """A file that cannot be read as an image; the message is one line without the file's name."""


def read_all(paths: Sequence[Path], image_size: int) -> tuple[np.ndarray, dict[int, str]]:
    """Read image files in one thread per core. Each thread may use 300 MB.

    Returns:
      [n, image_size, image_size, 3] uint8 as from `read`, black where a file cannot be read; and {index: error}.
    """
    levels = np.zeros((len(paths), image_size, image_size, 3), np.uint8)

    def read_into(index: int) -> str:
        try:
            levels[index] = read(paths[index], image_size)
        except PictureError as error:
            return str(error)
        return ""

    with warnings.catch_warnings(), ThreadPoolExecutor(available_cores()) as pool:
        warnings.simplefilter("ignore")  # Pillow's, of large or damaged images; here, as threads share the filters
        errors = {index: error for index, error in enumerate(pool.map(read_into, range(len(paths)))) if error}
    return levels, errors


def read(path: Path, image_size: int = 0) -> np.ndarray:
    """Return the first frame of an image file as `to_levels` does.

    Raises:
      PictureError: the file is not a regular one, too large, or damaged.
    """
    try:
        _check_file(os.stat(path))  # before opening: a device may act on it
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            _check_file(os.fstat(file.fileno()))  # what was opened, in case the path has another file now
            return _decode(file, image_size)
    except OSError as error:
        raise PictureError(f"cannot be read: {error_text(error)}") from error


def resize_all(images: np.ndarray, image_size: int) -> np.ndarray:
    """Resize each image as `to_levels` does: [n, H, W, 3] uint8 -> [n, image_size, image_size, 3]."""
    if images.shape[1:3] == (image_size, image_size):
        return images
    return np.stack([to_levels(Image.fromarray(image), image_size) for image in images])


def to_levels(image: Image.Image, image_size: int = 0) -> np.ndarray:
    """Return an image as [H, W, 3] uint8, upright by its EXIF orientation, and on white where it is transparent.

    Args:
      image_size: pixels that the central square is resized to, by antialiased bilinear resampling; 0: the whole image
        in its own size.
    """
    transparent = image.has_transparency_data
    if transparent and any(tile.args == "RGB;16B" for tile in getattr(image, "tile", ())):
        # Pillow reads the upper 8 bits of pixels, and all 16 of the transparent color.
        image.info["transparency"] = tuple(value >> 8 for value in image.info["transparency"])
    turn = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))  # before the pixels are read
    if transparent and image.mode.startswith("I"):
        values = np.asarray(image)
        opaque = np.where(values == image.info["transparency"], 0, 255)
        image = Image.fromarray(np.stack([values // 257, opaque], -1).astype(np.uint8))
    sixteen_bits = image.mode.startswith("I")  # Pillow clips them when it converts to 8 bits
    mode = "I" if sixteen_bits else "RGBA" if transparent else "RGB"
    if turn is not None:
        image = image.transpose(turn)
    if image_size:  # `ImageOps.fit` would cut at half pixels, and let pixels outside the square in
        square = min(image.size)
        left, top = (image.width - square) // 2, (image.height - square) // 2
        image = image.crop((left, top, left + square, top + square))
    if image.mode != mode:
        image = image.convert(mode)
    if image_size and image.width != image_size:
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    if sixteen_bits:
        levels = np.clip(np.asarray(image) // 257, 0, 255).astype(np.uint8)
        return np.repeat(levels[:, :, None], 3, 2)
    if transparent:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return np.array(image)


def is_picture(path: Path) -> bool:
    """Return whether a file's name has the suffix of a supported image format."""
    return path.name.lower().endswith(SUFFIXES)


def describe_ignored(count: int) -> str:
    """Return the message about `count` files that are not images."""
    return f"{count} file{'s' * (count > 1)} of other types ignored (images are {', '.join(SUFFIXES)})"


def _check_file(status: os.stat_result) -> None:
    file_type = FILE_TYPES.get(stat.filemode(status.st_mode)[0])
    if file_type:
        raise PictureError(f"is {file_type}, not an image file")
    if status.st_size > MAX_BYTES:
        raise PictureError(f"has {status.st_size / 1e6:.1f} MB; the limit is {MAX_BYTES // 1_000_000} MB")
    if not status.st_size:
        raise PictureError("is empty")


def _decode(file: BinaryIO, image_size: int) -> np.ndarray:
    """Check the size in the header, then decode. Decoders raise errors of all kinds on damaged files."""
    try:
        with Image.open(file, formats=[name.upper() for name in FORMATS]) as image:
            limit = MAX_WEBP_PIXELS if image.format == "WEBP" else MAX_PIXELS
            if image.width * image.height > limit:
                kind = " of a WebP image" if limit < MAX_PIXELS else ""
                size = f"{image.width} x {image.height} pixels"
                raise PictureError(f"declares {size}; the limit{kind} is {limit // 1_000_000} megapixels")
            return to_levels(image, image_size)
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        *others, last = FORMATS
        raise PictureError(f"is not a {', '.join(others)} or {last} image, or its header is damaged") from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"declares far more than the limit of {MAX_PIXELS // 1_000_000} megapixels") from error
    except Exception as error:
        raise PictureError(f"is damaged: {error_text(error, 100) or type(error).__name__}") from error
