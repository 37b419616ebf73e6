"""Top-k, top-p and min-p by threshold search: one program for each row with such a filter, after the sampler's first pass.

1. A lower bound on the threshold from the first pass's results: the k-th largest block maximum, the min-p bound, or, for top-p
   alone, (1 - p) * mass / V: tokens below it have less than 1 - p together.
2. Tokens above the bound go into a list of CANDIDATES, in order, from the blocks with a maximum that reaches it. If they are
   more, the searches run over the whole row instead (read from L2).
3. The largest t with #{x >= t} >= k, then the largest t with mass{x >= t} >= p * mass{x kept so far}: searches on the
   order-preserving integer of the float, three pivots a pass, in as many bits as the logits' dtype has.
4. Exponential race over the tokens at or above t.

A count is exact. A mass is a float32 sum, so a token at a rank within its rounding of p may be kept or not.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.sampling.sampler_logits import (
    BLOCK,
    NO_TOKEN,
    PURPOSE_TOKEN,
    S_MIN_P,
    S_SEED_HI,
    S_SEED_LO,
    S_TEMPERATURE,
    S_TOP_K,
    S_TOP_P,
    end_window,
    float_param,
    is_filtered,
    leaves_nothing,
    load_logits,
    log_exponential,
    noise_bits,
    processors_of_row,
    row_state,
)
from quire.kernels.step import tables as words
from quire.kernels.step.tables import SamplerWorkspace, SlotTables

TILE_BLOCKS = 8
MAX_REGISTERS = 128  # of a thread: two programs an SM, almost no spills; the compiler alone takes 209
KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that are always 0 for the dtype


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """An int32 that orders as x does; low bits that carry nothing are dropped."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _key_of_bound(x, SHIFT: tl.constexpr):
    """The least key of a value that is at least x, if x need not be a value of the logits' dtype."""
    full = _key(x, 0).to(tl.int64)
    return tl.where(full >= 0, full + ((1 << SHIFT) - 1), full) >> SHIFT


@triton.jit
def _load_source(
    compact, candidates_row, logits_row, processors, mask_row, cols, n,
    PROCESSORS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Values at cols: of the candidates, or of the row."""
    if compact:
        x = tl.load(candidates_row + cols, cols < n, other=-float("inf"))
    else:
        x = load_logits(logits_row, processors, mask_row, cols, n, PROCESSORS, MASK, WINDOW)
    return x


@triton.jit
def _weight_above(
    q1, q2, q3, by_mass, top, scale,
    compact, candidates_row, logits_row, processors, mask_row, n,
    TILE: tl.constexpr, SHIFT: tl.constexpr, PROCESSORS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Number (or mass) of the values with key >= q, for each of three q."""
    f1 = tl.zeros([TILE], tl.float32)
    f2 = tl.zeros([TILE], tl.float32)
    f3 = tl.zeros([TILE], tl.float32)
    for start in range(0, n, TILE):
        cols = start + tl.arange(0, TILE)
        x = _load_source(compact, candidates_row, logits_row, processors, mask_row, cols, n, PROCESSORS, MASK, WINDOW)
        weight = tl.where(by_mass == 1, tl.exp((x - top) * scale), 1.0)  # values beyond n have no key of interest
        key = _key(x, SHIFT)
        f1 += tl.where(key >= q1, weight, 0.0)
        f2 += tl.where(key >= q2, weight, 0.0)
        f3 += tl.where(key >= q3, weight, 0.0)
    return tl.sum(f1, 0), tl.sum(f2, 0), tl.sum(f3, 0)


@triton.jit
def _kth_block_maximum(maxima, k, num_blocks, SHIFT: tl.constexpr):
    """A key that at least k maxima reach: the largest, or nearly (12 halvings of the range)."""
    keys = _key(maxima, SHIFT).to(tl.int64)
    empty = _key(tl.full([1], -float("inf"), tl.float32), SHIFT).to(tl.int64)
    lo = tl.max(empty, 0)
    if k <= num_blocks:
        hi = tl.max(keys, 0)
        lowest = tl.min(tl.where(maxima == -float("inf"), hi, keys), 0)
        if tl.sum((keys >= lowest).to(tl.int32), 0) >= k:
            lo = lowest
            for _ in range(12):
                middle = (lo + hi + 1) >> 1
                enough = tl.sum((keys >= middle).to(tl.int32), 0) >= k
                lo = tl.where(enough, middle, lo)
                hi = tl.maximum(tl.where(enough, hi, middle - 1), lo)
    return lo


@triton.jit
def _filter_kernel(
    logits, stride, counts, counts_stride, entries, multiplier, pool_rows, token_mask, token_mask_stride, bitmask, mask_stride,
    row_slots, input_ids, places, positions, slot_params, block_max, block_sum, near_blocks, candidates, candidate_ids, sampled,
    V, num_blocks, num_slots,
    CAP: tl.constexpr, BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr, SHIFT: tl.constexpr, PROCESSORS: tl.constexpr,
    MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = TILE_BLOCKS * BLOCK
    param_row, position, slot = row_state(row, row_slots, positions, slot_params, num_slots)
    if is_filtered(param_row, V):
        processors = processors_of_row(
            row, slot, param_row, counts, counts_stride, entries, multiplier, pool_rows, token_mask, token_mask_stride,
            input_ids, places, PROCESSORS, WINDOW,
        )  # fmt: skip
        scale = 1.0 / float_param(param_row, S_TEMPERATURE)
        temperature = float_param(param_row, S_TEMPERATURE)
        k = tl.load(param_row + S_TOP_K)
        top_p = float_param(param_row, S_TOP_P)
        min_p = float_param(param_row, S_MIN_P)
        by_count = (k > 0) & (k < V)
        logits_row = logits + row * stride
        mask_row = bitmask + row * mask_stride
        candidates_row = candidates + row * CAP
        ids_row = candidate_ids + row * CAP

        # 1. bounds
        blocks = tl.arange(0, BLOCKS)
        maxima = tl.load(block_max + row * num_blocks + blocks, blocks < num_blocks, other=-float("inf"))
        top = tl.max(maxima, 0)
        top = tl.where(top == -float("inf"), 0.0, top)
        sums = tl.load(block_sum + row * num_blocks + blocks, blocks < num_blocks, other=0.0)
        mass = tl.sum(sums * tl.exp((maxima - top) * scale), 0)
        highest = tl.max(_key(maxima, SHIFT).to(tl.int64), 0)
        bound = tl.max(_key(tl.full([1], -float("inf"), tl.float32), SHIFT).to(tl.int64), 0)
        if by_count:
            bound = _kth_block_maximum(maxima, k, num_blocks, SHIFT)
        if min_p > 0.0:
            bound = tl.maximum(bound, _key_of_bound(top + temperature * tl.log(min_p), SHIFT))
        alone = (by_count == 0) & (min_p <= 0.0)
        if alone:
            least = top + temperature * tl.log(tl.maximum(0.99 * (1.0 - top_p) * mass / V, 1.2e-38))
            bound = _key(least, SHIFT).to(tl.int64)
        bound = tl.minimum(bound, highest)

        # 2. candidates: from the blocks that reach the bound
        near = (_key(maxima, SHIFT).to(tl.int64) >= bound) & (blocks < num_blocks)
        near_row = near_blocks + row * num_blocks
        tl.store(near_row + tl.cumsum(near.to(tl.int32), 0) - 1, blocks, near)
        num_near = tl.sum(near.to(tl.int32), 0)
        tl.debug_barrier()  # other threads read the values stored here and below
        n = 0
        start = 0
        while (start < num_near) & (n <= CAP):
            place = start + tl.arange(0, TILE_BLOCKS)
            block = tl.load(near_row + place, place < num_near, other=num_blocks)
            cols = tl.reshape(block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], [TILE])
            x = load_logits(logits_row, processors, mask_row, cols, V, PROCESSORS, MASK, WINDOW)
            keep = (_key(x, SHIFT) >= bound) & (cols < V)
            place = n + tl.cumsum(keep.to(tl.int32), 0) - 1
            fits = keep & (place < CAP)
            tl.store(candidates_row + place, x, fits)
            tl.store(ids_row + place, cols, fits)
            n += tl.sum(keep.to(tl.int32), 0)
            start += TILE_BLOCKS
        tl.debug_barrier()
        compact = n <= CAP
        length = tl.where(compact, n, V)

        # 3. threshold: the largest key t of [threshold, highest] with weight{key >= t} >= target, first by count, then by mass.
        # One loop for both: functions that it calls are compiled once for each place that calls them.
        threshold = bound
        for by_mass in range(1 - by_count.to(tl.int32), 1 + (top_p < 1.0).to(tl.int32)):
            lo, hi = threshold, highest
            unsummed = (by_mass == 1) & (alone == 0)  # then the remaining mass must be computed first
            while unsummed | (lo < hi):
                step = (hi - lo + 3) // 4
                q1 = tl.where(unsummed, lo, lo + step)
                q2 = tl.minimum(lo + 2 * step, hi)
                q3 = tl.minimum(q2 + step, hi)
                f1, f2, f3 = _weight_above(
                    q1, q2, q3, by_mass, top, scale, compact, candidates_row, logits_row, processors, mask_row, length,
                    TILE, SHIFT, PROCESSORS, MASK, WINDOW,
                )  # fmt: skip
                if unsummed:
                    mass = f1
                    unsummed = lo != lo
                else:
                    target = tl.where(by_mass == 1, top_p * mass, k.to(tl.float32))
                    new_lo = tl.where(f3 >= target, q3, tl.where(f2 >= target, q2, tl.where(f1 >= target, q1, lo)))
                    new_hi = tl.where(f3 >= target, hi, tl.where(f2 >= target, q3 - 1, tl.where(f1 >= target, q2 - 1, q1 - 1)))
                    lo = new_lo
                    hi = tl.maximum(new_hi, new_lo)
            threshold = lo

        # 4. race
        seed_lo = tl.load(param_row + S_SEED_LO)
        seed_hi = tl.load(param_row + S_SEED_HI)
        best = -float("inf")
        token = 0
        for start in range(0, length, TILE):
            cols = start + tl.arange(0, TILE)
            x = _load_source(compact, candidates_row, logits_row, processors, mask_row, cols, length, PROCESSORS, MASK, WINDOW)
            ids = cols
            if compact:
                ids = tl.load(ids_row + cols, cols < length, other=0)
            score = (x - top) * scale - log_exponential(noise_bits(seed_lo, seed_hi, position, PURPOSE_TOKEN, ids))
            score = tl.where(_key(x, SHIFT) >= threshold, score, -float("inf"))
            tile_best = tl.max(score, 0)
            tile_token = tl.min(tl.where(score == tile_best, ids, V), 0)
            token = tl.where(tile_best > best, tile_token, token)
            best = tl.maximum(tile_best, best)
        token = tl.minimum(token, V - 1)
        if PROCESSORS:
            token = tl.where(leaves_nothing(maxima, processors), NO_TOKEN, token)
        token = end_window(token, maxima, row, places, MASK, WINDOW)
        tl.store(sampled + row, token.to(tl.int32))


def launch_filter(
    source: tuple[Any, ...],
    positions: torch.Tensor,
    tables: SlotTables,
    workspace: SamplerWorkspace,
    rows: int,
    vocab: int,
    processors: int,
    masked: bool,
    window: int,
) -> None:
    """Sample the rows that have a filter; `source`: first arguments of the sampler's kernels, `processors` and `window`: their
    PROCESSORS and WINDOW.
    """
    shift = 0 if processors else KEY_SHIFT[source[0].dtype]
    num_blocks = triton.cdiv(vocab, words.SAMPLER_BLOCK)
    padded_blocks = triton.next_power_of_2(num_blocks)
    _filter_kernel[(rows,)](
        *source, positions, tables.params, workspace.block_max, workspace.block_sum, workspace.near_blocks,
        workspace.candidates, workspace.candidate_ids, workspace.sampled, vocab, num_blocks, tables.max_num_seqs + 1,
        words.CANDIDATES, padded_blocks, min(padded_blocks, TILE_BLOCKS), shift, processors, masked, window,
        num_warps=8, maxnreg=MAX_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
