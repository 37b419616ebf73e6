"""How the encoders that are not of Qwen's kind take an image, by model_type: what to ask of the processor, and which tokens
stand for the result. Runs in a child process (processing.py).

InternVL cuts an image into tiles, each of as many tokens. Pixtral's encoder (Mistral Small 3.1, Ministral 3) takes an image
whole; a token ends each row of patches, another one the image. Gemma 3 makes all images one size, Gemma 4 takes the patches of
an image and their places.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Pieces = list[tuple[str, int]]  # tokens in order: a token's text, or "" for the rows of the image, and how many


class Layout(NamedTuple):
    """options: of the processor's call. tensors: those that the encoder takes, beside pixel_values. pieces: as above."""

    options: dict[str, Any]
    tensors: tuple[str, ...]
    kind: str
    number: int  # InternVL: tokens of a tile; Gemma 3: of an image; Pixtral: pixels of a token's side; Gemma 4: patches of it

    def pieces(self, made: Mapping[str, Any]) -> Pieces:
        """made: the processor's answer for one image."""
        if self.kind == "tiles":
            return [("<img>", 1), ("", len(made["pixel_values"]) * self.number), ("</img>", 1)]
        if self.kind == "square":
            return [("<start_of_image>", 1), ("", self.number)]  # the rest is written around it as text
        if self.kind == "patches":
            tokens = made["image_position_ids"].shape[1] // self.number**2
            return [("<|image>", 1), ("", tokens), ("<image|>", 1)]
        height, width = (int(pixels) // self.number for pixels in np.asarray(made["image_sizes"]).ravel())
        rows: Pieces = [piece for _ in range(height) for piece in (("", width), ("[IMG_BREAK]", 1))]
        return [*rows[:-1], ("[IMG_END]", 1)]


def layout_of(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Layout | None:
    """config: config.json. processor: processor_config.json. None: the processor orders patches, as Qwen's."""
    vision = config.get("vision_config", {})
    match config.get("model_type"):
        case "internvl":
            tokens = processor.get("image_seq_length") or config.get("image_seq_length", 256)
            return Layout({"crop_to_patches": True}, (), "tiles", int(tokens))
        case "mistral3":
            side = int(vision.get("patch_size", 14)) * int(config.get("spatial_merge_size", 2))
            return Layout({"patch_size": {"height": side, "width": side}}, ("image_sizes",), "rows", side)
        case "gemma3":
            return Layout({}, (), "square", int(config.get("mm_tokens_per_image", 256)))
        case "gemma4":
            return Layout({}, ("image_position_ids",), "patches", int(vision.get("pooling_kernel_size", 3)))
        case "gemma4_unified":
            return Layout({}, ("image_position_ids",), "patches", 1)
    return None
