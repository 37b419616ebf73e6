"""The products of LoRA where adapters are about as many as tokens: each token by itself, since tiles would be almost empty.

As products.py, which chooses: `shrink`, `expand` and `gated` with a program for each token and block of outputs, by the plain
cores, so they need next to no shared memory and wait, with their weights, beside the product that they add to. Moves
each token's A and B.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated as silu_times
from quire.kernels.elementwise.adapter_term import load_h, num_parts, padded
from quire.kernels.lora.tables import RANK_STEP, LoraSchedule, LoraWeights
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

BLOCK_R = 16  # ranks of a program of `shrink`
BLOCK_N = 128  # outputs of a program of `gated`


@triton.jit
def rows_of_a(ids, ranks, n, PIECES: tl.constexpr, R: tl.constexpr, RANK_STEP: tl.constexpr):
    """For the first token's adapter and places n in its h: A's rows among those of all slots, whether they are there, and
    whether h is to be written."""
    slot = tl.load(ids)
    rank = tl.load(ranks + slot * PIECES + n // R, (slot >= 0) & (n < PIECES * R), other=0)
    return slot.to(tl.int64) * (PIECES * R) + n, n % R < rank, n % R < padded(rank, RANK_STEP)


@triton.jit
def put_sums(h, parts, arrived, at, of_split, total, kept, SPLITS: tl.constexpr):
    """Store a chunk's sums of h at `at`. The last of the chunks' programs to arrive adds up all of them, in their order."""
    if SPLITS == 1:
        tl.store(h + at, total, kept)
    else:
        tl.store(parts + tl.program_id(2) * of_split + at, total, kept)
        tl.debug_barrier()  # all threads have stored
        mine = arrived + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(mine, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.load(parts + at, kept, other=0.0, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                total += tl.load(parts + s * of_split + at, kept, other=0.0, cache_modifier=".cg")
            tl.store(h + at, total, kept)
            tl.store(mine, 0)  # for the next launch


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x, h, parts, arrived, a, ranks, ids, x_stride, num_tokens,
    IN: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)  # of all pieces
    split = tl.program_id(2)
    slot = tl.load(ids + token)
    rank = tl.load(ranks + slot * PIECES + r // R, (slot >= 0) & (r < PIECES * R), other=0)
    has_rank = r % R < rank
    k = split * CHUNK + tl.arange(0, CHUNK)
    a_at = a + ((slot.to(tl.int64) * PIECES * R + r) * IN)[:, None] + k[None, :]
    of_a = tl.load(a_at, has_rank[:, None] & (k < IN)[None, :], other=0.0)  # constants, before the wait
    wait_for_previous(PDL)
    if tl.max(has_rank.to(tl.int32), 0) > 0:
        xs = tl.load(x + token * x_stride + k, k < IN, other=0.0).to(of_a.dtype).to(tl.float32)
        total = tl.sum(of_a.to(tl.float32) * xs[None, :], 1)
        kept = r % R < padded(rank, RANK_STEP)
        put_sums(h, parts, arrived, token * (PIECES * R) + r, num_tokens.to(tl.int64) * (PIECES * R), total, kept, SPLITS)


@triton.jit
def _term(h_at, b_at, weight, rank, is_output, parts_stride, PARTS: tl.constexpr, BLOCK_R: tl.constexpr):
    """float32 [N], B h of a token for outputs [N]; weight: B [N, BLOCK_R] of the first ranks."""
    k = tl.arange(0, BLOCK_R)
    hidden = load_h(h_at + k, k < rank, parts_stride, PARTS).to(weight.dtype).to(tl.float32)
    total = tl.sum(weight.to(tl.float32) * hidden[None, :], 1)
    for at in range(BLOCK_R, rank, BLOCK_R):
        more = tl.load(b_at + at, is_output[:, None] & (at + k < rank)[None, :], other=0.0)
        hidden = load_h(h_at + at + k, at + k < rank, parts_stride, PARTS).to(weight.dtype).to(tl.float32)
        total += tl.sum(more.to(tl.float32) * hidden[None, :], 1)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    y, h, b, ranks, scales, blocks, ids, y_stride, num_tokens,
    OUT: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_STEP: tl.constexpr, ALIGNED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = blocks + tl.program_id(1) * 4
    slot = tl.load(ids + token)
    piece, piece_begin = tl.load(block), tl.multiple_of(tl.load(block + 1), ALIGNED)
    begin, end = tl.multiple_of(tl.load(block + 2), ALIGNED), tl.multiple_of(tl.load(block + 3), ALIGNED)
    rank = padded(tl.load(ranks + slot * PIECES + piece, slot >= 0, other=0), RANK_STEP)
    scale = tl.load(scales + slot * PIECES + piece, slot >= 0, other=0.0)
    n, k = begin + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    is_output = n < end
    b_at = b + slot.to(tl.int64) * (OUT * R) + piece_begin * R + (n - piece_begin)[:, None] * rank + k[None, :]
    weight = tl.load(b_at, is_output[:, None] & (k < rank)[None, :], other=0.0)  # a constant, before the wait
    wait_for_previous(PDL)
    if rank > 0:
        at_y = y + token * y_stride + n
        sums = tl.load(at_y, is_output, other=0.0).to(tl.float32)
        h_at = h + token * (PIECES * R) + piece * R
        sums += _term(h_at, b_at, weight, rank, is_output, num_tokens * (PIECES * R), PARTS, BLOCK_R) * scale
        tl.store(at_y, sums.to(y.dtype.element_ty), is_output)


@triton.jit
def _gated_kernel(
    y, out, h, b, ranks, scales, ids, y_stride,
    HALF: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One piece is gate|up, two are gate and up."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(ids + token)
    rank = padded(tl.load(ranks + slot * PIECES, slot >= 0, other=0), RANK_STEP)
    up_rank = padded(tl.load(ranks + slot * PIECES + PIECES - 1, slot >= 0, other=0), RANK_STEP)
    scale = tl.load(scales + slot * PIECES, slot >= 0, other=0.0)
    up_scale = tl.load(scales + slot * PIECES + PIECES - 1, slot >= 0, other=0.0)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    is_output = n < HALF
    UP_PIECE: tl.constexpr = PIECES - 1
    UP_BEGIN: tl.constexpr = HALF * UP_PIECE
    of_slot = b + slot.to(tl.int64) * (2 * HALF * R)
    b_at = of_slot + n[:, None] * rank + k[None, :]
    up_at = of_slot + UP_BEGIN * R + (HALF - UP_BEGIN + n)[:, None] * up_rank + k[None, :]
    weight = tl.load(b_at, is_output[:, None] & (k < rank)[None, :], other=0.0)  # constants, before the wait
    up_weight = tl.load(up_at, is_output[:, None] & (k < up_rank)[None, :], other=0.0)
    wait_for_previous(PDL)
    at_y = y + token * y_stride + n
    gate = tl.load(at_y, is_output, other=0.0).to(tl.float32)
    up = tl.load(at_y + HALF, is_output, other=0.0).to(tl.float32)
    h_at = h + token * (PIECES * R)
    if rank > 0:
        gate += _term(h_at, b_at, weight, rank, is_output, 0, 1, BLOCK_R) * scale
    if up_rank > 0:
        up += _term(h_at + UP_PIECE * R, up_at, up_weight, up_rank, is_output, 0, 1, BLOCK_R) * up_scale
    tl.store(out + token * HALF + n, silu_times(gate, up, y.dtype.element_ty).to(out.dtype.element_ty), is_output)


def shrink(
    x: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, splits: int, chunk: int, pdl: int = PLAIN
) -> torch.Tensor:
    """h float32 [T, P * R]; splits, chunk: `products.num_splits`."""
    _, pieces, rank, num_inputs = weights.a.shape
    tokens, blocks = len(x), triton.cdiv(pieces * rank, BLOCK_R)
    h = torch.empty(tokens, pieces * rank, dtype=torch.float32, device=x.device)
    parts = torch.empty(splits, *h.shape, dtype=torch.float32, device=x.device) if splits > 1 else h
    _shrink_kernel[(tokens, blocks, splits)](
        x, h, parts, schedule.arrived, weights.a, weights.ranks, schedule.ids[which], x.stride(0), tokens,
        num_inputs, pieces, rank, chunk, splits, BLOCK_R, RANK_STEP, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return h


def expand(
    h: torch.Tensor, y: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, block_n: int, pdl: int = PLAIN
) -> torch.Tensor:
    """y [T, out], in place; block_n: of `weights.blocks`."""
    rank = weights.max_rank
    _expand_kernel[(len(y), len(weights.blocks))](
        y, h, weights.b, weights.ranks, weights.scales, weights.blocks, schedule.ids[which], y.stride(0), len(y),
        weights.b.shape[1] // rank, len(weights.pieces), rank, block_n, _block_r(rank), RANK_STEP, weights.alignment,
        num_parts(h), pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return y


def expand_gated(
    h: torch.Tensor, y: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, pdl: int = PLAIN
) -> torch.Tensor:
    """[T, out / 2] of y = gate|up [T, out]."""
    half, rank = y.shape[1] // 2, weights.max_rank
    out = torch.empty(len(y), half, dtype=y.dtype, device=y.device)
    _gated_kernel[(len(y), triton.cdiv(half, BLOCK_N))](
        y, out, h, weights.b, weights.ranks, weights.scales, schedule.ids[which], y.stride(0),
        half, len(weights.pieces), rank, BLOCK_N, _block_r(rank), RANK_STEP, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def _block_r(rank: int) -> int:
    return 32 if rank % 32 == 0 else 16
