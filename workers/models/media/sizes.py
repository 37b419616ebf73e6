"""How large the encoder cache is, and what a run of the encoder takes: from the checkpoint's files and the flags."""

import json
from pathlib import Path
from typing import Any

from quire.ipc.memory_plan import MOST_ITEM_TOKENS
from quire.ipc.whole_images import image_processor, image_processors, image_tokens
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
    if (tokens := image_tokens(config, image_processor(folder))) is not None:
        return tokens
    unit = _whole(vision.get("patch_size", 14)) * config.get("spatial_merge_size", vision.get("spatial_merge_size", 2))
    for fields in image_processors(folder):
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
    config = json.loads(spec.config)
    vision: dict[str, Any] = config.get("vision_config", {})
    hidden = vision.get("hidden_size", vision.get("embed_dim", 1280))
    inner = vision.get("intermediate_size", 4 * hidden)
    patch = _whole(vision.get("patch_size", 14))
    pixels = 3 * vision.get("temporal_patch_size", 1) * patch**2
    return _patches(config, vision, patch) * (3 * pixels + 8 * hidden + 2 * inner)


def _patches(config: dict[str, Any], vision: dict[str, Any], patch: int) -> int:
    """Patches of a token."""
    if config.get("model_type") == "gemma3":
        return max((vision.get("image_size", 896) // patch) ** 2 // (image_tokens(config, {}) or 1), 1)
    return int(vision.get("spatial_merge_size", vision.get("pooling_kernel_size", 2)) ** 2)


def _whole(size: Any) -> int:
    """The side of a patch, which some configs have as two equal ones."""
    return int(size[0] if isinstance(size, list) else size)
