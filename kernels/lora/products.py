"""The two products of LoRA for the tokens of many adapters at once: y[t, piece] += scale * B (A x[t]).

    shrink    h[s, p, piece, r] = sum of A[slot, piece, r, k] x[order[p], k]     k in the s-th chunk of the inputs
    expand    y[order[p], n] += scale * sum over r of B[slot, n, r] (sum over s of h[s, p, piece of n, r])

    look_up   h[0, p, 0, r] = A[slot, r, id of order[p]]         of an embedding, in place of shrink

x [T, in], y [T, out] of any row stride, in a 16-bit type or float32; h float32. A tile of up to 16 tokens has one adapter
(schedule.py). A program of `shrink` is a tile, some ranks of a piece and, if the step is small, one chunk; of a larger step
it adds up the chunks itself, in the same order. Chunks depend on the layer alone and each tile is 16 rows, so a token's sums do
not depend on the rest of the batch. Ranks beyond an adapter's own are not read. Moves each adapter's A and B once for every 16
of its tokens, x once for each 16 to 64 ranks, and y twice. `lora_reference.add_lora` is the reference.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.lora.tables import BLOCK_N, RANK_STEP, TILE, LoraSchedule, LoraWeights, num_tiles
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

CHUNK = 512  # inputs
MAX_SPLITS = 32
SPLIT_TOKENS = 256  # a step of more tokens has enough tiles to fill the GPU
BLOCK_K = 128


@triton.jit(do_not_specialize=["h_tokens", "tiles_stride"])
def _shrink_kernel(
    x, h, a, ranks, order, tiles, x_stride, tiles_stride, h_tokens,
    IN: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, JOINED: tl.constexpr,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile)
    first_rank = tl.program_id(1) * BLOCK_R
    piece = first_rank // R
    rank = tl.load(ranks + slot * PIECES + piece, slot >= 0, other=0)
    split = tl.program_id(2)
    first = tl.load(tiles + tiles_stride + tile)
    lanes = tl.arange(0, TILE)
    is_token = lanes < tl.load(tiles + 2 * tiles_stride + tile, slot >= 0, other=0)
    token = tl.load(order + first + lanes, is_token, other=0).to(tl.int64)
    r = first_rank + tl.arange(0, BLOCK_R)
    has_rank = r - piece * R < rank
    k = tl.arange(0, BLOCK_K)
    a_at = a + ((slot.to(tl.int64) * PIECES * R + r) * IN)[None, :] + k[:, None]
    start = split * CHUNK
    rows = tl.load(a_at + start, has_rank[None, :] & (start + k < IN)[:, None], other=0.0)  # a constant, before the wait
    wait_for_previous(PDL)
    if first_rank - piece * R < rank:
        x_at = x + token[:, None] * x_stride + k[None, :]
        total = tl.zeros([TILE, BLOCK_R], tl.float32)
        last = split + 1
        if JOINED:
            last = SPLITS
        for s in range(split, last):
            part = tl.zeros([TILE, BLOCK_R], tl.float32)
            for at in range(s * CHUNK, tl.minimum(s * CHUNK + CHUNK, IN), BLOCK_K):
                if at > start:
                    rows = tl.load(a_at + at, has_rank[None, :] & (at + k < IN)[:, None], other=0.0)
                xs = tl.load(x_at + at, is_token[:, None] & (at + k < IN)[None, :], other=0.0)
                part = tl.dot(xs.to(rows.dtype), rows, part, input_precision="ieee")
            total += part
        place = (split * h_tokens + first + lanes).to(tl.int64)
        tl.store(h + place[:, None] * (PIECES * R) + r[None, :], total, is_token[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["tiles_stride"])
def _look_up_kernel(
    ids, h, a, ranks, order, tiles, tiles_stride, VOCAB: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
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
        inside = (lanes < count)[:, None] & (r < rank)[None, :]
        row = slot.to(tl.int64) * VOCAB + row
        values = tl.load(a + row[:, None] * R + r[None, :], inside, other=0.0)
        tl.store(h + (first + lanes)[:, None] * R + r[None, :], values.to(tl.float32), inside)


@triton.jit(do_not_specialize=["h_tokens", "tiles_stride"])
def _expand_kernel(
    y, h, b, ranks, scales, blocks, order, tiles, y_stride, tiles_stride, h_tokens,
    OUT: tl.constexpr, PIECES: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, RANK_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    block = blocks + tl.program_id(1) * 4
    piece, piece_begin, begin, end = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    slot = tl.load(tiles + tile)
    rank = tl.load(ranks + slot * PIECES + piece, slot >= 0, other=0)
    scale = tl.load(scales + slot * PIECES + piece, slot >= 0, other=0.0)
    first = tl.load(tiles + tiles_stride + tile)
    lanes = tl.arange(0, TILE)
    is_token = lanes < tl.load(tiles + 2 * tiles_stride + tile, slot >= 0, other=0)
    token = tl.load(order + first + lanes, is_token, other=0).to(tl.int64)
    n = begin + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_R)
    width = tl.multiple_of((rank + RANK_STEP - 1) // RANK_STEP * RANK_STEP, RANK_STEP)
    b_at = b + slot.to(tl.int64) * (OUT * R) + piece_begin * R + (n - piece_begin)[None, :] * width + k[:, None]
    is_output = (n < end)[None, :]
    weight = tl.load(b_at, is_output & (k < rank)[:, None], other=0.0)  # a constant, before the wait
    wait_for_previous(PDL)
    if rank > 0:
        acc = tl.zeros([TILE, BLOCK_N], tl.float32)
        for at in range(0, rank, BLOCK_R):
            if at > 0:
                weight = tl.load(b_at + at, is_output & (at + k < rank)[:, None], other=0.0)
            hidden = tl.zeros([TILE, BLOCK_R], tl.float32)
            inside = is_token[:, None] & (at + k < rank)[None, :]
            for s in tl.static_range(SPLITS):
                place = (s * h_tokens + first + lanes).to(tl.int64)
                hidden += tl.load(h + place[:, None] * (PIECES * R) + piece * R + at + k[None, :], inside, other=0.0)
            acc = tl.dot(hidden.to(weight.dtype), weight, acc, input_precision="ieee")
        at_y = y + token[:, None] * y_stride + n[None, :]
        inside = is_token[:, None] & is_output
        sums = tl.load(at_y, inside, other=0.0).to(tl.float32) + acc * scale
        tl.store(at_y, sums.to(y.dtype.element_ty), inside)


def num_splits(num_inputs: int) -> tuple[int, int]:
    """(chunks, inputs of each) of a layer."""
    chunk = max(CHUNK, triton.cdiv(triton.cdiv(num_inputs, MAX_SPLITS), BLOCK_K) * BLOCK_K)
    return triton.cdiv(num_inputs, chunk), chunk


def add_lora(
    x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, *, pdl: int = PLAIN
) -> torch.Tensor:
    """y [T, out], with its tokens' adapters added in place; x [T, in], or int32 ids [T] of a table.

    which: the row of the schedule, of the step's tokens or of its samples. pdl: a mode of `dependent_launch`; the schedule must
    have been written before the chain.
    """
    if len(x) != len(y) or y.stride(1) != 1:
        raise ValueError(f"add_lora: x {x.shape}, y {y.shape} of strides {y.stride()}")
    h = _looked_up(x, weights, schedule, which) if weights.is_table else _shrunk(x, weights, schedule, which, pdl)
    slots, pieces, rank = len(weights.a), len(weights.pieces), weights.max_rank
    order, tiles = schedule.order[which], schedule.tiles[which]
    _expand_kernel[(num_tiles(len(x), slots), len(weights.blocks))](
        y, h, weights.b, weights.ranks, weights.scales, weights.blocks, order, tiles, y.stride(0), tiles.stride(0), len(x),
        weights.b.shape[1] // rank, pieces, rank, len(h), TILE, BLOCK_N, _block_r(rank), RANK_STEP, pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return y


def _block_r(rank: int) -> int:
    return next(n for n in (64, 32, 16) if rank % n == 0)


def _shrunk(x: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int, pdl: int) -> torch.Tensor:
    """h float32 [chunks, T, P * R]"""
    slots, pieces, rank, num_inputs = weights.a.shape
    if x.shape[1] != num_inputs or x.stride(1) != 1:
        raise ValueError(f"add_lora: x {x.shape} of strides {x.stride()}, A {weights.a.shape}")
    tokens, block_r = len(x), _block_r(rank)
    splits, chunk = num_splits(num_inputs)
    joined = tokens > SPLIT_TOKENS
    kept = 1 if joined else splits
    h = torch.empty(kept, tokens, pieces * rank, dtype=torch.float32, device=x.device)
    order, tiles = schedule.order[which], schedule.tiles[which]
    _shrink_kernel[(num_tiles(tokens, slots), pieces * rank // block_r, kept)](
        x, h, weights.a, weights.ranks, order, tiles, x.stride(0), tiles.stride(0), tokens,
        num_inputs, pieces, rank, chunk, splits, joined, TILE, block_r, BLOCK_K, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return h


def _looked_up(ids: torch.Tensor, weights: LoraWeights, schedule: LoraSchedule, which: int) -> torch.Tensor:
    """h float32 [1, T, R]"""
    slots, _, vocab, rank = weights.a.shape
    h = torch.empty(1, len(ids), rank, dtype=torch.float32, device=ids.device)
    order, tiles = schedule.order[which], schedule.tiles[which]
    _look_up_kernel[(num_tiles(len(ids), slots),)](
        ids, h, weights.a, weights.ranks, order, tiles, tiles.stride(0), vocab, rank, TILE, triton.next_power_of_2(rank)
    )
    return h
