"""QK-norm, rotary embedding and KV write in plain torch: the oracle of `rope_kv` and rope_kv_cpu, same signature."""

import torch


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
) -> None:
    """Rotate q in place in qkv and write k and v to the cache. See `rope_kv.rope_kv` for shapes."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    if q_weight is not None and k_weight is not None:
        q, k = _head_norm(q, q_weight, eps), _head_norm(k, k_weight, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    heads[:, :num_q_heads] = _rotate(q, cos, sin)
    k = _rotate(k, cos, sin)
    if not bool((slot_mapping >= 0).all()):
        keep = slot_mapping >= 0
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = _to_cache(k, k_cache.dtype, k_scale)
    v_cache[block, :, offset] = _to_cache(v, v_cache.dtype, v_scale)


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of each head, half against half, in float32."""
    half = cos.shape[-1]
    wide = x.float()
    a, b = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, wide[..., 2 * half :]], -1).to(x.dtype)


def _to_cache(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """x / scale in the cache's dtype; 8-bit floats saturate."""
    if scale is not None:
        x = x.float() / scale
    if dtype.itemsize == 1:
        top = torch.finfo(dtype).max
        x = x.float().clamp(-top, top)
    return x.to(dtype)
