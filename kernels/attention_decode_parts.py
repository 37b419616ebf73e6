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
    ROWS: tl.constexpr, LINES: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Values [LINES, HEAD_PAD] of all parts, ROWS lines of them: part 0 is at first_slot, part i at later_slot + i * slot_step.

    PARTS at a time, whose loads are all under way at once. With a line for each warp at least, the parts of a line are all in
    one thread. Loads go to L2 (.cg): other SMs wrote these lines in this launch.
    """
    offs_p = tl.arange(0, PARTS)
    offs_m = tl.arange(0, LINES)
    offs_d = tl.arange(0, HEAD_PAD)
    total_max = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, HEAD_PAD], tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + offs_p
        line = tl.where(part == 0, first_slot, later_slot + part * slot_step)[None, :] * ROWS + offs_m[:, None]
        live = (part < parts)[None, :] & (offs_m < ROWS)[:, None]
        weight = tl.load(partial_weight_ptr + line, mask=live, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial_out_ptr + line.to(tl.int64)[:, :, None] * HEAD_DIM + offs_d[None, None, :],
            mask=live[:, :, None] & (offs_d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(total_max, tl.max(weight, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        share = tl.exp2(weight - base[:, None])
        rescale = tl.exp2(total_max - base)
        total = total * rescale + tl.sum(share, 1)
        acc = acc * rescale[:, None] + tl.sum(share[:, :, None] * values, 1)
        total_max = new_max
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
