"""Gemma 4's image features by transformers' modules, without waiting for the device.

transformers' `get_image_features` takes images that are padded to one number of patches, and cuts the padding off again by
reading masks. Here an image comes alone and without padding, so there is nothing to mask. pixels [1, patches, channels x pixels
of a patch]; positions int64 [1, patches, 2], of the patches' columns and rows. The result is [tokens, H].
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

ImageRows = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def gemma4_rows(model: Any, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Patches are encoded, those of a square averaged, and projected."""
    vision = model.vision_tower
    padding = torch.zeros(positions.shape[:2], dtype=torch.bool, device=positions.device)
    x = vision.patch_embedder(pixels, positions, padding)
    dtype, count = x.dtype, pixels.shape[1] // vision.config.pooling_kernel_size**2
    x = vision.encoder(inputs_embeds=x, attention_mask=None, pixel_position_ids=positions).last_hidden_state
    x, _ = vision.pooler(x, positions, padding, count)
    if vision.config.standardize:
        x = (x - vision.std_bias.float()) * vision.std_scale.float()
    return model.embed_vision(inputs_embeds=x.to(dtype))[0]  # type: ignore[no-any-return]


def unified_rows(model: Any, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Patches are projected, and nothing else: there is no encoder."""
    return model.embed_vision(pixels, positions, return_dict=True).pooler_output[0]  # type: ignore[no-any-return]


# By model_type: encoders that take one image a run, with the positions of its patches.
OF_PATCHES: Mapping[str, ImageRows] = {"gemma4": gemma4_rows, "gemma4_unified": unified_rows}


def largest_patches(config: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels and positions of an image of so many tokens, without values, on the host."""
    vision = config.vision_config
    if config.model_type == "gemma4_unified":
        square, side = 1, vision.model_patch_size
    else:
        square, side = vision.pooling_kernel_size, vision.patch_size
    columns = torch.arange(num_tokens * square, device="cpu").repeat(square)
    rows = torch.arange(square, device="cpu").repeat_interleave(num_tokens * square)
    limit = vision.mm_posemb_size if config.model_type == "gemma4_unified" else vision.position_embedding_size
    positions = torch.stack([columns, rows], 1).clamp(max=limit - 1)[None]
    return torch.zeros(1, positions.shape[1], 3 * side**2, dtype=torch.uint8, device="cpu"), positions
