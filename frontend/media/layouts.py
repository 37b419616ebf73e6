"""How the encoders that are not of Qwen's kind take an image, by model_type: what to ask of the processor, and which tokens
stand for the result. Runs in a child process (processing.py).

InternVL cuts an image into tiles, each of as many tokens. Pixtral's encoder (Mistral Small 3.1, Ministral 3) takes an image
whole; a token ends each row of patches, another one the image.
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
    number: int  # InternVL: tokens of a tile; Pixtral: pixels of a token's side

    def pieces(self, made: Mapping[str, Any]) -> Pieces:
        """made: the processor's answer for one image."""
        if self.kind == "tiles":
            return [("<img>", 1), ("", len(made["pixel_values"]) * self.number), ("</img>", 1)]
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
    return None
