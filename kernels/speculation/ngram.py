"""Drafts from a sequence's own text: noting a step's tokens by KV slot, and looking a row's last tokens up in its text.

    write_text     text[slot] = id of each token of the step that has a slot in the KV group
    draft_ngrams   the longest suffix, of min_n to max_n tokens, that occurs before the text's end; of several places the last.
                   The tokens that follow there are the row's drafts; at the text's end they begin again, for it may be a loop

A row's text is read through its block table. PARTS programs a row take tiles of it in turns. An entry of a tile is a place
where a match may end, and most entries fail at their first token, so a tile is little more than a load of block ids and one of
text: 8 bytes a token. Each program stores its best (length of the match, place); a second launch chooses among them and copies
the drafts. `ngram_cpu` is the reference.
"""

import torch
import triton
import triton.language as tl

import quire.ipc.step.sections as sections
from quire.kernels.step.tables import SlotTables, StepBuffers

MAX_DRAFTS = tl.constexpr(sections.MAX_DRAFTS)
PLACE_BITS = tl.constexpr(32)  # of a match's key: its length above, the place of its last token below

PARTS = 16  # programs of a row
TILE = 512  # places that a program looks at together
WRITE_BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(input_ids, slots, text, num_tokens, text_len, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_tokens
    slot = tl.load(slots + i, inside, other=-1)
    tl.store(text + slot, tl.load(input_ids + i, inside, other=0), inside & (slot >= 0) & (slot < text_len))


def write_text(step: StepBuffers, text: torch.Tensor, group: int, num_tokens: int) -> None:
    """Note a step's tokens: text int32 [num_blocks * block_size], by slot of the KV group. Its inputs must be built."""
    if not 0 <= num_tokens <= step.max_tokens or text.dtype != torch.int32 or not text.is_contiguous():
        raise ValueError(f"write_text: {num_tokens} tokens do not fit, or the text is no contiguous int32")
    _write_kernel[(triton.cdiv(max(num_tokens, 1), WRITE_BLOCK),)](
        step.input_ids, step.slot_mapping[group], text, num_tokens, text.numel(), WRITE_BLOCK
    )


@triton.jit
def _text_at(place, live, length, last, text, table_row, text_len, BLOCK_SIZE: tl.constexpr):
    """The ids at places 0 to `length` of a row's text, of which the last one has no KV yet; 0 where not live."""
    written = live & (place >= 0) & (place < length)
    block = tl.load(table_row + place // BLOCK_SIZE, written, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + place % BLOCK_SIZE
    token = tl.load(text + slot, written & (slot >= 0) & (slot < text_len), other=0)
    return tl.where(place == length, last, token)


@triton.jit
def _row(
    row, num_rows_ptr, samples, row_slots, seq_len, last_token, block_table, max_blocks, num_slots, BLOCK_SIZE: tl.constexpr
):
    """(whether the row has sampled, its slot, its tokens with KV, its last token, its blocks)."""
    live = row < tl.load(num_rows_ptr)
    live = live & (tl.load(samples + row, live, other=0) == 1)
    slot = tl.minimum(tl.maximum(tl.load(row_slots + row, live, other=0), 0), num_slots - 1)
    length = tl.minimum(tl.maximum(tl.load(seq_len + slot, live, other=0), 0), max_blocks * BLOCK_SIZE)
    last = tl.load(last_token + slot, live, other=0)
    return live, slot, length, last, block_table + slot.to(tl.int64) * max_blocks


@triton.jit
def _match_kernel(
    num_rows_ptr, samples, row_slots, seq_len, last_token, block_table, text, best, max_blocks, num_slots, text_len,
    min_n, max_n, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """best[row, part]: the best key among the part's tiles; 0: none."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    live, _slot, length, last, table_row = _row(
        row, num_rows_ptr, samples, row_slots, seq_len, last_token, block_table, max_blocks, num_slots, BLOCK_SIZE
    )
    found = tl.zeros([TILE], tl.int64)
    for start in range(part * TILE, tl.where(live, length, 0), PARTS * TILE):
        end = start + tl.arange(0, TILE)  # the last token of a match
        matches = end < length
        long = tl.zeros([TILE], tl.int32)
        n = 0
        while (n < max_n) & (tl.max(matches.to(tl.int32), 0) > 0):
            wanted = _text_at(length - n, n <= length, length, last, text, table_row, text_len, BLOCK_SIZE)
            token = _text_at(end - n, matches, length, last, text, table_row, text_len, BLOCK_SIZE)
            matches = matches & (end >= n) & (token == wanted)
            long += matches.to(tl.int32)
            n += 1
        key = (long.to(tl.int64) << PLACE_BITS) | end.to(tl.int64)
        found = tl.maximum(found, tl.where(long >= min_n, key, 0))
    tl.store(best + row.to(tl.int64) * PARTS + part, tl.max(found, 0))


@triton.jit
def _draft_kernel(
    num_rows_ptr, samples, row_slots, seq_len, last_token, block_table, text, best, drafts, num_drafts, max_blocks, num_slots,
    text_len, most, BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    live, slot, length, last, table_row = _row(
        row, num_rows_ptr, samples, row_slots, seq_len, last_token, block_table, max_blocks, num_slots, BLOCK_SIZE
    )
    key = tl.max(tl.load(best + row.to(tl.int64) * PARTS + tl.arange(0, PARTS)), 0)
    first = (key & 0xFFFFFFFF).to(tl.int32) + 1
    count = tl.where(key > 0, most, 0)
    i = tl.arange(0, DRAFTS)
    taken = live & (i < count)
    behind = first + i % tl.maximum(length + 1 - first, 1)
    ids = _text_at(behind, taken, length, last, text, table_row, text_len, BLOCK_SIZE)
    tl.store(drafts + slot * MAX_DRAFTS + i, ids, taken & (i < MAX_DRAFTS))
    tl.store(num_drafts + slot, count, live)


def draft_ngrams(
    tables: SlotTables,
    step: StepBuffers,
    text: torch.Tensor,
    group: int,
    num_rows: int,
    *,
    block_size: int,
    min_n: int,
    max_n: int,
    num_drafts: int,
) -> None:
    """Write drafts for each of the step's first num_rows rows that sampled; its tokens must be in the tables.

    See `ngram_cpu.draft_ngrams`.
    """
    if not 0 < min_n <= max_n or not 0 < num_drafts <= tables.drafts.shape[1] or not 0 < num_rows <= step.max_rows:
        raise ValueError(f"draft_ngrams: {min_n} to {max_n} tokens, {num_drafts} drafts, {num_rows} rows")
    table = tables.block_table[group]
    best = torch.empty(num_rows, PARTS, dtype=torch.int64, device=text.device)
    rows = (step.num_rows, step.samples, step.row_slots, tables.seq_len, tables.last_token, table, text, best)
    sizes = (table.shape[1], tables.max_num_seqs + 1, text.numel())
    _match_kernel[(num_rows, PARTS)](*rows, *sizes, min_n, max_n, block_size, TILE, PARTS, num_warps=4)
    _draft_kernel[(num_rows,)](
        *rows, tables.drafts, tables.num_drafts, *sizes, num_drafts, block_size, PARTS,
        triton.next_power_of_2(tables.drafts.shape[1]), num_warps=1,
    )  # fmt: skip
