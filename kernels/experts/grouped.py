"""The first step of `four_bits_wide` and `wide`: a list of the tiles that have rows, and rows of x in order.

    places int32 [4, slots]     expert, first place in `order`, rows, of `align`'s tiles: those with rows first, in its order
                                [3, 0]: the number of these; the others follow with 0 rows, and any valid expert
    rows   [P, H]               x[order[p] // k] at p, so that the copy engine finds a tile's rows side by side

For few pairs one launch does it all, order and tiles too (`arrange`); for many, `align` and another (`gather`). The products
are persistent programs, which walk places x tiles of columns: the tiles with rows are counted on the device, so that no program
walks empty slots only, and every launch depends on shapes alone. Rows behind the last pair of this rank's experts hold
anything, even NaN: tiles read them, but each sum is of one row, and sums of rows that are in no tile are not stored. `order` is
not read there. Moves P rows of x, from L2 (one launch: T rows), and writes them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts.align import Alignment, align
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.configs import WideConfig
from quire.kernels.tuning.table import WideRules

LISTED = 1024  # slots at once
MOST_COLUMNS = 4096  # at once
# For one launch: each program compares all ids, so the work grows with the square of their number. Estimated for 132 SMs, 4096
# pairs are 1 us of comparisons, 8192 are 4 us; a second launch takes some 2 us in any case.
FEW_PAIRS = 4096
LEAST_IDS = 512  # at once: fewer would take as long, and be one more kernel to compile


class Work(NamedTuple):
    places: torch.Tensor
    order: torch.Tensor
    tile: int  # rows of a tile at most

    @property
    def num_slots(self) -> int:
        return self.places.shape[1]


@triton.jit(do_not_specialize=["rows", "slots"])
def _gather_kernel(
    x_ptr, out_ptr, order_ptr, tiles_ptr, places_ptr, x_stride, rows, slots, N,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    if tl.program_id(0) == 0:
        lane = tl.arange(0, LISTED)
        found = 0
        for start in range(0, slots, LISTED):
            slot = start + lane
            inside = slot < slots
            size = tl.maximum(tl.load(tiles_ptr + 2 * slots + slot, inside, other=0), 0)
            is_live = size > 0
            until = found + tl.cumsum(is_live.to(tl.int32), 0)
            place = tl.where(is_live, until - 1, slots - 1 - (slot - until))  # empty slots from the end
            tl.store(places_ptr + place, tl.load(tiles_ptr + slot, inside, other=0), inside)
            tl.store(places_ptr + slots + place, tl.load(tiles_ptr + slots + slot, inside, other=0), inside)
            tl.store(places_ptr + 2 * slots + place, size, inside)
            found += tl.sum(is_live.to(tl.int32), 0)
        tl.store(places_ptr + 3 * slots, found)
    else:
        pair = (tl.program_id(0) - 1).to(tl.int64)
        row = tl.minimum(tl.maximum(tl.load(order_ptr + pair) // TOP_K, 0), rows - 1)  # behind the last pair: any row
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            values = tl.load(x_ptr + row.to(tl.int64) * x_stride + n, n < N)
            tl.store(out_ptr + pair * N + n, values, n < N)


@triton.jit
def _list_tiles(
    ids_ptr, places_ptr, pairs, slots, EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """One program: count each expert's pairs, and write `places`."""
    pair = tl.arange(0, IDS)
    ids = tl.load(ids_ptr + pair, pair < pairs, other=EXPERTS)
    expert = tl.arange(0, BINS)
    counts = tl.histogram(ids, BINS, mask=ids < EXPERTS)
    tiles = (counts + TILE - 1) // TILE
    both = tl.cumsum((tiles << 16) + counts, 0)  # tiles and pairs in one scan: both are fewer than 2^15
    begin = (both & 0xFFFF) - counts
    first = (both >> 16) - tiles
    live = tl.sum(tiles, 0)
    for i in range(tl.max(tiles, 0)):
        inside = i < tiles
        tl.store(places_ptr + first + i, expert, inside)
        tl.store(places_ptr + slots + first + i, begin + i * TILE, inside)
        tl.store(places_ptr + 2 * slots + first + i, tl.minimum(counts - i * TILE, TILE), inside)
    for start in range(0, slots, LISTED):
        slot = start + tl.arange(0, LISTED)
        is_empty = (slot >= live) & (slot < slots)
        tl.store(places_ptr + slot, 0, is_empty)
        tl.store(places_ptr + slots + slot, 0, is_empty)
        tl.store(places_ptr + 2 * slots + slot, 0, is_empty)
    tl.store(places_ptr + 3 * slots, live)


@triton.jit(do_not_specialize=["rows", "slots"])
def _arrange_kernel(
    x_ptr, ids_ptr, out_ptr, order_ptr, places_ptr, x_stride, rows, slots, N, TOP_K: tl.constexpr, K: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 lists the tiles; program t + 1 copies row t of x to its pairs' places. K, BINS: powers of two."""
    wait_for_previous(PDL)
    pairs = rows * TOP_K
    if tl.program_id(0) == 0:
        _list_tiles(ids_ptr, places_ptr, pairs, slots, EXPERTS, BINS, TILE, IDS, LISTED)
    else:
        row = tl.program_id(0) - 1
        x_ptr += row.to(tl.int64) * x_stride
        n = tl.arange(0, BLOCK)[None, :]
        values = tl.load(x_ptr + n, n < N)  # in flight while pairs are counted
        j = tl.arange(0, K)
        own = tl.load(ids_ptr + row * TOP_K + j, j < TOP_K, other=EXPERTS)
        is_ours = (own < EXPERTS)[:, None]
        pair = tl.arange(0, IDS)[None, :]
        ids = tl.load(ids_ptr + pair, pair < pairs, other=EXPERTS)
        # by expert, then by row: a pair's place is the number of smaller keys
        own_keys = own * IDS + row * TOP_K + j
        keys = tl.minimum(ids, EXPERTS) * IDS + pair
        place = tl.sum((keys < own_keys[:, None]).to(tl.int32), 1)
        lines = out_ptr + (place * N)[:, None]
        tl.store(lines + n, values, is_ours & (n < N))
        for start in range(BLOCK, N, BLOCK):
            values = tl.load(x_ptr + start + n, start + n < N)
            tl.store(lines + start + n, values, is_ours & (start + n < N))
        tl.store(order_ptr + place, row * TOP_K + j, own < EXPERTS)


def ids_at_once(pairs: int) -> int:
    """The constant that `arrange` is compiled for: ids that its programs compare, a power of two; 0: two launches."""
    return 0 if pairs > FEW_PAIRS else max(LEAST_IDS, triton.next_power_of_2(pairs))


def arrange(x: torch.Tensor, ids: torch.Tensor, num_experts: int, tile: int, *, pdl: int = PLAIN) -> tuple[torch.Tensor, Work]:
    """(rows [P, H] of x [T, H] in order, the list of tiles of `tile` rows), for ids int32 [T, k]."""
    pairs, hidden, top_k = ids.numel(), x.shape[1], ids.shape[1]
    block = ids_at_once(pairs)
    if not block:
        return gather(x, align(ids, num_experts, tile, pdl=pdl), top_k, tile, pdl=pdl)
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError("arrange: ids must be int32, row after row")
    rows = x.new_empty(pairs, hidden)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    places = torch.empty(4, pairs // tile + num_experts, dtype=torch.int32, device=x.device)
    _arrange_kernel[(len(x) + 1,)](
        x, ids, rows, order, places, x.stride(0), len(x), places.shape[1], hidden, top_k, triton.next_power_of_2(top_k),
        num_experts, max(32, triton.next_power_of_2(num_experts)), tile, block,
        min(MOST_COLUMNS, triton.next_power_of_2(hidden)), LISTED, pdl,
        num_warps=4 if block <= 1024 else 8, **launch_options(pdl),
    )  # fmt: skip
    return rows, Work(places, order, tile)


def gather(x: torch.Tensor, at: Alignment, top_k: int, tile: int, *, pdl: int = PLAIN) -> tuple[torch.Tensor, Work]:
    """(rows [P, H] of x [T, H] in order, the list of tiles); `at` has tiles of `tile` rows."""
    pairs, hidden = len(at.order), x.shape[1]
    rows = x.new_empty(pairs, hidden)
    places = torch.empty(4, at.num_slots, dtype=torch.int32, device=x.device)
    _gather_kernel[(pairs + 1,)](
        x, rows, at.order, at.tiles, places, x.stride(0), len(x), at.num_slots, hidden, top_k,
        min(MOST_COLUMNS, triton.next_power_of_2(hidden)), LISTED, pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return rows, Work(places, at.order, tile)


def rule(rules: WideRules, per_expert: float) -> WideConfig | None:
    """The configuration for so many rows an expert on average; None: other kernels are as fast."""
    return next((config for limit, config in rules if per_expert <= limit), None)


def supports(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, dtypes: tuple[torch.dtype, ...], inner: int) -> bool:
    """Whether the kernels can compute these experts: x [T, H] of these types, on a Hopper; weights [E, N, ...] and rows of h,
    of `inner` columns, must fit the copy engine.
    """
    if x.dtype not in dtypes or x.shape[1] % 8 or inner % 8 or not hopper.available(x.device):
        return False
    return all(w.is_contiguous() and hopper.can_copy(w.flatten(0, 1)) for w in (gate_up, down))
