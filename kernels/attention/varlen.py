"""Attention over packed rows, without a cache: every token is a query and a key of its own row. Encoders use it.

    s[m, n] = scale * <q[m], k[n]>                       for n in m's row, m - before <= n <= m + after, else -inf
    s       = softcap * tanh(s / softcap)                if the layer caps its scores
    s      += relative[h, clamp(n - m)]                  if it has a bias by relative position
    s      -= alibi_scale * slope[h] * |n - m|           if it has ALiBi
    out[m]  = sum_n exp(s[m, n]) * v[n] / sum_n exp(s[m, n]),   0 for padding

q, out [T, Hq, D], k, v [T, Hkv, D]: any strides but 1 in D, so they can be views of what the product of a layer left. T tokens
are cut into tiles of queries without regard to rows, so a tile holds several short rows, no padding is computed, and the grid
depends on T alone: a launch can be captured. A tile runs over the keys from the beginning of its first row to the end of its
last, or as far as the window reaches; tiles of keys that all its queries see are not masked. A query of one row costs a tile
the keys of the other, which for long rows is at most one tile of queries a row.

FLOPs: 4 * Hq * D a pair of tile and key. Bytes: q and out once; k and v once a tile of queries, mostly from L2.
Online softmax as in tile.py: running maximum and sum in fp32, in base 2.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.attention.score_shape import PLAIN_SCORES, ScoreShape
from quire.kernels.attention.varlen_reference import ALL, Reach

LOG2_E = 1.4426950408889634
NO_LIMIT = 1 << 30


@triton.jit
def _fold(
    acc,
    row_max,
    row_sum,
    q,
    tokens,
    firsts,
    ends,
    key_ptr,
    value_ptr,
    begin,
    stop,
    end_key,
    qk_scale,
    softcap,
    slope,
    relative_ptr,
    before,
    after,
    stride_key,
    stride_value,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DISTANCES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold keys [begin, stop) into (acc [M, HEAD_PAD], row_max [M], row_sum [M]); keys from end_key on are not read."""
    offs_n = tl.arange(0, TILE)
    offs_d = tl.arange(0, HEAD_PAD)
    in_head = offs_d[None, :] < HEAD_DIM
    for first in range(begin, stop, TILE):
        keys = first + offs_n
        line = keys.to(tl.int64)
        mask = in_head
        if MASKED:  # zero, not garbage: 0 * NaN would pass through the product with v
            mask = mask & (keys < end_key)[:, None]
        k = tl.load(key_ptr + line[:, None] * stride_key + offs_d[None, :], mask=mask, other=0.0)
        v = tl.load(value_ptr + line[:, None] * stride_value + offs_d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(scores * (qk_scale * (2.0 / softcap))) + 1.0))
        else:
            scores = scores * qk_scale
        if DISTANCES > 0:
            distance = tl.minimum(tl.maximum(keys[None, :] - tokens[:, None], -(DISTANCES // 2)), DISTANCES // 2)
            scores += tl.load(relative_ptr + distance + DISTANCES // 2) * 1.4426950408889634
        if ALIBI:
            scores -= slope * tl.abs(keys[None, :] - tokens[:, None]).to(tl.float32)
        if MASKED:
            seen = (keys[None, :] >= firsts[:, None]) & (keys[None, :] < ends[:, None])
            seen = seen & (keys[None, :] >= tokens[:, None] - before) & (keys[None, :] <= tokens[:, None] + after)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = new_max
        if MASKED:  # a query that has seen no key yet keeps -inf; exp2(-inf - -inf) would be NaN
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc=acc * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_tokens", "before", "after"])
def _varlen_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    firsts_ptr,
    ends_ptr,
    slopes_ptr,
    relative_ptr,
    qk_scale,
    softcap,
    alibi_scale,
    num_tokens,
    before,
    after,
    stride_q,
    stride_q_head,
    stride_key,
    stride_key_head,
    stride_value,
    stride_value_head,
    stride_out,
    stride_out_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DISTANCES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    kv_head = head // GROUP
    first_token = tl.program_id(0) * ROWS
    last_token = tl.minimum(first_token + ROWS, num_tokens) - 1
    tokens = first_token + tl.arange(0, ROWS)
    live = tokens < num_tokens
    firsts = tl.load(firsts_ptr + tokens, mask=live, other=0)
    ends = tl.load(ends_ptr + tokens, mask=live, other=0)
    # Keys: [begin, ..) seen by some, [full_begin, full_end) whole tiles seen by all, [.., end) seen by some.
    begin = tl.maximum(tl.load(firsts_ptr + first_token), first_token - before)
    end = tl.minimum(tl.load(ends_ptr + last_token), last_token + after + 1)
    end = tl.minimum(end, num_tokens)
    seen_from = tl.maximum(tl.load(firsts_ptr + last_token), last_token - before)
    seen_to = tl.minimum(tl.load(ends_ptr + first_token), first_token + after + 1)
    full_begin = begin + tl.cdiv(tl.maximum(seen_from - begin, 0), TILE) * TILE
    full_end = full_begin + tl.maximum(seen_to - full_begin, 0) // TILE * TILE

    offs_d = tl.arange(0, HEAD_PAD)
    line = tokens.to(tl.int64)
    mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + line[:, None] * stride_q + head * stride_q_head + offs_d[None, :], mask=mask, other=0.0)
    key_ptr += kv_head * stride_key_head
    value_ptr += kv_head * stride_value_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head) * (alibi_scale * 1.4426950408889634)
    relative_ptr += head * DISTANCES
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc, row_max, row_sum = _fold(
        acc, row_max, row_sum, q, tokens, firsts, ends, key_ptr, value_ptr, begin, tl.minimum(full_begin, end), end, qk_scale,
        softcap, slope, relative_ptr, before, after, stride_key, stride_value, HEAD_DIM, HEAD_PAD, TILE, True, SOFTCAP, ALIBI,
        DISTANCES, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _fold(
        acc, row_max, row_sum, q, tokens, firsts, ends, key_ptr, value_ptr, full_begin, full_end, end, qk_scale,
        softcap, slope, relative_ptr, before, after, stride_key, stride_value, HEAD_DIM, HEAD_PAD, TILE, False, SOFTCAP, ALIBI,
        DISTANCES, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _fold(
        acc, row_max, row_sum, q, tokens, firsts, ends, key_ptr, value_ptr, full_end, end, end, qk_scale,
        softcap, slope, relative_ptr, before, after, stride_key, stride_value, HEAD_DIM, HEAD_PAD, TILE, True, SOFTCAP, ALIBI,
        DISTANCES, PRECISION,
    )  # fmt: skip
    values = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    out_offset = line[:, None] * stride_out + head * stride_out_head + offs_d[None, :]
    tl.store(out_ptr + out_offset, values.to(out_ptr.dtype.element_ty), mask=mask)


def choose_tiles(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(queries of a tile, keys of a tile, warps)."""
    if dtype == torch.float32:
        return 32, 32, 4
    if head_dim > 128:
        return 64, 32, 4
    return (128, 64, 8) if num_tokens >= 4096 else (64, 64, 4)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    *,
    scale: float,
    reach: Reach = ALL,
    shape: ScoreShape = PLAIN_SCORES,
    relative: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, Hq, D], k, v [T, Hkv, D] -> [T, Hq, D], dense. firsts, ends: `row_spans` of the rows.

    relative float32 [Hq, 2 n + 1], dense: biases of distances -n to n, key - query, which clamp there. Raises ValueError for
    tensors that the kernel would misread.
    """
    num_tokens, num_heads, head_dim = q.shape
    _check(q, k, v, firsts, ends, scale, shape, relative)
    rows, tile, num_warps = choose_tiles(num_tokens, head_dim, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    before, after = (NO_LIMIT if far is None else min(far, NO_LIMIT) for far in reach)
    _varlen_kernel[(triton.cdiv(num_tokens, rows), num_heads)](
        q,
        k,
        v,
        out,
        firsts,
        ends,
        firsts if shape.slopes is None else shape.slopes,
        firsts if relative is None else relative,
        scale * LOG2_E,
        shape.softcap,
        shape.alibi_scale,
        num_tokens,
        before,
        after,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        GROUP=num_heads // k.shape[1],
        HEAD_DIM=head_dim,
        HEAD_PAD=max(16, triton.next_power_of_2(head_dim)),
        ROWS=rows,
        TILE=tile,
        SOFTCAP=shape.softcap > 0.0,
        ALIBI=shape.slopes is not None,
        DISTANCES=0 if relative is None else relative.shape[1],
        PRECISION="ieee",
        num_warps=num_warps,
        num_stages=2,
    )
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    shape: ScoreShape,
    relative: torch.Tensor | None,
) -> None:
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the last dimension of q, k and v must be contiguous")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if firsts.shape != (len(q),) or ends.shape != (len(q),) or firsts.dtype != torch.int32 or ends.dtype != torch.int32:
        raise ValueError("firsts and ends must be int32 [T]")
    if shape.sinks is not None or shape.rounds_alibi:
        raise ValueError("attention over packed rows has neither sinks nor rounded ALiBi")
    if relative is not None and (
        relative.dim() != 2 or len(relative) != q.shape[1] or relative.shape[1] % 2 == 0 or not relative.is_contiguous()
    ):
        raise ValueError(f"relative must be dense [Hq, 2 n + 1], not {tuple(relative.shape)}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    shape.check(q.shape[1])
