"""Images from bytes: the format by its first bytes, bounds by its header, then RGB as it looks on a white page.

A child process (child.py) calls this, because decoders take long and have had flaws. Only the formats below are read, and the
decoder is told which one: Pillow would else try all of its own, and start Ghostscript for some. An image of another mode
becomes the RGB image that looks the same: turned as its EXIF data says, alpha on white, 16 bits a channel scaled to 8.
"""

import io
import math
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from quire.ipc.media import MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE

LOW_DETAIL_PIXELS = 512 * 512
_ORIENTATION = 0x0112  # in EXIF data
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_MAGIC: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("JPEG", lambda head: head.startswith(b"\xff\xd8\xff")),
    ("PNG", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n")),
    ("WEBP", lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP"),
    ("GIF", lambda head: head[:6] in (b"GIF87a", b"GIF89a")),
    ("BMP", lambda head: head.startswith(b"BM")),
)
FORMATS = "JPEG, PNG, WebP, GIF or BMP"

Image.MAX_IMAGE_PIXELS = None  # the bounds here are checked instead, and raise no warning


class ImageError(ValueError):
    """The image cannot be used; the text is for the client. It names neither a library nor a path."""


def format_of(data: bytes) -> str | None:
    """Pillow's name of the format; None for any that is not taken."""
    head = bytes(data[:16])
    return next((name for name, fits in _MAGIC if fits(head)), None)


def decode(data: bytes, low_detail: bool = False) -> Image.Image:
    """The image as RGB. low_detail: scaled down to LOW_DETAIL_PIXELS if it is larger. Raises ImageError."""
    form = format_of(data)
    if form is None:
        raise ImageError(f"the image must be {FORMATS}")
    try:
        image = Image.open(io.BytesIO(data), formats=[form])
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, OverflowError):
        raise ImageError(f"the image's {form} header is broken") from None
    check_size(*image.size)
    try:
        image.load()
        return scaled_down(as_rgb(image)) if low_detail else as_rgb(image)
    except MemoryError:
        raise ImageError("the image needs more memory than is allowed") from None
    except Exception:  # decoders raise almost anything for broken data
        raise ImageError(f"the image is broken: its {form} data cannot be decoded") from None


def from_array(data: bytes, shape: list[int], low_detail: bool = False) -> Image.Image:
    """The image of uint8 values [height, width] or [height, width, 1, 3 or 4 channels]. Raises ImageError."""
    channels = shape[2] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or channels not in (1, 3, 4) or math.prod(shape) != len(data):
        raise ImageError("an array of an image is uint8 [height, width] or [height, width, 1, 3 or 4]")
    check_size(shape[1], shape[0])
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    image = as_rgb(Image.frombytes(mode, (shape[1], shape[0]), data))
    return scaled_down(image) if low_detail else image


def check_size(width: int, height: int) -> None:
    """Raises ImageError for an image that is too large, or empty."""
    if width < 1 or height < 1:
        raise ImageError("the image is empty")
    if max(width, height) > MAX_IMAGE_SIDE or width * height > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"the image is {width} x {height}: at most {MAX_IMAGE_SIDE} pixels a side and {MAX_IMAGE_PIXELS // 10**6}"
            " megapixels are taken"
        )


def as_rgb(image: Image.Image) -> Image.Image:
    """The RGB image that looks the same on a white page."""
    if (turn := _TURNS.get(_orientation(image))) is not None:
        transparency = image.info.get("transparency")
        image = image.transpose(turn)
        if transparency is not None:
            image.info["transparency"] = transparency
    if image.mode.startswith("I"):  # 16 bits: a conversion would cut off what is above 255
        values, hidden = np.asarray(image), image.info.get("transparency")
        shown = (values >> 8 if values.dtype.itemsize > 1 else values).astype(np.uint8)
        image = Image.fromarray(np.where(values == hidden, np.uint8(255), shown) if isinstance(hidden, int) else shown)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.has_transparency_data:
        try:
            layer = image.convert("RGBA")
        except (ValueError, TypeError):  # a transparent color that the mode cannot have
            image.info.pop("transparency", None)
            return image.convert("RGB")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """The EXIF data's orientation; 1 if there is none that can be read."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # broken EXIF data raises almost anything, and changes nothing about the image
        return 1
    return value if isinstance(value, int) else 1


def scaled_down(image: Image.Image, pixels: int = LOW_DETAIL_PIXELS) -> Image.Image:
    """The image, or if it has more pixels the same with at most so many, aspect kept."""
    if image.width * image.height <= pixels:
        return image
    factor = math.sqrt(pixels / (image.width * image.height))
    size = max(1, int(image.width * factor)), max(1, int(image.height * factor))
    return image.resize(size, Image.Resampling.BICUBIC)
