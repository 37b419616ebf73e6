"""Broken and hostile images, thousands of them, through the processes that decode images: what does each do to them?

    python benchmarks/mutated_images.py [--files 10000] [--seed 1] [--workers 2] [--keep FOLDER]

Files of every format that is taken, and in many modes, are mutated: bits flipped, cut off at each tenth, chunks of the format
left out, doubled and reordered, sizes in headers overwritten, two files spliced. Each goes the way of an image of a request,
from its bytes to tensors (frontend/media/items.py), with the image processor of Qwen's models. It may be answered, or refused
with an error of the client's; nothing else may come, and nothing may stay behind. The seed decides all files.

Prints a last line `RESULT {json}`; exits 1 if something else came. --keep writes such files, and those that ended a process.
"""

import argparse
import asyncio
import gc
import io
import json
import logging
import os
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from quire.frontend.media.children import MODULE
from quire.frontend.media.errors import MediaError
from quire.frontend.media.items import Media
from quire.frontend.media.options import MediaOptions
from quire.frontend.media.sources import Source

FILES = {
    "config.json": b'{"model_type": "qwen2_5_vl"}',
    "preprocessor_config.json": json.dumps(
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "size": {"shortest_edge": 784, "longest_edge": 784 * 64},
        }
    ).encode(),
}
IN_FLIGHT = 4  # files a process

Parts = Callable[[bytes], list[bytes]]


# ------------------------------------------------------------------------------------------------------------- files
def _file(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def originals() -> dict[str, list[bytes]]:
    """Sound files by format, in the modes that the format has."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 4), np.uint8)
    color, alpha = Image.fromarray(pixels[:, :, :3].copy()), Image.fromarray(pixels)
    gray, palette = color.convert("L"), color.quantize(32)
    deep = Image.fromarray((pixels[:, :, 0].astype(np.uint16) << 8) + 7)
    exif = Image.Exif()
    exif[0x0112] = 6
    several = {"save_all": True, "append_images": [color.rotate(90), color.rotate(180)]}
    return {
        "PNG": [
            _file(color, "PNG"), _file(alpha, "PNG"), _file(gray, "PNG"), _file(deep, "PNG"), _file(color.convert("1"), "PNG"),
            _file(palette, "PNG", transparency=3), _file(color, "PNG", exif=exif), _file(color, "PNG", transparency=(1, 2, 3)),
            _file(alpha.convert("LA"), "PNG"), _file(color, "PNG", **several),
        ],
        "JPEG": [
            _file(color, "JPEG"), _file(gray, "JPEG"), _file(color.convert("CMYK"), "JPEG"), _file(color, "JPEG", exif=exif),
            _file(color, "JPEG", progressive=True, quality=30),
            _file(color, "JPEG", icc_profile=bytes(500), restart_marker_rows=1),
        ],
        "WEBP": [
            _file(color, "WEBP"), _file(alpha, "WEBP", lossless=True), _file(color, "WEBP", exif=exif),
            _file(color, "WEBP", **several),
        ],
        "GIF": [_file(palette, "GIF"), _file(palette, "GIF", transparency=3), _file(color, "GIF", **several)],
        "BMP": [_file(color, "BMP"), _file(palette, "BMP"), _file(color.convert("1"), "BMP"), _file(alpha, "BMP")],
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------- mutations
def _png_parts(data: bytes) -> list[bytes]:
    parts, at = [data[:8]], 8
    while at + 8 <= len(data):
        end = at + 12 + struct.unpack_from(">I", data, at)[0]
        parts.append(data[at:end])
        at = end
    return parts


def _jpeg_parts(data: bytes) -> list[bytes]:
    parts, at = [data[:2]], 2
    while data[at + 1] != 0xDA:  # what follows is one part
        end = at + 2 + struct.unpack_from(">H", data, at + 2)[0]
        parts.append(data[at:end])
        at = end
    return [*parts, data[at:]]


def _riff_parts(data: bytes) -> list[bytes]:
    parts, at = [data[:12]], 12
    while at + 8 <= len(data):
        size = struct.unpack_from("<I", data, at + 4)[0]
        parts.append(data[at : at + 8 + size + size % 2])
        at += 8 + size + size % 2
    return parts


def _pieces(data: bytes) -> list[bytes]:
    size = max(len(data) // 12, 1)
    return [data[at : at + size] for at in range(0, len(data), size)]


PARTS: dict[str, Parts] = {"PNG": _png_parts, "JPEG": _jpeg_parts, "WEBP": _riff_parts, "GIF": _pieces, "BMP": _pieces}


def _with_checksums(data: bytes) -> bytes:
    """A PNG with the checksums that its chunks should have, so that a decoder looks at what they hold."""
    made = data[:8]
    for part in _png_parts(data)[1:]:
        if len(part) < 12:
            return data
        made += part[:-4] + struct.pack(">I", zlib.crc32(part[4:-4]))
    return made


def _flipped(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 2, 8, 40))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _reordered(draw: random.Random, form: str, data: bytes) -> bytes:
    head, *parts = PARTS[form](data)
    match draw.randrange(4):
        case 0:
            draw.shuffle(parts)
        case 1:
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(parts))
        case 2:
            parts.pop(draw.randrange(len(parts)))
        case _:
            parts = [part for part in parts for _ in range(draw.choice((0, 1, 2, 300)))][:2000]
    return head + b"".join(parts)


_SIZES = {"PNG": (16, ">I"), "JPEG": (-1, ">H"), "WEBP": (24, "<H"), "GIF": (6, "<H"), "BMP": (18, "<I")}
_NUMBERS = (0, 1, 2, 200, 8000, 16_384, 16_385, 50_000, 65_535, 0x7FFFFFFF, 0xFFFFFFFF)


def _resized(draw: random.Random, form: str, data: bytes) -> bytes:
    """Other sizes in the header."""
    at, layout = _SIZES[form]
    if form == "JPEG":
        at = next((data.find(bytes((0xFF, mark))) for mark in (0xC0, 0xC2) if bytes((0xFF, mark)) in data), 0) + 5
    changed, width = bytearray(data), struct.calcsize(layout)
    for place in (at, at + width):
        if draw.random() < 0.7:
            struct.pack_into(layout, changed, place, draw.choice(_NUMBERS) % (1 << 8 * width))
    return bytes(changed)


def mutated(draw: random.Random, files: dict[str, list[bytes]]) -> tuple[str, bytes]:
    """The change that was made, and the file."""
    form = draw.choice(list(files))
    data = draw.choice(files[form])
    what = draw.choice(("bits", "cut", "chunks", "sizes", "splice", "run"))
    match what:
        case "bits":
            data = _flipped(draw, data)
        case "cut":
            data = data[: len(data) * draw.randrange(11) // 10]
        case "chunks":
            data = _reordered(draw, form, data)
        case "sizes":
            data = _resized(draw, form, data)
        case "splice":
            other = draw.choice(files[draw.choice(list(files))])
            data = data[: draw.randrange(len(data))] + other[draw.randrange(len(other)) :]
        case _:
            at = draw.randrange(len(data))
            data = data[:at] + bytes([draw.choice((0, 255))]) * draw.choice((1, 64, 5000)) + data[at + draw.randrange(64) :]
    if form == "PNG" and what != "cut" and data[:8] == files["PNG"][0][:8] and draw.random() < 0.7:
        data = _with_checksums(data)
    return f"{form} {what}", data


# --------------------------------------------------------------------------------------------------------------- run
class Found(NamedTuple):
    """outcomes: by what was done: answered, refused, or an exception's name. wrong: files with another one.

    grown_mib: of all decoding processes together, from the first hundred files to the end; peak_mib: the largest one."""

    outcomes: Counter[tuple[str, str]]
    wrong: list[bytes]
    slowest_s: float
    grown_mib: float
    peak_mib: float
    replaced: int


class _Replaced(logging.Handler):
    """Counts the log's lines on processes that had to be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "another one is asked" in record.getMessage()


async def run(count: int, seed: int, workers: int) -> Found:
    """Send so many files. Asserts that nothing stays behind."""
    draw, files, log = random.Random(seed), originals(), _Replaced()
    logging.getLogger("quire").addHandler(log)
    media = Media(FILES, MediaOptions(num_children=workers, cache_bytes=0, max_held_bytes=1 << 30), "")
    outcomes, wrong, slowest, before, peak = Counter[tuple[str, str]](), list[bytes](), 0.0, 0.0, 0.0
    await media.start()
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        todo: Iterator[int] = iter(range(count))

        async def send() -> None:
            nonlocal slowest, before, peak
            for number in todo:
                (what, data), began = mutated(draw, files), time.monotonic()
                try:
                    (item,) = await media.prepare([Source("file", data=data)], "")
                    outcome = "answered" if item.num_tokens > 0 else "empty"
                except MediaError as error:
                    outcome = "refused" if error.code == "invalid_media" and "/" not in str(error) else f"said {error}"
                except Exception as error:  # the point of it: to find whatever else comes
                    outcome = type(error).__name__
                if outcome not in ("answered", "refused"):
                    wrong.append(data)
                outcomes[what, outcome] += 1
                slowest = max(slowest, time.monotonic() - began)
                if number % 100 == 99:
                    sizes = [child.memory_info().rss / (1 << 20) for child in children()]
                    before, peak = before or sum(sizes), max(peak, *sizes)

        await asyncio.gather(*(send() for _ in range(IN_FLIGHT * workers)))
        grown = sum(child.memory_info().rss / (1 << 20) for child in children()) - before
        gc.collect()
        await media.prepare([Source("last", data=files["PNG"][0])], "")  # counts what was given back
        assert media.held_bytes == len(files["PNG"][0]), "items were left behind"
        assert len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors were left behind"
    finally:
        logging.getLogger("quire").removeHandler(log)
        await media.close()
    return Found(outcomes, wrong, slowest, grown, peak, log.count)


def children() -> list[psutil.Process]:
    """The processes that decode."""
    return [child for child in psutil.Process().children() if MODULE in child.cmdline()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=None)
    args = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(run(args.files, args.seed, args.workers))
    for (what, outcome), number in sorted(found.outcomes.items()):
        print(f"{what:14} {outcome:10} {number}")
    for number, data in enumerate(found.wrong if args.keep else ()):
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / str(number)).write_bytes(data)
    result = {
        "files": args.files,
        "answered": sum(n for (_, outcome), n in found.outcomes.items() if outcome == "answered"),
        "wrong": len(found.wrong),
        "replaced": found.replaced,
        "slowest_s": round(found.slowest_s, 2),
        "grown_mib": round(found.grown_mib, 1),
        "peak_mib": round(found.peak_mib, 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    print("RESULT", json.dumps(result))
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
