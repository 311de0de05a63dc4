"""Image files and arrays as uint8 pictures of one size. Training and `predict` read pictures by the
same functions.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from cifar_towers.errors import DataError, error_text, listed
from cifar_towers.hardware import available_cores

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
# of the pictures in a folder, in any case
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp")
MAX_PIXELS = 25_000_000


def is_picture(path: Path) -> bool:
    """Return whether a name is that of a picture: it has one of `SUFFIXES` and is not hidden."""
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")


def read_all(paths: Sequence[Path], image_size: int) -> np.ndarray:
    """Read image files in one thread per core: -> [n, image_size, image_size, 3] uint8.

    Raises:
      DataError: some cannot be read; the message names the first ten, see `read`.
    """
    results = read_each(paths, image_size)
    errors = [str(result) for result in results if isinstance(result, DataError)]
    if errors:
        raise DataError(listed(errors, 10))
    return np.stack(results)


def read_each(paths: Sequence[Path], image_size: int) -> list[Any]:
    """Return the image of each file as `read` does, or the DataError that it raises."""

    def try_to_read(path: Path) -> np.ndarray | DataError:
        try:
            return read(path, image_size)
        except DataError as error:
            return error

    with ThreadPoolExecutor(available_cores()) as pool:
        return list(pool.map(try_to_read, paths))


def read(path: Path, image_size: int) -> np.ndarray:
    """Return the first frame of an image file as `to_levels` does.

    Raises:
      DataError: the file cannot be read as an image, or is too large; the message names it.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is not a regular file")
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has more than {MAX_PIXELS:,} pixels")
            return to_levels(image, image_size)
    except Exception as error:  # decoders raise any on damaged files
        raise DataError(f"{path} cannot be read as an image: {error_text(error)}") from error


def resize_all(images: np.ndarray, image_size: int) -> np.ndarray:
    """Resize each image as `to_levels` does: [n, H, W, C] -> [n, image_size, image_size, 3] uint8.
    One channel is grey; a fourth channel is opacity.
    """
    if images.dtype == np.uint8 and images.shape[1:] == (image_size, image_size, 3):
        return images
    if images.shape[-1] == 1:
        images = images.squeeze(-1)
    return np.stack([to_levels(Image.fromarray(image), image_size) for image in images])


def to_levels(image: Image.Image, image_size: int) -> np.ndarray:
    """Return the central square of an image, resized by antialiased bilinear resampling: [S, S, 3]
    uint8.

    The image is turned upright by its EXIF orientation, and put on white where it is transparent.

    Raises:
      ValueError: the image is grey with more than 8 bits a pixel, which Pillow would clip.
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError("it has more than 8 bits a pixel; save it with 8 bits")
    is_transparent = image.has_transparency_data
    image = ImageOps.exif_transpose(image)
    # `ImageOps.fit` would cut at half pixels, and let pixels outside the square in
    square = min(image.size)
    left = (image.width - square) // 2
    top = (image.height - square) // 2
    image = image.crop((left, top, left + square, top + square)).convert(
        "RGBA" if is_transparent else "RGB"
    )
    if square != image_size:
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    if is_transparent:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return np.array(image)
