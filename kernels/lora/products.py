"""The two products of LoRA for the tokens of many adapters at once: y[t, piece] += scale * B (A x[t]).

    shrink    h[t, piece, r] = sum over k of A[slot of t, piece, r, k] x[t, k]
    expand    y[t, n] += scale * sum over r of B[slot of t, n, r] h[t, piece of n, r]
    gated     silu(gate) * up of y = gate|up after `expand`, for all tokens

    look_up   h[t, 0, r] = A[slot of t, r, id of t]              of an embedding, in place of shrink

x [T, in], y [T, out] of any row stride, in a 16-bit type or float32; h float32. A tile of tokens has one adapter, or none
(schedule.py). `shrink` needs x alone: it is launched before the layer's product, which in a dependent launch loads its weights
meanwhile. Its programs are tiles times chunks of the inputs, and the last to arrive adds up the chunks, in their order. Where
adapters are about as many as tokens, rows.py has the products. Which of these it is, and the chunks, depends on the numbers of
tokens, adapter slots and inputs alone, so a token's sums do not depend on the other tokens. Ranks beyond an adapter's own are
not read. Moves each adapter's A and B once for each of its tiles, x once for each block of ranks, and y twice; `gated` y once
and its half once. `lora_reference` is the reference.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.elementwise.activation import gated as silu_times
from quire.kernels.elementwise.adapter_term import load_h, num_parts, padded
from quire.kernels.lora import rows
from quire.kernels.lora.rows import put_sums
from quire.kernels.lora.tables import BLOCK_N, RANK_STEP, LoraSchedule, LoraWeights, by_rows, is_large, num_tiles, tile_of
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

CHUNK = 512  # inputs
MAX_SPLITS = 64
LARGE_CHUNK, BLOCK_K = 2048, 128  # of large steps
GATED_BLOCK_N, LARGE_GATED_BLOCK_N = 128, 64


@triton.jit(do_not_specialize=["num_tokens", "tiles_stride"])
def _shrink_kernel(
    x, h, parts, arrived, a, ranks, order, tiles, x_stride, tiles_stride, num_tokens,
    IN: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, RANK_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)  # of all pieces
    rank = tl.load(ranks + slot * PIECES + r // R, (slot >= 0) & (r < PIECES * R), other=0)
    has_rank = r % R < rank
    split = tl.program_id(2)
    first = tl.load(tiles + tiles_stride + tile)
    lanes = tl.arange(0, TILE)
    is_used = tl.max(has_rank.to(tl.int32), 0) > 0
    is_token = lanes < tl.load(tiles + 2 * tiles_stride + tile, is_used, other=0)
    token = tl.load(order + first + lanes, is_token, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = a + ((slot.to(tl.int64) * PIECES * R + r) * IN)[None, :] + k[:, None]
    x_at = x + token[:, None] * x_stride + k[None, :]
    kept = is_token[:, None] & (r % R < padded(rank, RANK_STEP))[None, :]
    of_tokens = token[:, None] * (PIECES * R) + r[None, :]
    at, end = split * CHUNK, tl.where(is_used, tl.minimum(split * CHUNK + CHUNK, IN), 0)
    total = tl.zeros([TILE, BLOCK_R], tl.float32)
    if CHUNK == BLOCK_K:
        of_a = tl.load(a_at + at, has_rank[None, :] & (at + k < IN)[:, None], other=0.0)  # constants, before the wait
        wait_for_previous(PDL)
        xs = tl.load(x_at + at, is_token[:, None] & (at + k < IN)[None, :], other=0.0)
        total = tl.dot(xs.to(of_a.dtype), of_a, total, input_precision="ieee")
    else:
        wait_for_previous(PDL)
        for here in range(at, end, BLOCK_K):
            of_a = tl.load(a_at + here, has_rank[None, :] & (here + k < IN)[:, None], other=0.0)
            xs = tl.load(x_at + here, is_token[:, None] & (here + k < IN)[None, :], other=0.0)
            total = tl.dot(xs.to(of_a.dtype), of_a, total, input_precision="ieee")
    if is_used:
        put_sums(h, parts, arrived, of_tokens, num_tokens.to(tl.int64) * (PIECES * R), total, kept, SPLITS)


@triton.jit(do_not_specialize=["tiles_stride"])
def _look_up_kernel(
    ids, h, a, ranks, order, tiles, tiles_stride,
    VOCAB: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, RANK_STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile)
    rank = tl.load(ranks + slot, slot >= 0, other=0)
    if rank > 0:
        first = tl.load(tiles + tiles_stride + tile)
        count = tl.load(tiles + 2 * tiles_stride + tile)
        lanes, r = tl.arange(0, TILE), tl.arange(0, BLOCK)
        token = tl.load(order + first + lanes, lanes < count, other=0)
        row = tl.minimum(tl.maximum(tl.load(ids + token, lanes < count, other=0), 0), VOCAB - 1)
        is_token = (lanes < count)[:, None]
        row = slot.to(tl.int64) * VOCAB + row
        values = tl.load(a + row[:, None] * R + r[None, :], is_token & (r < rank)[None, :], other=0.0)
        kept = is_token & (r < padded(rank, RANK_STEP))[None, :]
        tl.store(h + token[:, None].to(tl.int64) * R + r[None, :], values.to(tl.float32), kept)


@triton.jit(do_not_specialize=["num_tokens", "tiles_stride"])
def _expand_kernel(
    y, h, b, ranks, scales, blocks, order, tiles, y_stride, tiles_stride, num_tokens,
    OUT: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, RANK_STEP: tl.constexpr, ALIGNED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    block = blocks + tl.program_id(1) * 4
    piece, piece_begin = tl.load(block), tl.multiple_of(tl.load(block + 1), ALIGNED)
    begin, end = tl.multiple_of(tl.load(block + 2), ALIGNED), tl.multiple_of(tl.load(block + 3), ALIGNED)
    slot = tl.load(tiles + tile)
    rank = padded(tl.load(ranks + slot * PIECES + piece, slot >= 0, other=0), RANK_STEP)
    scale = tl.load(scales + slot * PIECES + piece, slot >= 0, other=0.0)
    first = tl.load(tiles + tiles_stride + tile)
    lanes = tl.arange(0, TILE)
    is_token = lanes < tl.load(tiles + 2 * tiles_stride + tile, slot >= 0, other=0)
    token = tl.load(order + first + lanes, is_token, other=0).to(tl.int64)
    n = begin + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_R)
    h_at = h + token[:, None] * (PIECES * R) + k[None, :]
    b_at = b + slot.to(tl.int64) * (OUT * R) + piece_begin * R + (n - piece_begin)[None, :] * rank + k[:, None]
    is_output = (n < end)[None, :]
    weight = tl.load(b_at, is_output & (k < rank)[:, None], other=0.0)  # a constant, before the wait
    wait_for_previous(PDL)
    if rank > 0:
        acc = tl.zeros([TILE, BLOCK_N], tl.float32)
        for at in range(0, rank, BLOCK_R):
            if at > 0:
                weight = tl.load(b_at + at, is_output & (at + k < rank)[:, None], other=0.0)
            has_h = is_token[:, None] & (at + k < rank)[None, :]
            hidden = load_h(h_at + piece * R + at, has_h, num_tokens * (PIECES * R), PARTS)
            acc = tl.dot(hidden.to(weight.dtype), weight, acc, input_precision="ieee")
        at_y = y + token[:, None] * y_stride + n[None, :]
        inside = is_token[:, None] & is_output
        sums = tl.load(at_y, inside, other=0.0).to(tl.float32) + acc * scale
        tl.store(at_y, sums.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tiles_stride"])
def _gated_kernel(
    y, out, h, b, ranks, scales, order, tiles, y_stride, tiles_stride,
    HALF: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, RANK_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One piece is gate|up, two are gate and up."""
    tile = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(tiles + tile)
    rank = padded(tl.load(ranks + slot * PIECES, slot >= 0, other=0), RANK_STEP)
    up_rank = padded(tl.load(ranks + slot * PIECES + PIECES - 1, slot >= 0, other=0), RANK_STEP)
    scale = tl.load(scales + slot * PIECES, slot >= 0, other=0.0)
    up_scale = tl.load(scales + slot * PIECES + PIECES - 1, slot >= 0, other=0.0)
    first = tl.load(tiles + tiles_stride + tile)
    lanes = tl.arange(0, TILE)
    is_token = lanes < tl.load(tiles + 2 * tiles_stride + tile, slot >= 0, other=0)
    token = tl.load(order + first + lanes, is_token, other=0).to(tl.int64)
    k = tl.arange(0, BLOCK_R)
    h_at = h + token[:, None] * (PIECES * R) + k[None, :]
    UP_PIECE: tl.constexpr = PIECES - 1
    UP_BEGIN: tl.constexpr = HALF * UP_PIECE
    of_slot = b + slot.to(tl.int64) * (2 * HALF * R)
    b_at = of_slot + n[None, :] * rank + k[:, None]
    up_at = of_slot + UP_BEGIN * R + (HALF - UP_BEGIN + n)[None, :] * up_rank + k[:, None]
    is_output = (n < HALF)[None, :]
    weight = tl.load(b_at, is_output & (k < rank)[:, None], other=0.0)  # constants, before the wait
    up_weight = tl.load(up_at, is_output & (k < up_rank)[:, None], other=0.0)
    wait_for_previous(PDL)
    at_y = y + token[:, None] * y_stride + n[None, :]
    inside = is_token[:, None] & is_output
    gate = tl.load(at_y, inside, other=0.0).to(tl.float32)
    up = tl.load(at_y + HALF, inside, other=0.0).to(tl.float32)
    if rank > 0:
        acc = tl.zeros([TILE, BLOCK_N], tl.float32)
        for at in range(0, rank, BLOCK_R):
            if at > 0:
                weight = tl.load(b_at + at, is_output & (at + k < rank)[:, None], other=0.0)
            hidden = tl.load(h_at + at, is_token[:, None] & (at + k < rank)[None, :], other=0.0)
            acc = tl.dot(hidden.to(weight.dtype), weight, acc, input_precision="ieee")
        gate += acc * scale
    if up_rank > 0:
        acc = tl.zeros([TILE, BLOCK_N], tl.float32)
        for at in range(0, up_rank, BLOCK_R):
            if at > 0:
                up_weight = tl.load(up_at + at, is_output & (at + k < up_rank)[:, None], other=0.0)
            hidden = tl.load(h_at + UP_PIECE * R + at, is_token[:, None] & (at + k < up_rank)[None, :], other=0.0)
            acc = tl.dot(hidden.to(up_weight.dtype), up_weight, acc, input_precision="ieee")
        up += acc * up_scale
    values = silu_times(gate, up, y.dtype.element_ty)
    tl.store(out + token[:, None] * HALF + n[None, :], values.to(out.dtype.element_ty), inside)


def num_splits(num_inputs: int, least: int = CHUNK) -> tuple[int, int]:
    """(chunks, inputs of each) of a layer, not less than `least`, but for the last chunk."""
    chunk = max(least, triton.next_power_of_2(triton.cdiv(num_inputs, MAX_SPLITS)))
    return triton.cdiv(num_inputs, chunk), chunk


def add_lora(
    x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [T, out], with its tokens' adapters added in place; x [T, in], or int32 ids [T] of a table.

    which: the row of the schedule, of the step's tokens or of its samples. pdl: a mode of `dependent_launch`; the schedule must
    have been written before the chain.
    """
    return expand(shrink(x, weights, schedule, which, pdl=pdl), y, weights, schedule, which, pdl=pdl)


def shrink(x: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, *, pdl: int = PLAIN) -> torch.Tensor:
    """h float32 [T, P * R] for `expand` or `expand_gated`, of tokens that have an adapter; x as in `add_lora`."""
    if weights.is_table:
        return _looked_up(x, weights, schedule, which)
    slots, pieces, rank, num_inputs = weights.a.shape
    if x.shape[1] != num_inputs or x.stride(1) != 1:
        raise ValueError(f"shrink: x {x.shape} of strides {x.stride()}, A {weights.a.shape}")
    tokens = len(x)
    splits, chunk = num_splits(num_inputs, LARGE_CHUNK if is_large(tokens) else CHUNK)
    if by_rows(tokens, slots) and tokens * pieces * rank <= len(schedule.arrived) * rows.BLOCK_R:
        return rows.shrink(x, weights, schedule, which, splits, chunk, pdl)
    block_r, block_k = min(_block_r(rank), 32), chunk
    if is_large(tokens):
        block_r, block_k = min(triton.next_power_of_2(pieces * rank), 64), BLOCK_K
    blocks = triton.cdiv(pieces * rank, block_r)
    if num_tiles(tokens, slots) * blocks > len(schedule.arrived):
        splits, chunk, block_k = 1, triton.next_power_of_2(num_inputs), BLOCK_K
    grid = num_tiles(tokens, slots), blocks, splits
    h = torch.empty(tokens, pieces * rank, dtype=torch.float32, device=x.device)
    parts = torch.empty(splits, *h.shape, dtype=torch.float32, device=x.device) if splits > 1 else h
    order, tiles = schedule.order[which], schedule.tiles[which]
    _shrink_kernel[grid](
        x, h, parts, schedule.arrived, weights.a, weights.ranks, order, tiles, x.stride(0), tiles.stride(0), tokens,
        num_inputs, pieces, rank, chunk, splits, tile_of(tokens), block_r, block_k, RANK_STEP, pdl,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return h


def expand(
    h: torch.Tensor, y: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [T, out], in place; h of `shrink`, or its partial sums [S, T, P * R], of a product that has computed them."""
    if h.shape[-2] != len(y) or y.stride(1) != 1:
        raise ValueError(f"expand: h {h.shape}, y {y.shape} of strides {y.stride()}")
    slots, pieces, rank = len(weights.a), len(weights.pieces), weights.max_rank
    if by_rows(len(y), slots):
        return rows.expand(h, y, weights, schedule, which, BLOCK_N, pdl)
    order, tiles = schedule.order[which], schedule.tiles[which]
    _expand_kernel[(num_tiles(len(y), slots), len(weights.blocks))](
        y, h, weights.b, weights.ranks, weights.scales, weights.blocks, order, tiles, y.stride(0), tiles.stride(0), len(y),
        weights.b.shape[1] // rank, pieces, rank, tile_of(len(y)), BLOCK_N, _block_r(rank), RANK_STEP, weights.alignment,
        num_parts(h), pdl, num_warps=4, num_stages=1, **launch_options(pdl),
    )  # fmt: skip
    return y


def expand_gated(
    h: torch.Tensor, y: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, *, pdl: int = PLAIN
) -> torch.Tensor:
    """silu(gate) * up [T, out / 2] of y = gate|up [T, out] with the adapters added, of which y itself gets nothing."""
    half, pieces, rank = y.shape[1] // 2, len(weights.pieces), weights.max_rank
    if len(h) != len(y) or y.stride(1) != 1 or not weights.is_gate_up:
        raise ValueError(f"expand_gated: h {h.shape}, y {y.shape} of strides {y.stride()}, pieces {weights.pieces}")
    if by_rows(len(y), len(weights.a)):
        return rows.expand_gated(h, y, weights, schedule, which, pdl)
    out = torch.empty(len(y), half, dtype=y.dtype, device=y.device)
    order, tiles = schedule.order[which], schedule.tiles[which]
    block_n = LARGE_GATED_BLOCK_N if is_large(len(y)) else GATED_BLOCK_N
    _gated_kernel[(num_tiles(len(y), len(weights.a)), triton.cdiv(half, block_n))](
        y, out, h, weights.b, weights.ranks, weights.scales, order, tiles, y.stride(0), tiles.stride(0),
        half, pieces, rank, tile_of(len(y)), block_n, _block_r(rank), RANK_STEP, pdl, num_warps=4, num_stages=1,
        **launch_options(pdl),
    )  # fmt: skip
    return out


def _block_r(rank: int) -> int:
    return next(n for n in (64, 32, 16) if rank % n == 0)


def _looked_up(ids: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int) -> torch.Tensor:
    """h float32 [T, R]"""
    slots, _, vocab, rank = weights.a.shape
    h = torch.empty(len(ids), rank, dtype=torch.float32, device=ids.device)
    order, tiles = schedule.order[which], schedule.tiles[which]
    _look_up_kernel[(num_tiles(len(ids), slots),)](
        ids, h, weights.a, weights.ranks, order, tiles, tiles.stride(0), vocab, rank, tile_of(len(ids)),
        triton.next_power_of_2(rank), RANK_STEP,
    )  # fmt: skip
    return h
