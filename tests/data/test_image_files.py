"""Image files of all formats, modes and sizes, and files that are no images."""

import io
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from cifar_towers.data import image_files
from cifar_towers.data.image_files import PictureError


def photo(width, height, mode="RGB"):
    """Return a smooth image, which JPEG and resizing change little."""
    y, x = np.mgrid[:height, :width] / max(width, height)
    levels = np.stack([255 * x, 255 * y, 128 + 100 * np.sin(5 * (x + y))], -1)
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8)).convert(mode)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width, height, depth, color, pixels, **chunks):
    """Return a PNG of this header and these rows of bytes, with more chunks between them."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    others = b"".join(chunk(name.encode(), content) for name, content in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + header + others + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def png_header(width, height):
    """Return a PNG that declares a size, with the pixels of a much smaller image."""
    return png(width, height, 8, 2, bytes(30_000_000))


def resized(image):
    return np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))


@pytest.fixture
def read(tmp_path):
    """Return read(content, image_size): the image in a file of this content."""

    def read(content, image_size=32):
        path = tmp_path / "picture"
        path.write_bytes(content)
        return image_files.read(path, image_size)

    return read


KINDS = [
    ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "LA"),
    ("PNG", "P"), ("PNG", "1"), ("GIF", "P"), ("GIF", "L"), ("BMP", "RGB"), ("BMP", "L"), ("WEBP", "RGB"),
    ("WEBP", "RGBA"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_every_format_and_mode(read, kind, mode):
    image = photo(96, 96, mode)
    levels = read(encoded(image, kind)).astype(int)
    assert levels.shape == (32, 32, 3)
    expected = resized(image.convert("RGB")).astype(int)
    assert abs(levels - expected).mean() < (4 if kind in ("JPEG", "WEBP", "GIF") else 0.5)


@pytest.mark.parametrize(
    "size", [(100, 60), (60, 100), (33, 32), (1, 7), (500, 20), (32, 32), (1201, 900)]
)  # odd margins too
def test_central_square_is_resized(read, size):
    image = photo(*size)
    square = min(size)
    left, top = (size[0] - square) // 2, (size[1] - square) // 2
    expected = resized(image.crop((left, top, left + square, top + square)))
    np.testing.assert_array_equal(read(encoded(image, "PNG")), expected)
    jpeg = encoded(image, "JPEG")  # decoded at full size, as the images that an exported model is given
    np.testing.assert_array_equal(read(jpeg), image_files.to_levels(Image.open(io.BytesIO(jpeg)), 32))
    assert size != (32, 32) or np.array_equal(expected, image)


def test_image_is_read_in_its_own_size_by_default(read):
    np.testing.assert_array_equal(read(encoded(photo(40, 30), "PNG"), 0), photo(40, 30))


def test_sixteen_bits_are_scaled_not_clipped(read):
    levels = np.linspace(0, 65535, 32 * 32).astype(np.uint16).reshape(32, 32)
    scaled = read(encoded(Image.fromarray(levels), "PNG"))
    np.testing.assert_allclose(scaled[..., 0], levels / 257, atol=1)


def test_transparent_pixels_are_white(read):
    clear = Image.new("RGBA", (64, 64), (200, 0, 0, 0))
    assert (read(encoded(clear, "PNG")) == 255).all()
    palette = Image.new("P", (64, 64))
    palette.putpalette([200, 0, 0, 0, 200, 0])
    assert (read(encoded(palette, "PNG")) == [200, 0, 0]).all()
    assert (read(encoded(palette, "PNG", transparency=0)) == 255).all()


GRAY, RGB, PALETTE, GRAY_ALPHA = 0, 2, 3, 4  # color types of PNG
WHITE = (255, 255, 255)


@pytest.mark.parametrize(
    ("depth", "color", "row", "chunks", "expected"),
    [
        (16, GRAY, (0, 25700, 25701, 65535), {"tRNS": (25700,)}, [(0,) * 3, WHITE, (100,) * 3, WHITE]),
        (16, GRAY, (0, 25700, 51400), {"tRNS": (0,)}, [WHITE, (100,) * 3, (200,) * 3]),
        (16, RGB, (30000, 200, 65535, 512, 0, 0), {"tRNS": (30000, 200, 65535)}, [WHITE, (2, 0, 0)]),
        (16, RGB, (5, 6, 7, 300, 2560, 0), {"tRNS": (5, 6, 7)}, [WHITE, (1, 10, 0)]),
        (16, GRAY_ALPHA, (25700, 0, 25700, 65535), {}, [WHITE, (100,) * 3]),
        (8, GRAY, (0, 100, 200), {"tRNS": (100,)}, [(0,) * 3, WHITE, (200,) * 3]),
        (8, RGB, (1, 2, 3, 4, 5, 6), {"tRNS": (1, 2, 3)}, [WHITE, (4, 5, 6)]),
        (8, PALETTE, (1, 0), {"PLTE": bytes([200, 0, 0, 0, 9, 0]), "tRNS": b"\0"}, [(0, 9, 0), WHITE]),
    ],
)
def test_transparent_color_of_a_png_is_white(read, depth, color, row, chunks, expected):
    pixels = b"\0" + np.array(row, f">u{depth // 8}").tobytes()
    chunks = {n: c if isinstance(c, bytes) else np.array(c, ">u2").tobytes() for n, c in chunks.items()}
    content = png(len(expected), 1, depth, color, pixels, **chunks)
    np.testing.assert_array_equal(read(content, 0), [expected])


def test_transparent_sixteen_bits_are_turned_cropped_and_resized_as_other_images(read):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    rows = b"".join(b"\0" + struct.pack(">3H", 25700, *row) for row in [(0, 25700), (51400, 25700)])
    content = png(3, 2, 16, GRAY, rows, tRNS=struct.pack(">H", 0), eXIf=exif.tobytes().removeprefix(b"Exif\0\0"))
    np.testing.assert_array_equal(read(content, 0)[..., 0], [[100, 100], [200, 255], [100, 100]])
    mean = (100 + 100 + 200 + 255) / 4  # of the central square
    np.testing.assert_allclose(read(content, 1), [[[mean] * 3]], atol=2)  # Pillow rounds in every pass


STORED = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90", 7: "TRANSVERSE",
    8: "ROTATE_270",
}  # fmt: skip


@pytest.mark.parametrize("size", [(64, 64), (49, 70), (91, 40)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(read, orientation, size):
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
    stored = upright.transpose(Image.Transpose[STORED[orientation]]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    np.testing.assert_array_equal(read(encoded(stored, "PNG", exif=exif)), read(encoded(upright, "PNG")))


def test_first_frame_of_an_animation_is_read(read):
    frames = [Image.new("RGB", (40, 40), color) for color in ("red", "green", "blue")]
    levels = read(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert (levels == [255, 0, 0]).all()


def test_images_of_too_many_pixels_are_refused_by_their_headers(read):
    with pytest.raises(PictureError, match=" 25 megapixels"):
        read(png_header(20_000, 20_000))
    with pytest.raises(PictureError, match="6000 x 5000 pixels.* 25 megapixels"):
        read(png_header(6000, 5000))
    with pytest.raises(PictureError, match="4200 x 4000 pixels.* WebP .* 16 megapixels"):
        read(encoded(Image.new("RGB", (4200, 4000)), "WEBP"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not a picture at all", "JPEG, PNG, GIF, BMP or WebP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "JPEG, PNG, GIF, BMP or WebP"),
        (encoded(photo(200, 200), "JPEG")[:1500], "is damaged"),
        (encoded(photo(200, 200), "PNG")[:800], "is damaged"),
        (bytes(image_files.MAX_BYTES + 1), "20.0 MB.* 20 MB"),
    ],
)
def test_damaged_files_are_errors(read, content, message):
    with pytest.raises(PictureError, match=message):
        read(content)


def test_paths_that_are_no_regular_files_are_errors_at_once(tmp_path):
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "a directory").mkdir()
    (tmp_path / "Too many levels").symlink_to("Too many levels")
    for name in ("a pipe", "a directory", "Too many levels", "No such file"):
        with pytest.raises(PictureError, match=name):
            image_files.read(tmp_path / name, 32)
    with pytest.raises(PictureError, match="is a device"):
        image_files.read(Path("/dev/zero"), 32)


def test_arrays_are_resized_as_files_are():
    levels = np.random.default_rng(0).integers(0, 256, (3, 48, 48, 3), np.uint8)
    assert image_files.resize_all(levels, 48) is levels
    expected = np.stack([resized(Image.fromarray(one)) for one in levels])
    np.testing.assert_array_equal(image_files.resize_all(levels, 32), expected)


def test_files_are_read_in_threads_and_errors_returned_by_index(tmp_path, recwarn):
    filters = [*warnings.filters]
    paths = [tmp_path / f"{index}.png" for index in range(40)]
    for index, path in enumerate(paths):
        image = encoded(Image.new("RGB", (8, 8), (5 * index, 0, 0)), "PNG", exif=b"II*\0\x08\0\0\0\x05\0")  # truncated
        path.write_bytes(image if index % 7 else b"no picture")
    levels, errors = image_files.read_all(paths, 4)
    assert [*errors] == [0, 7, 14, 21, 28, 35] and all("is not a JPEG" in error for error in errors.values())
    assert levels[:, 0, 0, 0].tolist() == [5 * index if index % 7 else 0 for index in range(40)]
    assert warnings.filters == filters and not recwarn


BASES = [encoded(photo(24, 20, mode), kind) for kind, mode in KINDS] + [
    encoded(photo(40, 40), "JPEG", progressive=True),
    encoded(photo(16, 16), "GIF", save_all=True, append_images=[photo(16, 16, "L")]),
    encoded(photo(16, 16), "WEBP", lossless=True),
]
edits = st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=0, max_size=4), st.integers(0, 4)), max_size=6)


def mutated(base, cut, changes):
    """Return `base` with bytes removed and inserted at some positions, and its end cut off."""
    for place, inserted, removed in changes:
        place %= len(base)
        base = base[:place] + inserted + base[place + removed :]
    return base[: len(base) - cut] if cut < len(base) else base


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_files_raise_only_picture_errors(tmp_path, examples):
    @settings(max_examples=examples, deadline=2000, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(BASES), st.integers(0, 40), edits)
    def check(base, cut, changes):
        (tmp_path / "mutated").write_bytes(mutated(base, cut, changes))
        try:
            levels = image_files.read(tmp_path / "mutated", 32)
        except PictureError as error:
            assert "\n" not in str(error)
        else:
            assert levels.shape == (32, 32, 3) and levels.dtype == np.uint8

    check()
