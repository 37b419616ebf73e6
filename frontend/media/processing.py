"""The checkpoint's image processor, called for one image: what its encoder takes, and how many tokens that becomes.

`transformers` makes the processor from the checkpoint's files, with its "pil" backend, so that no torchvision is needed. Qwen's
and GLM's processors spend most of their time on ordering patches of float32. For these the image is resized here by the
processor's own rule and resampling, its patches are ordered as uint8, and the device multiplies and adds (`rescale`): a quarter
of the bytes travels, and the frame that a still image repeats does not. The values are proven equal to the processor's within
1e-6. Runs in a child process (child.py).
"""

import json
import math
import sys
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from quire.frontend.media.images import ImageError
from quire.frontend.media.layouts import Layout, Pieces, layout_of

MAX_ASPECT = 200  # the size rules of these processors refuse more
# Names of the processors of which patches are ordered here; all have the fields that `_patches` reads.
_OF_PATCHES = ("Qwen2VLImageProcessorPil", "Glm4vImageProcessorPil", "Glm46VImageProcessorPil")


class Processed(NamedTuple):
    """One image as its encoder takes it.

    tensors: by the names of get_image_features' arguments, in order. pieces: its tokens (layouts.py).
    positions: [axes][tokens] rotary positions from 0, and how far they advance; empty: one after the other.
    rescale: (scale, offset) by channel; the device computes pixel_values * scale + offset; None: they are ready.
    """

    tensors: dict[str, np.ndarray]
    pieces: Pieces
    positions: list[list[int]]
    advance: int
    rescale: tuple[list[float], list[float]] | None

    @property
    def num_tokens(self) -> int:
        """Rows of embeddings."""
        return sum(count for text, count in self.pieces if not text)


class Processor:
    """folder: of the checkpoint's config.json and preprocessor_config.json or processor_config.json. Raises what transformers
    raises for a folder that it cannot read."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        import transformers

        config = _json(folder / "config.json")
        self._is_unified = config.get("model_type") == "gemma4_unified"
        # the unified form has only a processor that needs torchvision, which makes the patches of Gemma 4's and joins them
        kind: Any = transformers.Gemma4ImageProcessorPil if self._is_unified else transformers.AutoImageProcessor
        more = {} if self._is_unified else {"backend": "pil", "trust_remote_code": False}
        self._processor: Any = kind.from_pretrained(folder, local_files_only=True, **more, **options)
        settings = self._processor
        if getattr(settings, "do_pan_and_scan", None):
            raise ValueError("images cannot be cut into crops: leave do_pan_and_scan out")
        self._layout = layout_of(config, _json(folder / "processor_config.json"))
        self._orders_patches = type(settings).__name__ in _OF_PATCHES and all(
            (settings.do_resize, settings.do_rescale, settings.do_normalize, settings.do_convert_rgb)
        )

    def with_options(self, options: Mapping[str, Any]) -> "Processor":
        """The same with other settings (request_options.py). Raises ImageError for those that exclude each other."""
        if not options:
            return self
        own, other = self._processor, copy(self)
        if "size" in options:
            edges = {name: getattr(own.size, name, None) for name in ("shortest_edge", "longest_edge")}
            size = {name: value for name, value in edges.items() if value} | dict(options["size"])
            options = {**options, "size": size}
        other._processor = made = type(own).from_dict(own.to_dict(), **options)
        least, most = getattr(made.size, "shortest_edge", None), getattr(made.size, "longest_edge", None)
        if (least and most and least > most) or getattr(made, "min_patches", 0) > getattr(made, "max_patches", 0):
            raise ImageError("mm_processor_kwargs: the least size is above the largest")
        return other

    def __call__(self, image: Image.Image) -> Processed:
        """image: RGB. Raises ImageError."""
        if max(image.size) > MAX_ASPECT * min(image.size):
            raise ImageError(f"the image is {image.width} x {image.height}: no side may be {MAX_ASPECT} times the other")
        if self._layout is not None:
            return self._laid_out(self._layout, image)
        rescale = None
        if self._orders_patches:
            pixels, grid = self._patches(image)
            rescale = self._rescale()
        else:
            made = self._processor(image, return_tensors="np")
            pixels, grid = np.asarray(made["pixel_values"], np.float32), np.asarray(made["image_grid_thw"]).ravel().tolist()
        positions, advance = grid_positions(grid, self._processor.merge_size)
        tensors: dict[str, Any] = {"pixel_values": pixels, "image_grid_thw": np.array([grid], np.int64)}
        return Processed(tensors, [("", len(positions[0]))], positions, advance, rescale)

    def _laid_out(self, layout: Layout, image: Image.Image) -> Processed:
        settings, rescale, is_plain = self._processor, None, layout.kind == "patches"
        leaves = settings.do_rescale and settings.do_normalize is not is_plain
        left = {"do_rescale": False, "do_normalize": False} if leaves else {}
        try:
            made = settings(image, return_tensors="np", **layout.options, **left)
        except (ValueError, ZeroDivisionError):
            raise ImageError("the model's processor does not take an image of this shape") from None
        if layout.kind == "patches":
            made = unpadded(made, self._processor.pooling_kernel_size if self._is_unified else 1)
        pixels = np.asarray(made["pixel_values"])
        if leaves:
            assert pixels.dtype == np.uint8
            rescale = ([settings.rescale_factor], [0.0]) if is_plain else self._rescale()
        tensors: dict[str, Any] = {"pixel_values": pixels if leaves else pixels.astype(np.float32)}
        for name in layout.tensors:
            tensors[name] = np.asarray(made[name], np.int64)
        return Processed(tensors, layout.pieces(made), [], 0, rescale)

    def _patches(self, image: Image.Image) -> tuple[np.ndarray, list[int]]:
        """uint8 [patches, channels x height x width], as the processor's `patchify` orders them, and the grid. It would repeat
        the image as the next frames, which the device does instead."""
        settings = self._processor
        patch, merge = settings.patch_size, settings.merge_size
        width, height = self._size(image)
        if (width, height) != image.size:
            image = image.resize((width, height), settings.resample)
        rows, columns = height // patch, width // patch
        pixels = np.asarray(image).reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        ordered = pixels.transpose(0, 3, 1, 4, 6, 2, 5)
        return ordered.reshape(rows * columns, 3 * patch * patch), [1, rows, columns]

    def _size(self, image: Image.Image) -> tuple[int, int]:
        """Width and height by the rule of the processor's own module."""
        settings = self._processor
        rule = sys.modules[type(settings).__module__].smart_resize
        factor, frames = settings.patch_size * settings.merge_size, settings.temporal_patch_size
        bounds = {"min_pixels": settings.size.shortest_edge, "max_pixels": settings.size.longest_edge}
        if "Glm" in type(settings).__name__:
            bounds |= {"num_frames": frames, "temporal_factor": frames}
        try:
            height, width = rule(height=image.height, width=image.width, factor=factor, **bounds)
        except (ValueError, ZeroDivisionError):
            raise ImageError("the model's processor does not take an image of this shape") from None
        return width, height

    def _rescale(self) -> tuple[list[float], list[float]]:
        settings = self._processor
        means, stds = (_channels(value) for value in (settings.image_mean, settings.image_std))
        scales = [settings.rescale_factor / std for std in stds]
        return scales, [-mean / std for mean, std in zip(means, stds, strict=True)]


def unpadded(made: Mapping[str, Any], joined: int) -> dict[str, np.ndarray]:
    """An image's patches [1, n, elements] and their places [1, n, (column, row)] without padding. Squares of joined x joined
    patches become one each."""
    pixels, places = np.asarray(made["pixel_values"]), np.asarray(made["image_position_ids"])
    keep = places[0, :, 0] >= 0
    pixels, places = pixels[:, keep], places[:, keep]
    if joined > 1:
        columns, rows = (places[0].max(0) + 1) // joined
        side = math.isqrt(pixels.shape[2] // 3)
        split = pixels.reshape(rows, joined, columns, joined, side, side, 3).transpose(0, 2, 1, 4, 3, 5, 6)
        pixels = split.reshape(1, rows * columns, -1)
        y, x = np.divmod(np.arange(rows * columns), columns)
        places = np.stack([x, y], 1)[None]
    return {"pixel_values": pixels, "image_position_ids": places}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _channels(value: float | list[float]) -> list[float]:
    return [float(value)] * 3 if isinstance(value, int | float) else [float(each) for each in value]


def grid_positions(grid: list[int], merge: int) -> tuple[list[list[int]], int]:
    """Rotary positions of an image's tokens from 0, [time, height, width][tokens], and how far they advance; what
    `get_rope_index` of these models gives for the image alone. grid: patches [frames, rows, columns]; merge: patches of a side
    that become one token."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    axes = np.indices((frames, rows, columns)).reshape(3, -1)
    return axes.tolist(), max(rows, columns)
