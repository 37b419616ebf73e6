"""What the products of `four_bits_wide` and `wide` begin with: a list of the tiles that have rows, and rows of x in order.

    places int32 [4, slots]     expert, first place in `order`, rows, of `align`'s tiles: those with rows first, in its order
                                [3, 0]: how many these are; the others follow with 0 rows, of any expert that there is
    rows   [P, H]               x[order[p] // k] at p, so that the copy engine finds a tile's rows side by side

One launch for both. The products are persistent programs, which walk places x tiles of columns: so that none has only empty
slots to walk, they are counted on the device, and every launch depends on shapes alone. Places of `order` behind the last pair
of ours have any row of x. Moves P rows of x, from L2, and writes them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.experts.align import Alignment
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import PLAIN, launch_options, wait_for_previous
from quire.kernels.tuning.configs import WideConfig
from quire.kernels.tuning.table import WideRules

LISTED = 1024  # slots at once
MOST_COLUMNS = 4096  # at once


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
            place = tl.where(is_live, until - 1, slots - 1 - (slot - until))  # empty ones from the end
            tl.store(places_ptr + place, tl.load(tiles_ptr + slot, inside, other=0), inside)
            tl.store(places_ptr + slots + place, tl.load(tiles_ptr + slots + slot, inside, other=0), inside)
            tl.store(places_ptr + 2 * slots + place, size, inside)
            found += tl.sum(is_live.to(tl.int32), 0)
        tl.store(places_ptr + 3 * slots, found)
    else:
        pair = (tl.program_id(0) - 1).to(tl.int64)
        row = tl.minimum(tl.maximum(tl.load(order_ptr + pair) // TOP_K, 0), rows - 1)  # behind the last pair: any
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            values = tl.load(x_ptr + row.to(tl.int64) * x_stride + n, n < N)
            tl.store(out_ptr + pair * N + n, values, n < N)


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
    """The configuration for so many rows an expert on average; None: others' kernels are as fast."""
    return next((config for limit, config in rules if per_expert <= limit), None)


def supports(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, dtypes: tuple[torch.dtype, ...], inner: int) -> bool:
    """Whether the kernels compute these experts: x [T, H] of these types, on a Hopper; weights [E, N, ...] and rows of h, of
    `inner` columns, as the copy engine needs them."""
    if x.dtype not in dtypes or x.shape[1] % 8 or inner % 8 or not hopper.available(x.device):
        return False
    return all(w.is_contiguous() and hopper.can_copy(w.flatten(0, 1)) for w in (gate_up, down))
