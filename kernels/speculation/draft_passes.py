"""The device work around a draft model's passes; `draft_passes_cpu` is the reference.

    begin_sequences  a plan's new sequences: their block tables are emptied, 4 bytes a block
    note_tokens      a step's tokens by KV slot, 12 bytes each
    begin_pass       three launches: what each row lacks and how far its block table reaches, a program a row; where the rows'
                     tokens are, one program; and the tokens, 30 bytes each
    next_drafts      the drafts that were drawn, and the inputs of the pass for the next ones

Grids and arguments depend on padded sizes alone, and counts are read on the device, so captured launches serve every step. A
block table's entry of 0, the null block, is one that the sequence has not. Indices are clamped.
"""

import torch
import triton
import triton.language as tl

import quire.ipc.step.sections as sections
import quire.kernels.speculation.draft_state as draft_state
from quire.ipc.step.sections import HEADER, SLOT
from quire.kernels.speculation.draft_state import DraftState
from quire.kernels.step.tables import SlotTables, StepBuffers

H_NUM_SLOT_UPDATES, H_SLOT_UPDATES = tl.constexpr(HEADER.at["num_slot_updates"]), tl.constexpr(HEADER.at["slot_updates"])
SLOT_WORDS, S_SLOT = tl.constexpr(SLOT.width), tl.constexpr(SLOT.at["slot"])
S_MAX_WINDOW, S_FINAL_LEN = tl.constexpr(SLOT.at["max_window"]), tl.constexpr(SLOT.at["final_len"])
MAX_WINDOW, MAX_DRAFTS = tl.constexpr(sections.MAX_WINDOW), tl.constexpr(sections.MAX_DRAFTS)
UNKNOWN = tl.constexpr(draft_state.UNKNOWN)
NONE = tl.constexpr(1 << 30)  # above every position and block index

PROGRAMS = 16
CLEAR_BLOCK = 1024
TOKENS = 256  # of a program
SCAN = 128  # blocks that a program looks at together
AHEAD = 32  # block table entries behind the last token: more than MAX_DRAFTS tokens need
CHUNK = 256  # rows that the layout takes at once
ROWS = 128  # of a program


@triton.jit
def _clamp(x, most):
    """x within [0, most]."""
    return tl.minimum(tl.maximum(x, 0), most)


@triton.jit
def _begin_sequences_kernel(
    plan, plan_len, table, draft_len, num_slots, max_blocks, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    at = _clamp(tl.load(plan + H_SLOT_UPDATES), plan_len)
    count = _clamp(tl.load(plan + H_NUM_SLOT_UPDATES), (plan_len - at) // SLOT_WORDS)
    nothing = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.program_id(0), count, PROGRAMS):
        slot = _clamp(tl.load(plan + at + i * SLOT_WORDS + S_SLOT), num_slots - 1)
        tl.store(draft_len + slot, UNKNOWN)
        row = table + slot.to(tl.int64) * max_blocks
        for first in range(0, max_blocks, BLOCK):
            index = first + tl.arange(0, BLOCK)
            tl.store(row + index, nothing, index < max_blocks)


def begin_sequences(plan: torch.Tensor, tables: SlotTables, state: DraftState, group: int) -> None:
    """For the slots that a plan gives to new sequences, before its other changes are made: empty their block tables in the KV
    group, and forget what was computed. See `draft_passes_cpu.begin_sequences`."""
    table = tables.block_table[group]
    _begin_sequences_kernel[(PROGRAMS,)](
        plan, plan.numel(), table, state.draft_len, tables.max_num_seqs + 1, table.shape[1], PROGRAMS, CLEAR_BLOCK
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _note_tokens_kernel(input_ids, slots, text, filled, num_tokens, text_len, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_tokens
    slot = tl.load(slots + i, inside, other=-1)
    written = inside & (slot >= 0) & (slot < text_len)
    tl.store(text + slot, tl.load(input_ids + i, inside, other=0), written)
    tl.store(filled + slot // BLOCK_SIZE, tl.zeros([BLOCK], tl.int32), written & (slot % BLOCK_SIZE == 0))


def note_tokens(step: StepBuffers, state: DraftState, group: int, num_tokens: int, *, block_size: int) -> None:
    """Note a step's tokens by KV slot, and that a block whose first token is written has new contents."""
    if not 0 <= num_tokens <= step.max_tokens:
        raise ValueError(f"note_tokens: {num_tokens} tokens do not fit")
    _note_tokens_kernel[(triton.cdiv(max(num_tokens, 1), TOKENS),)](
        step.input_ids, step.slot_mapping[group], state.text, state.filled, num_tokens, state.text.numel(), block_size, TOKENS
    )


@triton.jit(do_not_specialize=["num_padded", "longest"])
def _missing_kernel(
    num_rows, num_decode_rows, row_slots, samples, seq_len, slot_params, table, filled, draft_len, first, wanted, reaches,
    num_padded, max_blocks, num_blocks, num_slots, longest, BLOCK_SIZE: tl.constexpr, SCAN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """first, wanted, reaches [R]: the first token that each row lacks, how many it wants to compute, where it must end."""
    row = tl.program_id(0)
    live = row < tl.minimum(tl.load(num_rows), num_padded)
    slot = _clamp(tl.load(row_slots + row, live, other=0), num_slots - 1)
    length = _clamp(tl.load(seq_len + slot, live, other=0), max_blocks * BLOCK_SIZE)
    known = length + tl.load(samples + row, live, other=0)
    blocks = table + slot.to(tl.int64) * max_blocks
    start = tl.load(draft_len + slot, live, other=0)
    is_new = start == UNKNOWN
    used = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    computed = length
    at = tl.where(is_new, 0, used)
    while at < used:
        index = at + tl.arange(0, SCAN)
        block = _clamp(tl.load(blocks + index, index < used, other=0), num_blocks - 1)
        full = tl.load(filled + block, index < used, other=BLOCK_SIZE)
        end = tl.min(tl.where((index < used) & (full < BLOCK_SIZE), index * BLOCK_SIZE + full, NONE), 0)
        computed = tl.minimum(computed, end)
        at = tl.where(end < NONE, used, at + SCAN)
    start = tl.where(is_new, computed, start)
    index = length // BLOCK_SIZE + tl.arange(0, AHEAD)
    there = tl.load(blocks + index, live & (index < max_blocks), other=0)
    reach = tl.min(tl.where(there == 0, index, length // BLOCK_SIZE + AHEAD), 0) * BLOCK_SIZE
    final_len = tl.load(slot_params + slot * SLOT_WORDS + S_FINAL_LEN, live, other=0)
    reach = tl.minimum(tl.minimum(reach, final_len - 1), longest)
    tokens = tl.maximum(tl.minimum(known, reach) - start, 0)
    tokens = tl.where(row < tl.load(num_decode_rows), tl.minimum(tokens, MAX_WINDOW), tokens)
    tl.store(first + row, start)
    tl.store(wanted + row, tl.where(live, tokens, 0))
    tl.store(reaches + row, reach)


@triton.jit(do_not_specialize=["num_tokens", "num_padded", "depth"])
def _layout_kernel(
    num_rows_ptr, num_decode_rows, row_slots, samples, seq_len, last_token, slot_params, draft_len, num_drafts, first, wanted,
    reaches, first_position, row_drafts, ids, next_slots, next_positions, next_places, out_slots, out_starts, out_lens,
    out_indices, out_rows, out_decode_rows, num_tokens, num_padded, num_slots, depth, CHUNK: tl.constexpr,
):  # fmt: skip
    count = tl.minimum(tl.load(num_rows_ptr), num_padded)
    total = count * 0
    for chunk in range(0, num_padded, CHUNK):
        row = chunk + tl.arange(0, CHUNK)
        live, inside = row < count, row < num_padded
        slot = _clamp(tl.load(row_slots + row, live, other=0), num_slots - 1)
        tokens = tl.load(wanted + row, live, other=0)
        ends = total + tl.cumsum(tokens, 0)
        total += tl.sum(tokens, 0)
        begin, end = tl.minimum(ends - tokens, num_tokens), tl.minimum(ends, num_tokens)
        tokens = end - begin
        done = tl.load(first + row, live, other=0) + tokens
        tl.store(draft_len + slot, done, live)
        tl.store(out_slots + row, tl.where(live, slot, num_slots - 1), inside)
        tl.store(out_starts + row, begin, inside)
        tl.store(out_lens + row, tl.where(tokens > 0, done, 0), inside)

        length, sampled = tl.load(seq_len + slot, live, other=0), tl.load(samples + row, live, other=0)
        params = slot_params + slot * SLOT_WORDS
        most = tl.minimum(tl.load(params + S_MAX_WINDOW, live, other=0) - 1, depth)
        most = tl.minimum(most, tl.load(reaches + row, live, other=0) - length)
        most = tl.minimum(most, tl.load(params + S_FINAL_LEN, live, other=0) - 2 - length)
        drafts = tl.where(live & (sampled == 1) & (done == length + sampled), tl.maximum(most, 0), 0)
        has_drafts = drafts > 0
        tl.store(num_drafts + slot, drafts, has_drafts)
        tl.store(out_indices + row, tl.where(has_drafts, end - 1, 0), inside)
        tl.store(first_position + row, length, inside)
        tl.store(row_drafts + row, drafts, inside)
        tl.store(ids + row * MAX_WINDOW, tl.load(last_token + slot, live, other=0), inside)
        tl.store(next_slots + row, tl.where(has_drafts, slot, num_slots - 1), inside)
        tl.store(next_positions + row, tl.where(has_drafts, length + 1, 0), inside)
        tl.store(next_places + row, tl.zeros([CHUNK], tl.int32), inside)
    tl.store(out_starts + num_padded, tl.minimum(total, num_tokens))
    tl.store(out_rows, count)
    tl.store(out_decode_rows, tl.minimum(tl.load(num_decode_rows), count))


@triton.jit(do_not_specialize=["num_tokens", "num_padded"])
def _tokens_kernel(
    first, starts, row_slots, seq_len, last_token, table, text, filled, input_ids, positions, slots, num_tokens, num_padded,
    max_blocks, num_blocks, num_slots, vocab, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = i < tl.minimum(tl.load(starts + num_padded), num_tokens)
    low = tl.zeros([BLOCK], tl.int32)  # the last row that begins at or before a token is the token's
    high = low + num_padded
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        inside = high - low > 1
        reached = tl.load(starts + middle, inside, other=0) <= i
        low = tl.where(inside & reached, middle, low)
        high = tl.where(inside & (reached == 0), middle, high)
    slot = _clamp(tl.load(row_slots + low, is_token, other=0), num_slots - 1)
    position = tl.load(first + low, is_token, other=0) + i - tl.load(starts + low, is_token, other=0)
    position = _clamp(position, max_blocks * BLOCK_SIZE - 1)
    entry = table + slot.to(tl.int64) * max_blocks + position // BLOCK_SIZE
    block = _clamp(tl.load(entry, is_token, other=0), num_blocks - 1).to(tl.int64)
    offset = position % BLOCK_SIZE
    at = block * BLOCK_SIZE + offset
    is_written = is_token & (position < tl.load(seq_len + slot, is_token, other=0))
    token = tl.load(text + at, is_written, other=0)
    token = tl.where(is_written, token, tl.load(last_token + slot, is_token, other=0))
    tl.store(input_ids + i, tl.where(is_token, _clamp(token, vocab - 1), 0), i < num_tokens)
    tl.store(positions + i, tl.where(is_token, position, 0), i < num_tokens)
    tl.store(slots + i, tl.where(is_token, at, -1), i < num_tokens)
    tl.atomic_max(filled + block, offset + 1, is_token, sem="relaxed")


def begin_pass(
    tables: SlotTables,
    step: StepBuffers,
    state: DraftState,
    out: StepBuffers,
    group: int,
    num_tokens: int,
    num_rows: int,
    *,
    block_size: int,
    depth: int,
    longest: int,
    vocab: int,
) -> tuple[int, int]:
    """Build the inputs of a pass of at most num_tokens tokens for the step's first num_rows rows. Returns these numbers.

    See `draft_passes_cpu.begin_pass`. out.slot_mapping has one row for all KV groups.
    """
    if not (0 < num_tokens <= out.max_tokens and 0 < num_rows <= min(out.max_rows, len(state.ids))):
        raise ValueError(f"begin_pass: {num_tokens} tokens, {num_rows} rows do not fit")
    table, num_slots, num_blocks = tables.block_table[group], tables.max_num_seqs + 1, len(state.filled)
    first, wanted, reach = state.first, state.wanted, state.reach
    rows = (step.num_rows, step.num_decode_rows, step.row_slots, step.samples, tables.seq_len)
    _missing_kernel[(num_rows,)](
        *rows, tables.params, table, state.filled, state.draft_len, first, wanted, reach, num_rows, table.shape[1],
        num_blocks, num_slots, longest, block_size, SCAN, AHEAD, num_warps=1,
    )  # fmt: skip
    _layout_kernel[(1,)](
        *rows, tables.last_token, tables.params, state.draft_len, tables.num_drafts, first, wanted, reach,
        state.first_position, state.num_drafts, state.ids, state.slots, state.positions, state.places, out.row_slots,
        out.query_start, out.seq_lens, out.logits_indices, out.num_rows, out.num_decode_rows, num_tokens, num_rows, num_slots,
        depth, CHUNK,
    )  # fmt: skip
    _tokens_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        first, out.query_start, out.row_slots, tables.seq_len, tables.last_token, table, state.text, state.filled,
        out.input_ids, out.positions, out.slot_mapping[0], num_tokens, num_rows, table.shape[1], num_blocks, num_slots, vocab,
        block_size, TOKENS, out.max_rows.bit_length(),
    )  # fmt: skip
    return num_tokens, num_rows


@triton.jit(do_not_specialize=["num_padded", "place"])
def _next_kernel(
    sampled, table, drafts, first_position, row_drafts, ids, next_slots, next_positions, next_places, row_slots, starts, lens,
    input_ids, positions, slots, place, num_padded, max_blocks, num_blocks, num_slots, vocab, BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_padded
    token = tl.load(sampled + row, inside, other=0)
    count = tl.load(row_drafts + row, inside, other=0)
    slot = _clamp(tl.load(next_slots + row, inside, other=0), num_slots - 1)
    tl.store(drafts + slot * MAX_DRAFTS + place, token, inside & (count > place))
    more = count > place + 1
    slot = tl.where(more, slot, num_slots - 1)
    position = tl.where(more, tl.load(first_position + row, inside, other=0) + place + 1, 0)
    position = _clamp(position, max_blocks * BLOCK_SIZE - 1)
    entry = table + slot.to(tl.int64) * max_blocks + position // BLOCK_SIZE
    block = _clamp(tl.load(entry, inside & more, other=0), num_blocks - 1).to(tl.int64)
    tl.store(ids + row * MAX_WINDOW + place + 1, tl.maximum(token, 0), inside & (place + 1 < MAX_WINDOW))
    tl.store(next_slots + row, slot, inside)
    tl.store(next_positions + row, tl.where(more, position + 1, 0), inside)
    tl.store(next_places + row, tl.zeros([BLOCK], tl.int32) + place + 1, inside)
    tl.store(row_slots + row, slot, inside)
    tl.store(starts + row, row, row <= num_padded)
    tl.store(lens + row, position + 1, inside)
    tl.store(input_ids + row, _clamp(token, vocab - 1), inside)
    tl.store(positions + row, position, inside)
    tl.store(slots + row, tl.where(more, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), inside)


def next_drafts(
    tables: SlotTables,
    state: DraftState,
    out: StepBuffers,
    group: int,
    sampled: torch.Tensor,
    place: int,
    num_rows: int,
    *,
    block_size: int,
    vocab: int,
) -> int:
    """Keep the drafts at `place`, int32 [num_rows], and build the inputs of the pass for the next ones. Returns num_rows.

    See `draft_passes_cpu.next_drafts`.
    """
    if not (0 < num_rows <= min(len(sampled), out.max_rows) and 0 <= place < tables.drafts.shape[1]):
        raise ValueError(f"next_drafts: {num_rows} rows, place {place} do not fit")
    table = tables.block_table[group]
    _next_kernel[(triton.cdiv(num_rows + 1, ROWS),)](
        sampled, table, tables.drafts, state.first_position, state.num_drafts, state.ids, state.slots, state.positions,
        state.places, out.row_slots, out.query_start, out.seq_lens, out.input_ids, out.positions, out.slot_mapping[0], place,
        num_rows, table.shape[1], len(state.filled), tables.max_num_seqs + 1, vocab, block_size, ROWS,
    )  # fmt: skip
    return num_rows
