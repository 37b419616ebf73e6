"""A head's pass reads this of the step before it: the feature of each token's predecessor; `features_cpu` is the reference.

    read    [T, D]: for each token of the pass a row of the step's features, or of those kept by KV block; a program a token
            and PART of its numbers
    keep    the features of tokens that end a block, or that are the last computed ones of their row, into their block's row

These are two launches, since a row may read the block that it then overwrites. They move 4 D bytes a token in 16 bits. Grids
and arguments depend on padded sizes alone, and counts are read on the device. Indices are clamped.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.step.tables import SlotTables, StepBuffers

PART = 1024  # numbers of a program


@triton.jit
def _row_of(i, query_start, num_rows, SEARCH_STEPS: tl.constexpr):
    """The last of num_rows rows that begins at or before token i."""
    low = i * 0
    high = low + num_rows
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_open = high - low > 1
        reached = tl.load(query_start + middle, is_open, other=0) <= i
        low = tl.where(is_open & reached, middle, low)
        high = tl.where(is_open & (reached == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["num_rows", "num_of_step"])
def _read_kernel(
    of_step,
    kept,
    found,
    starts,
    positions,
    row_slots,
    step_starts,
    seq_lens,
    table,
    num_rows,
    num_of_step,
    size,
    max_blocks,
    num_blocks,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    i = tl.program_id(0)
    row = _row_of(i, starts, num_rows, SEARCH_STEPS)
    begin = tl.load(step_starts + row)
    first = tl.load(seq_lens + row) - (tl.load(step_starts + row + 1) - begin)  # position of the row's first token in the step
    before = tl.load(positions + i) - 1
    at = tl.minimum(tl.maximum(begin + before - first, 0), num_of_step - 1).to(tl.int64)
    slot = tl.minimum(tl.maximum(tl.load(row_slots + row), 0), num_slots - 1).to(tl.int64)
    index = tl.minimum(tl.maximum(before, 0) // BLOCK_SIZE, max_blocks - 1)
    block = tl.minimum(tl.maximum(tl.load(table + slot * max_blocks + index), 0), num_blocks - 1).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    in_step, inside = before >= first, column < size
    value = tl.load(of_step + at * size + column, inside & in_step, other=0.0)
    value += tl.load(kept + block * size + column, inside & (in_step == 0) & (before >= 0), other=0.0)
    tl.store(found + i.to(tl.int64) * size + column, tl.where(before >= 0, value, 0.0), inside)


@triton.jit(do_not_specialize=["num_rows"])
def _keep_kernel(
    of_step,
    kept,
    starts,
    num_rows_ptr,
    row_slots,
    seq_lens,
    seq_len,
    slots,
    num_rows,
    size,
    num_blocks,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    i = tl.program_id(0)
    count = tl.minimum(tl.load(num_rows_ptr), num_rows)
    row = _row_of(i, starts, count, SEARCH_STEPS)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    own = tl.minimum(tl.maximum(tl.load(row_slots + row), 0), num_slots - 1)
    first = tl.load(seq_lens + row) - (end - begin)
    last = begin + tl.load(seq_len + own) - 1 - first  # behind it are drafts that were rejected
    slot = tl.load(slots + i)
    is_last = (i == last) | (slot % BLOCK_SIZE == BLOCK_SIZE - 1)
    if (row < count) & (i < end) & (i <= last) & (slot >= 0) & is_last:
        block = tl.minimum(slot // BLOCK_SIZE, num_blocks - 1)
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        value = tl.load(of_step + i.to(tl.int64) * size + column, column < size)
        tl.store(kept + block * size + column, value, column < size)


def read_features(
    tables: SlotTables,
    step: StepBuffers,
    inputs: StepBuffers,
    of_step: torch.Tensor,
    kept: torch.Tensor,
    group: int,
    num_tokens: int,
    num_rows: int,
    block_size: int,
) -> torch.Tensor:
    """[num_tokens, D]: for each token of a pass the feature of the token before it; then the step's are kept.

    See `features_cpu.read_features`.
    """
    size, of_step = kept.shape[1], of_step.contiguous()
    if of_step.shape[1] != size or of_step.dtype != kept.dtype or not 0 < len(of_step) <= step.max_tokens:
        raise ValueError(f"read_features: {of_step.dtype} {tuple(of_step.shape)} does not fit {kept.dtype} {tuple(kept.shape)}")
    if not (0 < num_tokens <= inputs.max_tokens and 0 < num_rows <= inputs.max_rows):
        raise ValueError(f"read_features: {num_tokens} tokens, {num_rows} rows do not fit")
    found = torch.empty(num_tokens, size, dtype=kept.dtype, device=kept.device)
    table, num_slots, parts = tables.block_table[group], tables.max_num_seqs + 1, triton.cdiv(size, PART)
    steps = inputs.max_rows.bit_length()
    of_pass = inputs.query_start, inputs.positions, inputs.row_slots, step.query_start, step.seq_lens, table
    sizes = num_rows, len(of_step), size, table.shape[1], len(kept), num_slots, block_size, PART, steps
    _read_kernel[(num_tokens, parts)](of_step, kept, found, *of_pass, *sizes)
    of_rows = step.query_start, step.num_rows, step.row_slots, step.seq_lens, tables.seq_len, step.slot_mapping[group]
    _keep_kernel[(len(of_step), parts)](of_step, kept, *of_rows, num_rows, size, len(kept), num_slots, block_size, PART, steps)
    return found
