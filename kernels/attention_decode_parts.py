"""Decode attention of a (row, KV head) that several programs share: what each leaves, and their sum.

A part is the softmax over some of the keys: its values, and the logarithm, in base 2, of what it was divided by. The whole is
a mean of the values of its parts (as in FlashDecoding; Dao and others, 2023). This code runs once a launch, mostly, so its time
is that of its loads and of loading its own instructions: the more of them, unrolled, the slower.
"""

import triton
import triton.language as tl

from quire.kernels.attention_tile import arrive


@triton.jit
def leave_part(
    partial_out_ptr, partial_weight_ptr, arrival_ptr, slot, values, row_max, row_sum,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Store one part, its first ROWS rows, at `slot`; returns how many parts of the same rows came before.

    values [M, HEAD_PAD] of the part alone; row_max [M] in units of log2, row_sum [M]: what exp2(score - row_max) added up to.
    The last to come may call combine_parts, and must set the count at arrival_ptr back to 0.
    """
    offs_m = tl.arange(0, values.shape[0])
    offs_d = tl.arange(0, HEAD_PAD)
    line = slot * ROWS + offs_m
    stored = offs_m < ROWS
    mask = stored[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(partial_out_ptr + line.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :], values, mask=mask)
    weight = row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))  # -inf where no key was seen
    tl.store(partial_weight_ptr + line, weight, mask=stored)
    return arrive(arrival_ptr)


@triton.jit
def combine_parts(
    partial_out_ptr, partial_weight_ptr, first_slot, later_slot, slot_step, parts,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Values [ROWS, HEAD_PAD] of all parts: part 0 is at first_slot, part i at later_slot + i * slot_step.

    PARTS at a time, unrolled, whose loads are all under way at once. As one tensor of three dimensions it would be for Triton's
    version to say whether a row's parts are in one thread. Loads go to L2 (.cg): other SMs wrote these lines in this launch.
    """
    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, HEAD_PAD)
    total_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for begin in range(0, parts, PARTS):
        new_max = total_max
        weights = tl.tuple([])
        values = tl.tuple([])
        for i in tl.static_range(PARTS):
            part = begin + i
            live = part < parts
            line = tl.where(part == 0, first_slot, later_slot + part * slot_step) * ROWS + offs_m
            out_ptrs = partial_out_ptr + line.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
            weight = tl.load(partial_weight_ptr + line, mask=live, other=float("-inf"), cache_modifier=".cg")
            weights = weights + (weight,)
            values = values + (tl.load(out_ptrs, mask=live & (offs_d < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg"),)
            new_max = tl.maximum(new_max, weight)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(total_max - base)
        total = total * rescale
        acc = acc * rescale[:, None]
        for i in tl.static_range(PARTS):
            share = tl.exp2(weights[i] - base)
            total += share
            acc += share[:, None] * values[i]
        total_max = new_max
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
