"""Image files of all formats, modes and sizes, and files that are no images."""

import io

import numpy as np
import pytest
from PIL import ExifTags, Image

from cifar_towers.data import image_files
from cifar_towers.errors import DataError


def photo(width, height, mode="RGB"):
    """Return a smooth image, which JPEG and resizing change little."""
    y, x = np.mgrid[:height, :width] / max(width, height)
    levels = np.stack([255 * x, 255 * y, 128 + 100 * np.sin(5 * (x + y))], -1)
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8)).convert(mode)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def resized(image):
    return np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))


@pytest.fixture
def read(tmp_path):
    """Return read(content): the image in a file of this content."""

    def read(content):
        path = tmp_path / "picture"
        path.write_bytes(content)
        return image_files.read(path, 32)

    return read


KINDS = [
    ("JPEG", "RGB"),
    ("JPEG", "L"),
    ("JPEG", "CMYK"),
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "L"),
    ("PNG", "LA"),
    ("PNG", "P"),
    ("PNG", "1"),
    ("GIF", "P"),
    ("BMP", "RGB"),
    ("WEBP", "RGB"),
    ("WEBP", "RGBA"),
]


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_every_format_and_mode(read, kind, mode):
    image = photo(96, 96, mode)
    levels = read(encoded(image, kind)).astype(int)
    assert levels.shape == (32, 32, 3)
    expected = resized(image.convert("RGB")).astype(int)
    assert abs(levels - expected).mean() < (4 if kind in ("JPEG", "WEBP", "GIF") else 0.5)


@pytest.mark.parametrize(
    "size", [(100, 60), (60, 100), (33, 32), (1, 7), (500, 20), (32, 32)]
)  # odd margins too
def test_central_square_is_resized_in_files_and_arrays(read, size):
    image = photo(*size)
    square = min(size)
    left = (size[0] - square) // 2
    top = (size[1] - square) // 2
    expected = resized(image.crop((left, top, left + square, top + square)))

    np.testing.assert_array_equal(read(encoded(image, "PNG")), expected)
    np.testing.assert_array_equal(
        image_files.resize_all(np.asarray(image)[None], 32), expected[None]
    )
    assert size != (32, 32) or np.array_equal(expected, image)


def test_transparent_pixels_are_white(read):
    palette = Image.new("P", (64, 64))
    palette.putpalette([200, 0, 0, 0, 200, 0])
    assert (read(encoded(palette, "PNG")) == [200, 0, 0]).all()
    assert (read(encoded(palette, "PNG", transparency=0)) == 255).all()
    half = Image.new("RGBA", (64, 64), (200, 0, 0, 128))
    np.testing.assert_allclose(read(encoded(half, "PNG"))[0, 0], [227, 127, 127], atol=1)


def test_exif_orientation_is_applied(read):
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 49, 3), np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    stored = encoded(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    np.testing.assert_array_equal(read(stored), read(encoded(upright, "PNG")))


SIXTEEN_BITS = Image.fromarray(np.linspace(0, 65535, 32 * 32).astype(np.uint16).reshape(32, 32))


@pytest.mark.parametrize(
    ("content", "mention"),
    [
        (b"<svg></svg>", ""),
        (encoded(photo(40, 40), "TIFF"), ""),  # a decoder that is not needed is an open door
        (encoded(photo(400, 400), "PNG")[:4000], ""),
        (encoded(photo(40, 40), "JPEG")[:400], ""),
        (encoded(Image.new("1", (5001, 5000)), "PNG"), "25,000,000"),
        (encoded(SIXTEEN_BITS, "PNG"), "8 bits"),
    ],
)
def test_files_that_are_no_such_images_are_refused(read, content, mention):
    with pytest.raises(DataError, match=f"/picture .*{mention}"):
        read(content)


def test_files_are_read_in_threads_in_their_order(tmp_path):
    paths = [tmp_path / f"{level}.png" for level in range(40)]
    for level, path in enumerate(paths):
        Image.new("L", (20, 20), level).save(path)
    assert image_files.read_all(paths, 10)[:, 5, 5, 0].tolist() == [*range(40)]
    paths[7].write_bytes(b"no picture")
    with pytest.raises(DataError, match="/7.png"):
        image_files.read_all(paths, 10)
