"""Rotary embedding and KV write of latent attention (MLA): queries and cache entries in the form that its kernels read.

    out[t, h] = rotate(q[t, h, N:]) | q_latent[h, t]            q [T, Hq, N + R], q_latent [Hq, T, L], out [T, Hq, R + L]
                                                          times q_scales[position], float32 [P], if they are given
    entry[t] = rotate(kv[t, L:]) | norm(kv[t, :L])              kv [T, L + R], to the cache at slot_mapping[t], -1: nowhere

One launch: a program for each token and head, and one for each token's cache entry. Interleaved pairs of q and kv are stored as
halves in out and entry, as for other models: products of the two are the same. The norm is RMSNorm's, rounded before the
weight. Without a rotation cos_sin is empty, [P, 0].
Reference: `latent_reference.latent_rope_kv`.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous


@triton.jit
def _rotate(
    x_ptr, out_ptr, cos_sin_ptr, i, inside, factor, R: tl.constexpr, INTERLEAVED: tl.constexpr, ROTATED: tl.constexpr, may_store
):
    half: tl.constexpr = R // 2
    cos, sin = 1.0, 0.0
    if ROTATED:
        cos = tl.load(cos_sin_ptr + i, inside, other=0.0)
        sin = tl.load(cos_sin_ptr + half + i, inside, other=0.0)
    if INTERLEAVED:
        a = tl.load(x_ptr + 2 * i, inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + 2 * i + 1, inside, other=0.0).to(tl.float32)
    else:
        a = tl.load(x_ptr + i, inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + half + i, inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + i, ((a * cos - b * sin) * factor).to(dtype), inside & may_store)
    tl.store(out_ptr + half + i, ((b * cos + a * sin) * factor).to(dtype), inside & may_store)


@triton.jit(do_not_specialize=["T"])
def _latent_rope_kv_kernel(
    q_ptr, q_latent_ptr, kv_ptr, weight_ptr, cos_sin_ptr, q_scales_ptr, positions_ptr, mapping_ptr, cache_ptr, out_ptr,
    q_stride, head_stride, kv_stride, eps, T,
    HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, L: tl.constexpr, HALF_2: tl.constexpr, L_2: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROTATED: tl.constexpr, Q_SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i, j = tl.arange(0, HALF_2), tl.arange(0, L_2)
    wait_for_previous(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_sin = cos_sin_ptr + position * R
    half, latent = i < R // 2, j < L
    if head < HEADS:
        out = out_ptr + (token * HEADS + head) * (R + L)
        factor = 1.0
        if Q_SCALED:
            factor = tl.load(q_scales_ptr + position)
        _rotate(
            q_ptr + token * q_stride + head * head_stride + NOPE, out, cos_sin, i, half, factor, R, INTERLEAVED, ROTATED, True
        )
        x = tl.load(q_latent_ptr + (head.to(tl.int64) * T + token) * L + j, latent, other=0.0)
        if Q_SCALED:
            x = (x.to(tl.float32) * factor).to(x.dtype)
        tl.store(out + R + j, x, latent)
    else:
        place = tl.load(mapping_ptr + token).to(tl.int64)
        entry = cache_ptr + tl.maximum(place, 0) * (R + L)
        kv = kv_ptr + token * kv_stride
        _rotate(kv + L, entry, cos_sin, i, half, 1.0, R, INTERLEAVED, ROTATED, place >= 0)
        c = tl.load(kv + j, latent, other=0.0)
        wide = c.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / L + eps)
        weight = tl.load(weight_ptr + j, latent, other=0.0).to(tl.float32)
        y = wide.to(c.dtype).to(tl.float32) * weight
        tl.store(entry + R + j, y.to(c.dtype), latent & (place >= 0))


def latent_rope_kv(
    q: torch.Tensor,
    q_latent: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    interleaved: bool,
    q_scales: torch.Tensor | None = None,
    pdl: int = PLAIN,
) -> torch.Tensor:
    """Queries [T, Hq, R + L]; cos_sin float32 [P, R], positions int [T], slot_mapping int64 [T]. See the module."""
    (tokens, heads, width), latent = q.shape, q_latent.shape[2]
    rotary = kv.shape[1] - latent
    fits = kv.shape[0] == tokens and q_latent.shape[:2] == (heads, tokens) and norm_weight.shape == (latent,)
    if (
        not fits
        or cos_sin.shape[1] not in (0, rotary)
        or cache.shape[1] != 1
        or cache.shape[3] != rotary + latent
        or width < rotary
    ):
        raise ValueError(f"latent_rope_kv: q {q.shape}, {q_latent.shape}, kv {kv.shape}, cache {cache.shape} do not fit")
    if not (q_latent.is_contiguous() and cache.is_contiguous() and q.stride(2) == kv.stride(1) == 1):
        raise ValueError("latent_rope_kv: latents and cache must be contiguous, q and kv in their last dimension")
    out = q.new_empty(tokens, heads, rotary + latent)
    if tokens:
        _latent_rope_kv_kernel[(tokens, heads + 1)](
            q, q_latent, kv, norm_weight, cos_sin, cos_sin if q_scales is None else q_scales, positions, slot_mapping, cache,
            out, q.stride(0), q.stride(1), kv.stride(0), eps, tokens,
            heads, width - rotary, rotary, latent, triton.next_power_of_2(max(rotary // 2, 1)),
            triton.next_power_of_2(latent), interleaved, cos_sin.shape[1] > 0, q_scales is not None, pdl, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip
    return out
