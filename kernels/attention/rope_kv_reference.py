"""QK-norm, rotary embedding and KV write in plain torch: the oracle of `rope_kv` and rope_kv_cpu, same signature."""

import torch

from quire.kernels.elementwise import norm_reference
from quire.kernels.elementwise.norm_reference import Weighs


def rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    weighs: Weighs = "rounded",
    axes: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
) -> None:
    """Rotate q in place in qkv and write k and v to the cache. See `rope_kv.rope_kv` for shapes."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    if q_weight is not None and k_weight is not None:
        q, k = (norm_reference.rms_norm(x, w, eps, weighs=weighs) for x, w in ((q, q_weight), (k, k_weight)))
    rows = cos_sin[positions]
    if axes is not None:
        rows = rows.take_along_dim(torch.cat([axes, axes]).long()[None, None], 0)[0]
    cos, sin = rows.unsqueeze(1).chunk(2, -1)
    rotate = _rotate_pairs if interleaved else _rotate
    q = rotate(q, cos, sin)
    heads[:, :num_q_heads] = q if q_scales is None else (q.float() * q_scales[positions][:, None, None]).to(q.dtype)
    k = rotate(k, cos, sin)
    if not bool((slot_mapping >= 0).all()):
        keep = slot_mapping >= 0
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = _to_cache(k, k_cache.dtype, k_scale)
    v_cache[block, :, offset] = _to_cache(v, v_cache.dtype, v_scale)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of each head, half against half, in float32."""
    half = cos.shape[-1]
    wide = x.float()
    a, b = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, wide[..., 2 * half :]], -1).to(x.dtype)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same for pairs of even and odd elements."""
    rotary = 2 * cos.shape[-1]
    wide = x.float()
    a, b = wide[..., :rotary:2], wide[..., 1:rotary:2]
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([rotated, wide[..., rotary:]], -1).to(x.dtype)


def _to_cache(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """x / scale in the cache's dtype; 8-bit floats saturate."""
    if scale is not None:
        x = x.float() / scale
    if dtype.itemsize == 1:
        top = torch.finfo(dtype).max
        x = x.float().clamp(-top, top)
    return x.to(dtype)
