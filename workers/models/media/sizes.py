"""How large the encoder cache is, and what a run of the encoder takes: from the checkpoint's files and the flags."""

import json
from pathlib import Path
from typing import Any

from quire.ipc.memory_plan import MOST_ITEM_TOKENS
from quire.ipc.worker_config import ResolvedEngineConfig
from quire.workers.models.config import ModelConfigError
from quire.workers.models.media.spec import MediaSpec


def cache_rows(engine: ResolvedEngineConfig, spec: MediaSpec, folder: Path) -> int:
    """Tokens of the encoder cache: twice those of the largest item that the processor makes, or as the flag says.

    Raises ModelConfigError for a flag that has no room for that item.
    """
    largest = min(largest_item(spec, folder) or MOST_ITEM_TOKENS, engine.max_model_len)
    asked = engine.encoder_cache_tokens
    if asked is None:
        return 2 * largest
    if asked < largest and largest_item(spec, folder) is not None:
        raise ModelConfigError(
            f"--encoder-cache-tokens {asked} has no room for the largest image of the checkpoint's processor, which has "
            f"{largest} tokens"
        )
    return asked


def largest_item(spec: MediaSpec, folder: Path) -> int | None:
    """Tokens of the largest image that the checkpoint's processor makes; None if it does not say."""
    config = json.loads(spec.config)
    vision = config.get("vision_config", {})
    unit = _whole(vision.get("patch_size", 14)) * config.get("spatial_merge_size", vision.get("spatial_merge_size", 2))
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            found = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        fields = found.get("image_processor", found) if isinstance(found, dict) else {}
        size = fields.get("size")
        if type(tiles := fields.get("max_patches")) is int:  # InternVL's, beside one of the whole image
            return (tiles + 1) * int(config.get("image_seq_length", 256))
        pixels = fields.get("max_pixels") or (size.get("longest_edge") if isinstance(size, dict) else None)
        if isinstance(pixels, int) and pixels > 0:
            if "Pixtral" in str(fields.get("image_processor_type")):  # its longest edge is a side
                pixels = pixels**2
            return max(pixels // unit**2, 1)
    return None


def run_elements(spec: MediaSpec) -> int:
    """Elements that a run of the encoder takes for a token of an item: an estimate from its widths."""
    vision: dict[str, Any] = json.loads(spec.config).get("vision_config", {})
    hidden = vision.get("hidden_size", vision.get("embed_dim", 1280))
    inner = vision.get("intermediate_size", 4 * hidden)
    patch, merge = _whole(vision.get("patch_size", 14)), vision.get("spatial_merge_size", 2)
    pixels = 3 * vision.get("temporal_patch_size", 1) * patch**2
    return merge**2 * (3 * pixels + 8 * hidden + 2 * inner)


def _whole(size: Any) -> int:
    """The side of a patch, which some configs have as two equal ones."""
    return int(size[0] if isinstance(size, list) else size)
