"""Pairs of (row, expert) sorted by expert, and cut into tiles of one expert's rows: all on the device.

    ids int32 [T, k]  ->  order int32 [P]            P = T k pairs; those of expert 0 first, within an expert by row
                          tiles int32 [3, slots]     expert, first place in `order`, rows (0 or less: the slot is empty)

One program an expert; none waits for another, since there are more slots than needed: expert e, with `before` pairs before its
own, begins at slot before // tile + e, which is beyond the last of expert e - 1. So there are P // tile + E slots, as many for
every batch of a size, and grids over them can be captured. Nothing is atomic: the order depends on the ids alone. Ids from E on
mean experts on other ranks: they are in no tile, and the end of `order` stays unwritten. Moves E reads of the ids, from L2.
Reference: `experts_reference.align`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous

SMALL, LARGE = 1024, 4096  # ids that a program reads at once


class Alignment(NamedTuple):
    order: torch.Tensor
    tiles: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.tiles.shape[1]


@triton.jit(do_not_specialize=["pairs", "slots"])
def _align_kernel(ids_ptr, order_ptr, tiles_ptr, pairs, slots, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    before = 0
    count = 0
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        ids = tl.load(ids_ptr + pair, pair < pairs, other=2147483647)
        before += tl.sum((ids < expert).to(tl.int32), 0)
        count += tl.sum((ids == expert).to(tl.int32), 0)
    at = before
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        is_own = tl.load(ids_ptr + pair, pair < pairs, other=2147483647) == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order_ptr + at + rank - 1, pair, is_own)
        at += tl.sum(is_own.to(tl.int32), 0)
    first = before // TILE + expert
    end = (before + count) // TILE + expert + 1
    if expert == tl.num_programs(0) - 1:  # there may be pairs of other ranks' experts: the remaining slots are empty
        end = slots
    for start in range(0, pairs // TILE + 1, BLOCK):
        slot = first + start + lane
        begin = before + (start + lane) * TILE
        inside = slot < end
        tl.store(tiles_ptr + slot, expert, inside)
        tl.store(tiles_ptr + slots + slot, begin, inside)
        tl.store(tiles_ptr + 2 * slots + slot, tl.minimum(before + count - begin, TILE), inside)


def align(ids: torch.Tensor, num_experts: int, tile: int, *, pdl: int = PLAIN) -> Alignment:
    """Sort ids int32 [T, k] into tiles of `tile` rows."""
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError("align: ids must be int32, row after row")
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, pairs // tile + num_experts, dtype=torch.int32, device=ids.device)
    block, warps = (SMALL, 4) if pairs <= LARGE else (LARGE, 8)
    _align_kernel[(num_experts,)](
        ids, order, tiles, pairs, tiles.shape[1], tile, block, pdl, num_warps=warps, **launch_options(pdl)
    )
    return Alignment(order, tiles)
