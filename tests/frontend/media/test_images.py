"""Formats, bounds and modes of images: whatever its mode, an image becomes the RGB image that looks the same on white."""

import contextlib
import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from quire.frontend.media.images import ImageError, decode, from_array, scaled_down


def _file(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _noise(height: int = 13, width: int = 17, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def _values(data: bytes) -> np.ndarray:
    image = decode(data)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP"])
def test_a_plain_image_stays_as_it_is(form):
    pixels = _noise()
    options = {"lossless": True} if form == "WEBP" else {}
    assert np.array_equal(_values(_file(Image.fromarray(pixels), form, **options)), pixels)


def test_jpeg_and_cmyk_look_as_pillow_shows_them():
    image = Image.fromarray(_noise())
    data = _file(image, "JPEG")
    assert np.array_equal(_values(data), np.asarray(Image.open(io.BytesIO(data))))
    data = _file(image.convert("CMYK"), "JPEG")
    assert np.array_equal(_values(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_alpha_lies_on_white():
    pixels = _noise(channels=4)
    pixels[0, 0, 3], pixels[0, 1, 3] = 0, 255
    shown = _values(_file(Image.fromarray(pixels)))
    assert shown[0, 0].tolist() == [255, 255, 255]
    assert shown[0, 1].tolist() == pixels[0, 1, :3].tolist()
    gray = Image.fromarray(pixels[:, :, :2].copy(), "LA")
    assert _values(_file(gray)).shape == (13, 17, 3)


def test_a_transparent_color_of_a_palette_is_white():
    image = Image.fromarray(_noise()).quantize(16)
    hidden = image.getpixel((0, 0))
    shown = _values(_file(image, transparency=hidden))
    where = np.asarray(image) == hidden
    assert (shown[where] == 255).all()
    assert np.array_equal(shown[~where], np.asarray(image.convert("RGB"))[~where])


def test_sixteen_bits_a_channel_are_scaled():
    gray = np.arange(256, dtype=np.uint16).reshape(16, 16)
    shown = _values(_file(Image.fromarray(gray * 257)))
    assert np.array_equal(shown, np.repeat(gray.astype(np.uint8)[:, :, None], 3, 2))


def _png(pixels: np.ndarray, color: int, depth: int, transparent: np.ndarray | None = None) -> bytes:
    """A PNG of values [height, width, channels]. color: the format's number of the mode. transparent: a color."""
    rows = b"".join(b"\0" + row.astype(f">u{depth // 8}").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, color, 0, 0, 0)
    hidden = [] if transparent is None else [(b"tRNS", transparent.astype(">u2").tobytes())]
    chunks = [(b"IHDR", head), *hidden, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = (struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(("color", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_sixteen_bits_look_as_eight(color, channels, hides):
    values = _noise(channels=channels).astype(np.uint16)
    colors = (values[0, 0], values[0, 0] * 257) if hides and color in (0, 2) else (None, None)
    eight, sixteen = _values(_png(values, color, 8, colors[0])), _values(_png(values * 257, color, 16, colors[1]))
    assert np.array_equal(eight, sixteen)
    if colors[0] is not None:
        assert sixteen[0, 0].tolist() == [255] * 3 and (sixteen != 255).any()


def test_a_palette_with_degrees_of_transparency_lies_on_white():
    image = Image.fromarray(_noise()).quantize(4)
    shown = _values(_file(image, transparency=bytes([0, 128, 255, 255]))).astype(int)
    plain, indices = np.asarray(image.convert("RGB")).astype(int), np.asarray(image)
    assert (shown[indices == 0] == 255).all() and np.array_equal(shown[indices >= 2], plain[indices >= 2])
    assert np.abs(shown[indices == 1] - (plain[indices == 1] + 255) / 2).max() <= 1.5


def test_black_and_white_with_a_transparent_color():
    image = Image.fromarray(_noise()).convert("1")
    shown = _values(_file(image, transparency=0))
    assert (shown == 255).all()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "WEBP"])
@pytest.mark.parametrize("other", [b"PK\x03\x04" + b"zip" * 50, b"<script>alert(1)</script>", b"%PDF-1.7\n%%EOF", b"\x7fELF"])
def test_a_file_that_is_something_else_behind_its_image_is_its_image(form, other):
    data = _file(Image.fromarray(_noise()), form)
    assert np.array_equal(_values(data + other), _values(data))
    with pytest.raises(ImageError, match="must be JPEG"):
        decode(other + data)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_an_image(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = _noise()
    expected = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: np.rot90(pixels.transpose(1, 0, 2), 2),
        8: np.rot90(pixels),
    }[orientation]
    assert np.array_equal(_values(_file(Image.fromarray(pixels), exif=exif)), expected)


def test_broken_exif_is_passed_over():
    pixels = _noise()
    data = _file(Image.fromarray(pixels), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 20)
    assert np.array_equal(_values(data), pixels)


def test_an_animation_shows_its_first_frame():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "lime")]
    data = _file(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert _values(data)[0, 0].tolist() == [255, 0, 0]


def test_of_a_million_frames_the_first_is_decoded_alone():
    whole = _file(Image.new("P", (8, 8), 1), "GIF")
    begin = whole.index(b"\x2c")
    data = whole[:begin] + whole[begin:-1] * 1_000_000 + whole[-1:]
    began = time.process_time()
    assert np.array_equal(_values(data), _values(whole))
    assert time.process_time() - began < 1.0


def test_the_smallest_image():
    assert _values(_file(Image.new("RGB", (1, 1), "red"))).tolist() == [[[255, 0, 0]]]


def _png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize("size", [(50_000, 50_000), (16_385, 1), (1, 16_385), (8_001, 8_000)])
def test_a_header_bounds_an_image_before_it_is_decoded(size):
    body = zlib.compress(b"\0")
    data = _png_header(*size) + struct.pack(">I", len(body)) + b"IDAT" + body + struct.pack(">I", zlib.crc32(b"IDAT" + body))
    with pytest.raises(ImageError, match=f"the image is {size[0]} x {size[1]}"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"%PDF-1.7\n", b"II*\0" + b"\0" * 40,
     b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"BM", b"GIF89a", b"RIFF\0\0\0\0WEBP"],
)  # fmt: skip
def test_other_and_broken_formats_are_refused(data):
    with pytest.raises(ImageError) as caught:
        decode(data)
    assert "PIL" not in str(caught.value) and "/" not in str(caught.value)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "WEBP"])
def test_truncated_images_are_refused(form):
    data = _file(Image.fromarray(_noise(40, 40)), form)
    for tenth in range(10):
        try:
            image = decode(data[: len(data) * tenth // 10])
        except ImageError:
            continue
        assert form in ("GIF", "PNG") and tenth == 9 and image.size == (40, 40)  # only what follows the pixels is missing


def test_mutated_images_are_refused_or_decoded():
    random = np.random.default_rng(1)
    for form in ("PNG", "JPEG", "BMP", "GIF", "WEBP"):
        data = _file(Image.fromarray(_noise(24, 24)), form)
        for _ in range(60):
            mutated = bytearray(data)
            for at in random.integers(0, len(data), 4):
                mutated[at] = random.integers(0, 256)
            with contextlib.suppress(ImageError):
                assert decode(bytes(mutated)).mode == "RGB"


def test_arrays():
    pixels = _noise(channels=4)
    assert np.array_equal(np.asarray(from_array(pixels[:, :, :3].tobytes(), [13, 17, 3])), pixels[:, :, :3])
    assert from_array(pixels.tobytes(), [13, 17, 4]).mode == "RGB"
    assert from_array(pixels[:, :, 0].tobytes(), [13, 17]).mode == "RGB"
    for shape in ([13, 17], [13, 17, 2], [3, 13, 17], [663]):
        with pytest.raises(ImageError):
            from_array(pixels[:, :, :3].tobytes(), shape)


def test_low_detail_keeps_the_aspect():
    assert scaled_down(Image.new("RGB", (2048, 1024))).size == (724, 362)
    assert scaled_down(Image.new("RGB", (512, 512))).size == (512, 512)
    assert scaled_down(Image.new("RGB", (16384, 1))).size == (16384, 1)
