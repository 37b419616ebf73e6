"""QK-norm (optional), rotary embedding and KV-cache write, in one launch.

    q, k <- cast(q / rms(q)) * q_weight, likewise k          per head, if weights are given; in float32 by `weighs` (norm.py)
    (a, b) <- (a * cos - b * sin, b * cos + a * sin)          a, b: halves of the first rotary_dim elements of a q or k head,
                                                              or, interleaved, the even and the odd ones
    q <- q * q_scales[position]                               if they are given
    k_cache[block, h, offset] <- k / k_scale, likewise v      block * block_size + offset = slot_mapping[t]

qkv [T, (Hq + 2 * Hkv) * D] = q | k | v, any row stride; float32, float16 or bfloat16; q is rotated in place, k is not modified.
If qkv is q alone, nothing is written to the cache.
positions int32 [T], clamped to the table; with `axes`, int32 [pairs], they are [n, T], and pair i is rotated by row axes[i].
cos_sin float32 [max_position, rotary_dim] = cos | sin, rotary_dim <= D, even, 0 if nothing is rotated.
q_scales float32 [max_position].
slot_mapping int64 [T], negative: nothing is written.
k_cache, v_cache [num_blocks, Hkv, block_size, D], any strides (unit in D), any float dtype (8-bit saturate), 64-bit offsets.
q_weight, k_weight [D];  k_scale, v_scale float32 [1] on the device.

Moves T * (2 * Hq + 4 * Hkv) * D elements. A program takes one token and a tile of heads (`choose_tile`). The math is in
float32, rounded once (after the norm's own two roundings, as in transformers); products are not fused, so float32 results equal
transformers' to the bit, except for the norm.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.norm import WEIGHS, weighed
from quire.kernels.elementwise.norm_reference import Weighs
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.current import cached, current


@cached
def choose_tile(tokens: int) -> int:
    """Elements of a program's tile of heads, by the tuning table: few tokens are fastest with many small programs."""
    tiles = current().attention.rope_tiles
    return next((tile for limit, tile in tiles if tokens <= limit), tiles[-1][1])


@triton.jit
def _part(base, heads, row_mask, cols, first, end: tl.constexpr, D: tl.constexpr):
    """Elements [first, end) of each head in float32; zero outside."""
    mask = row_mask[:, None] & (first + cols < end)[None, :]
    return tl.load(base + heads[:, None] * D + (first + cols)[None, :], mask, other=0.0).to(tl.float32)


@triton.jit
def _weights(q_weight, k_weight, is_q, cols, first, end: tl.constexpr):
    mask = first + cols < end
    q = tl.load(q_weight + first + cols, mask, other=0.0).to(tl.float32)
    k = tl.load(k_weight + first + cols, mask, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q[None, :], k[None, :])


@triton.jit
def to_cache(x, scale, TOP: tl.constexpr, dtype: tl.constexpr):
    """x / scale, float32, in the cache's dtype; TOP: its largest number, at which 8 bits saturate, else 0."""
    x = x / scale
    if TOP > 0:
        x = tl.minimum(tl.maximum(x, -TOP), TOP)
    return x.to(dtype)


@triton.jit
def _store_part(
    x, qkv_row, k_out, v_out, heads, is_q, writes_k, writes_v, cols, first, end: tl.constexpr, k_head_stride, v_head_stride,
    k_scale, v_scale, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Store q back to its row, and k and v to the cache."""
    x = x.to(qkv_row.dtype.element_ty)
    col = (first + cols)[None, :]
    inside = col < end
    tl.store(qkv_row + heads[:, None] * D + col, x, is_q[:, None] & inside)
    wide = x.to(tl.float32)
    k_at = k_out + (heads - HQ).to(tl.int64)[:, None] * k_head_stride + col
    tl.store(k_at, to_cache(wide, k_scale, TOP, k_out.dtype.element_ty), writes_k[:, None] & inside)
    v_at = v_out + (heads - HQ - HKV).to(tl.int64)[:, None] * v_head_stride + col
    tl.store(v_at, to_cache(wide, v_scale, TOP, v_out.dtype.element_ty), writes_v[:, None] & inside)


@triton.jit
def _rope_kv_kernel(
    qkv_ptr, qkv_stride, positions_ptr, axes_ptr, axis_stride, cos_sin_ptr, max_position, slot_ptr, k_ptr, v_ptr,
    k_block_stride, k_head_stride, k_slot_stride, v_block_stride, v_head_stride, v_slot_stride, num_slots,
    q_weight, k_weight, eps, k_scale_ptr, v_scale_ptr, q_scales_ptr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
    AXES: tl.constexpr, Q_SCALED: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    HALF: tl.constexpr = ROTARY // 2
    is_q = heads < HQ
    row_mask = heads < HQ + 2 * HKV
    cols = tl.arange(0, HALF_PAD)
    if AXES:
        axis = tl.load(axes_ptr + cols, cols < HALF, other=0).to(tl.int64)
        position = tl.load(positions_ptr + axis * axis_stride + token)
    else:
        position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), max_position - 1).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    cos = tl.load(cos_sin_ptr + position * ROTARY + cols, cols < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + cols, cols < HALF, other=0.0)[None, :]
    A_END: tl.constexpr = ROTARY if INTERLEAVED else HALF
    B_FIRST: tl.constexpr = 1 if INTERLEAVED else HALF
    if INTERLEAVED:
        cols = cols * 2
    wait_for_previous(PDL)
    row = qkv_ptr + token * qkv_stride
    a = _part(row, heads, row_mask, cols, 0, A_END, D)
    b = _part(row, heads, row_mask, cols, B_FIRST, ROTARY, D)
    if REST_PAD > 0:
        rest_cols = tl.arange(0, REST_PAD)
        rest = _part(row, heads, row_mask, rest_cols, ROTARY, D, D)
    rotate = (heads < HQ + HKV)[:, None]
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST_PAD > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        dtype: tl.constexpr = qkv_ptr.dtype.element_ty
        a_normed = weighed(a * scale, _weights(q_weight, k_weight, is_q, cols, 0, A_END), dtype, NORM)
        b_normed = weighed(b * scale, _weights(q_weight, k_weight, is_q, cols, B_FIRST, ROTARY), dtype, NORM)
        a = tl.where(rotate, a_normed.to(dtype).to(tl.float32), a)
        b = tl.where(rotate, b_normed.to(dtype).to(tl.float32), b)
        if REST_PAD > 0:
            rest_normed = weighed(rest * scale, _weights(q_weight, k_weight, is_q, rest_cols, ROTARY, D), dtype, NORM)
            rest = tl.where(rotate, rest_normed.to(dtype).to(tl.float32), rest)
    rotated_a = tl.where(rotate, a * cos - b * sin, a)
    rotated_b = tl.where(rotate, b * cos + a * sin, b)
    if Q_SCALED:
        factor = tl.where(is_q, tl.load(q_scales_ptr + position), 1.0)[:, None]
        rotated_a *= factor
        rotated_b *= factor
        if REST_PAD > 0:
            rest *= factor

    write = (slot >= 0) & (slot < num_slots)
    slot = tl.where(write, slot, 0)
    written = tl.where(write, HKV, 0)
    writes_k = (heads >= HQ) & (heads < HQ + written)
    writes_v = (heads >= HQ + HKV) & (heads < HQ + HKV + written)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_out = k_ptr + block * k_block_stride + offset * k_slot_stride
    v_out = v_ptr + block * v_block_stride + offset * v_slot_stride
    k_scale = 1.0
    v_scale = 1.0
    if SCALED:
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)
    _store_part(
        rotated_a, row, k_out, v_out, heads, is_q, writes_k, writes_v, cols, 0, A_END, k_head_stride, v_head_stride,
        k_scale, v_scale, HQ, HKV, D, TOP,
    )  # fmt: skip
    _store_part(
        rotated_b, row, k_out, v_out, heads, is_q, writes_k, writes_v, cols, B_FIRST, ROTARY, k_head_stride, v_head_stride,
        k_scale, v_scale, HQ, HKV, D, TOP,
    )  # fmt: skip
    if REST_PAD > 0:
        _store_part(
            rest, row, k_out, v_out, heads, is_q, writes_k, writes_v, rest_cols, ROTARY, D, k_head_stride, v_head_stride,
            k_scale, v_scale, HQ, HKV, D, TOP,
        )  # fmt: skip


def largest(dtype: torch.dtype) -> float:
    """The number at which an 8-bit cache saturates; 0 for other types, which do not."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def _check(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, num_q_heads: int, weights: tuple[torch.Tensor | None, ...], axes: torch.Tensor | None,
) -> None:  # fmt: skip
    _, num_kv_heads, _, head_dim = k_cache.shape
    tokens, positions = qkv.shape[0], positions if axes is None else positions[0]
    widths = num_q_heads * head_dim, (num_q_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] not in widths or v_cache.shape != k_cache.shape:
        raise ValueError(f"rope_kv: qkv {qkv.shape}, caches {k_cache.shape}, {v_cache.shape}, {num_q_heads} q heads do not fit")
    if positions.shape != (tokens,) or slots.shape != (tokens,) or cos_sin.shape[1] > head_dim or cos_sin.shape[1] % 2:
        raise ValueError(f"rope_kv: positions {positions.shape}, slots {slots.shape}, cos_sin {cos_sin.shape} do not fit")
    if positions.dtype != torch.int32 or slots.dtype != torch.int64 or cos_sin.dtype != torch.float32:
        raise TypeError("rope_kv: positions must be int32, slot_mapping int64, cos_sin float32")
    if qkv.stride(1) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1 or not cos_sin.is_contiguous():
        raise ValueError("rope_kv: qkv and the caches need unit stride in the last dimension, cos_sin must be contiguous")
    if k_cache.dtype != v_cache.dtype or not k_cache.dtype.is_floating_point:
        raise TypeError(f"rope_kv: caches of {k_cache.dtype}, {v_cache.dtype}")
    if (weights[0] is None) != (weights[1] is None) or any(w is not None and w.shape != (head_dim,) for w in weights):
        raise ValueError("rope_kv: q_weight and k_weight [D] go together")


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
    pdl: int = PLAIN,
    tile: int | None = None,
) -> None:
    """Rotate q in place in qkv and write k and v to the cache; shapes in the module's docstring.

    pdl is a mode of `dependent_launch`; positions and slot_mapping are read before the wait. `tile` is for tuning.
    """
    _check(qkv, positions, cos_sin, slot_mapping, k_cache, v_cache, num_q_heads, (q_weight, k_weight), axes)
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    tokens, rotary = qkv.shape[0], cos_sin.shape[1]
    num_kv_heads = num_kv_heads if qkv.shape[1] > num_q_heads * head_dim else 0
    if tokens == 0:
        return
    if axes is not None and (axes.shape != (rotary // 2,) or axes.dtype != torch.int32 or q_scales is not None):
        raise ValueError("rope_kv: axes must be int32, of each pair, and queries are not scaled with them")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("rope_kv: k_scale and v_scale go together")
    total_heads = num_q_heads + 2 * num_kv_heads
    half_pad = triton.next_power_of_2(max(rotary // 2, 1))
    rest_pad = triton.next_power_of_2(head_dim - rotary) if head_dim > rotary else 0
    tile = tile or choose_tile(tokens)
    heads = max(1, min(triton.next_power_of_2(total_heads), tile // triton.next_power_of_2(head_dim)))
    top = largest(k_cache.dtype)
    _rope_kv_kernel[(tokens, triton.cdiv(total_heads, heads))](
        qkv, qkv.stride(0), positions, positions if axes is None else axes, positions.stride(0), cos_sin, cos_sin.shape[0],
        slot_mapping, k_cache, v_cache,
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        num_blocks * block_size, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, eps,
        k_scale if k_scale is not None else qkv, v_scale if v_scale is not None else qkv,
        cos_sin if q_scales is None else q_scales,
        num_q_heads, num_kv_heads, head_dim, rotary, block_size, heads, half_pad, rest_pad,
        interleaved, 0 if q_weight is None else WEIGHS[weighs], k_scale is not None, axes is not None,
        q_scales is not None, top, pdl,
        num_warps=4, enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip
