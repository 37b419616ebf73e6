"""Groups a step's tokens by LoRA adapter, on the device: two launches a step, before its layers.

    ids     the adapter slot of each token: that of its row's slot, from the position on that the adapter applies to; and the
            same of each sample, which is what layers behind the last attention see
    group   for each adapter slot, its tokens in `order`, and tiles of up to 16 or 64 of them; and so for those without adapter

A program of `group` is an adapter slot, the last one of no adapter. It counts its tokens and reserves positions and tiles with
two atomic additions, so their places vary from run to run; what is computed of a token depends on neither. Grids depend on
padded sizes and the number of adapter slots. `lora_reference.adapter_ids` is the reference. Moves about 12 bytes a token and
adapter slot.
"""

import triton
import triton.language as tl

from quire.ipc.step.sections import SLOT
from quire.kernels.lora.tables import LoraSchedule, num_tiles, tile_of
from quire.kernels.step.tables import SlotTables, StepBuffers

SLOT_WORDS, S_ADAPTER, S_FROM = (tl.constexpr(n) for n in (SLOT.width, SLOT.at["adapter"], SLOT.at["adapter_from"]))
IDS_BLOCK, GROUP_BLOCK = 128, 1024


@triton.jit(do_not_specialize=["T", "R", "num_adapters", "num_tiles", "ids_stride", "tiles_stride"])
def _ids_kernel(
    slot_params, row_slots, query_start, positions, sample_slots, sample_positions, ids, tiles, counters,
    T, R, num_slots, num_adapters, num_tiles, ids_stride, tiles_stride, BLOCK: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_sample = tl.program_id(1) == 1
    if is_sample:
        inside = i < R
        slot = tl.load(sample_slots + i, inside, other=num_slots - 1)
        position = tl.load(sample_positions + i, inside, other=0) - 1
    else:
        inside = i < T
        row = tl.zeros([BLOCK], tl.int32)  # the last row that begins at the token or before it
        for step in tl.static_range(SEARCH_STEPS):
            later = row + (1 << (SEARCH_STEPS - 1 - step))
            begin = tl.load(query_start + later, later < R, other=0)
            row = tl.where((later < R) & (begin <= i), later, row)
        slot = tl.load(row_slots + row, inside, other=num_slots - 1)
        position = tl.load(positions + i, inside, other=0)
    slot = tl.minimum(tl.maximum(slot, 0), num_slots - 1)
    adapter = tl.load(slot_params + slot * SLOT_WORDS + S_ADAPTER, inside, other=-1)
    begin = tl.load(slot_params + slot * SLOT_WORDS + S_FROM, inside, other=0)
    adapter = tl.where((position >= begin) & (adapter < num_adapters), adapter, -1)
    which = tl.program_id(1)
    tl.store(ids + which * ids_stride + i, adapter, inside)
    tl.store(tiles + which * 3 * tiles_stride + i, tl.full([BLOCK], -1, tl.int32), i < num_tiles)
    if tl.program_id(0) == 0:
        tl.store(counters + which * 2, 0)
        tl.store(counters + which * 2 + 1, 0)


@triton.jit(do_not_specialize=["T", "R", "num_tiles", "ids_stride", "tiles_stride", "tile", "sample_tile"])
def _group_kernel(
    ids, order, tiles, counters, T, R, num_tiles, ids_stride, tiles_stride, tile, sample_tile, BLOCK: tl.constexpr
):  # fmt: skip
    adapter, which = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    own = tl.where(adapter == tl.num_programs(0) - 1, -1, adapter)
    ids += which * ids_stride
    order += which * ids_stride
    tiles += which * 3 * tiles_stride
    n = tl.where(which == 1, R, T)
    size = tl.where(which == 1, sample_tile, tile)
    count = 0
    for start in range(0, n, BLOCK):
        mine = tl.load(ids + start + lanes, start + lanes < n, other=-2) == own
        count += tl.sum(mine.to(tl.int32), 0)
    if count > 0:
        own_tiles = (count + size - 1) // size
        first_tile = tl.atomic_add(counters + which * 2, own_tiles)
        first = tl.atomic_add(counters + which * 2 + 1, count)
        for start in range(0, own_tiles, BLOCK):
            k = start + lanes
            inside = (k < own_tiles) & (first_tile + k < num_tiles)
            tl.store(tiles + first_tile + k, tl.zeros([BLOCK], tl.int32) + adapter, inside)
            tl.store(tiles + tiles_stride + first_tile + k, first + k * size, inside)
            tl.store(tiles + 2 * tiles_stride + first_tile + k, tl.minimum(count - k * size, size), inside)
        seen = first
        for start in range(0, n, BLOCK):
            mine = tl.load(ids + start + lanes, start + lanes < n, other=-2) == own
            before = tl.cumsum(mine.to(tl.int32), 0) - mine.to(tl.int32)
            tl.store(order + seen + before, start + lanes, mine)
            seen += tl.sum(mine.to(tl.int32), 0)


def schedule(
    tables: SlotTables,
    step: StepBuffers,
    into: LoraSchedule,
    num_tokens: int,
    num_samples: int,
    num_adapters: int,
    *,
    has_windows: bool,
    has_samples: bool,
) -> None:
    """Write the schedule of a step of these padded sizes.

    has_windows: samples are in `sample_slots`, otherwise each row is one. has_samples: the samples are others than the tokens.
    """
    slots, positions = step.row_slots, step.seq_lens
    if has_windows:
        slots, positions = step.sample_slots, step.sample_positions
    n = max(num_tokens, num_samples) if has_samples else num_tokens
    most, stride = max(num_tiles(k, num_adapters) for k in (num_tokens, num_samples)), into.tiles.shape[2]
    which = 1 + has_samples
    _ids_kernel[(triton.cdiv(n, IDS_BLOCK), which)](
        tables.params, step.row_slots, step.query_start, step.positions, slots, positions, into.ids, into.tiles, into.counters,
        num_tokens, num_samples, len(tables.params), num_adapters, most, into.ids.shape[1], stride,
        IDS_BLOCK, max(1, (len(step.row_slots) - 1).bit_length()),
    )  # fmt: skip
    _group_kernel[(num_adapters + 1, which)](
        into.ids, into.order, into.tiles, into.counters, num_tokens, num_samples, most, into.ids.shape[1], stride,
        tile_of(num_tokens), tile_of(num_samples), GROUP_BLOCK,
    )  # fmt: skip


def group(into: LoraSchedule, count: int, num_adapters: int, row: int = 0) -> None:
    """Write order and tiles of one row of a schedule; its first `count` ids are there."""
    ids, order, tiles, counters = into.ids[row], into.order[row], into.tiles[row], into.counters[row]
    most = num_tiles(count, num_adapters)
    tiles.fill_(-1)
    counters.zero_()
    _group_kernel[(num_adapters + 1, 1)](
        ids, order, tiles, counters, count, count, most, len(ids), tiles.shape[1], tile_of(count), tile_of(count), GROUP_BLOCK
    )  # fmt: skip
