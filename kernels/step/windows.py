"""Sharing a step's drafts out among its decode rows, and where their tokens are; `windows_cpu` is the reference.

A decode row's window is its last token and some of its drafts. How many it gets is decided here, on the device, before a step's
inputs are built: the plan only says how many drafts a row and all rows may have, so a captured step serves any mix. One program
reads 20 bytes a row twice. `step_inputs` then finds a token's row with `window_tokens`, and describes the step's samples with
`write_samples`.
"""

import torch
import triton
import triton.language as tl

import quire.ipc.step.sections as sections
from quire.ipc.step.sections import HEADER, SLOT
from quire.kernels.step.tables import SlotTables, StepBuffers

H_NUM_DECODE_ROWS = tl.constexpr(HEADER.at["num_decode_rows"])
H_WINDOW, H_DRAFT_TOKENS = tl.constexpr(HEADER.at["window"]), tl.constexpr(HEADER.at["draft_tokens"])
SLOT_WORDS = tl.constexpr(SLOT.width)
S_MAX_WINDOW, S_FINAL_LEN = tl.constexpr(SLOT.at["max_window"]), tl.constexpr(SLOT.at["final_len"])
MAX_WINDOW, MAX_DRAFTS = tl.constexpr(sections.MAX_WINDOW), tl.constexpr(sections.MAX_DRAFTS)

CHUNK = 256  # rows that the program takes at once


@triton.jit
def _possible_drafts(row, count, window, decode_slots, slot_params, seq_len, num_drafts, num_slots):
    """The most drafts that rows may have; 0 from row `count` on."""
    live = row < count
    slot = tl.minimum(tl.maximum(tl.load(decode_slots + row, live, other=0), 0), num_slots - 1)
    params = slot_params + slot * SLOT_WORDS
    most = tl.minimum(window, tl.load(params + S_MAX_WINDOW, live, other=0)) - 1
    most = tl.minimum(most, tl.load(num_drafts + slot, live, other=0))
    most = tl.minimum(most, tl.load(params + S_FINAL_LEN, live, other=0) - 2 - tl.load(seq_len + slot, live, other=0))
    return tl.where(live, tl.maximum(most, 0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _share_kernel(
    plan, decode_slots, slot_params, seq_len, num_drafts, row_tokens, query_start, num_rows, num_slots, CHUNK: tl.constexpr
):
    count = tl.minimum(tl.maximum(tl.load(plan + H_NUM_DECODE_ROWS), 0), num_rows)
    most = tl.maximum(tl.load(plan + H_DRAFT_TOKENS), 0)
    window = tl.minimum(tl.load(plan + H_WINDOW), MAX_WINDOW)
    lanes = tl.arange(0, CHUNK)
    levels = tl.arange(0, MAX_WINDOW)
    totals = tl.zeros([MAX_WINDOW], tl.int32)  # drafts of all rows, if each has at most so many
    for start in range(0, count, CHUNK):
        drafts = _possible_drafts(start + lanes, count, window, decode_slots, slot_params, seq_len, num_drafts, num_slots)
        totals += tl.sum(tl.minimum(drafts[:, None], levels[None, :]), 0)
    level = tl.max(tl.where(totals <= most, levels, 0), 0)
    left = most - tl.max(tl.where(totals <= most, totals, 0), 0)  # rows that get one more, in order
    with_more = count * 0
    begin = count * 0
    for start in range(0, num_rows, CHUNK):
        row = start + lanes
        drafts = _possible_drafts(row, count, window, decode_slots, slot_params, seq_len, num_drafts, num_slots)
        wants = (drafts > level).to(tl.int32)
        gets = (wants == 1) & (with_more + tl.cumsum(wants, 0) <= left)
        tokens = tl.where(row < count, 1 + tl.minimum(drafts, level) + gets.to(tl.int32), 0)
        tl.store(row_tokens + row, tokens, row < num_rows)
        tl.store(query_start + row, begin + tl.cumsum(tokens, 0) - tokens, row < count)
        with_more += tl.sum(wants, 0)
        begin += tl.sum(tokens, 0)
    tl.store(query_start + count, begin)


def share_drafts(plan: torch.Tensor, tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
    """Write how many tokens each decode row has, step.row_tokens [num_rows], and where they begin, in step.query_start.

    See `windows_cpu.share_drafts`.
    """
    if not 0 < num_rows <= len(step.row_tokens) or len(tables.decode_slots) > 1:
        raise ValueError(f"share_drafts: {num_rows} rows do not fit, or there are micro-batches")
    _share_kernel[(1,)](
        plan, tables.decode_slots, tables.params, tables.seq_len, tables.num_drafts, step.row_tokens, step.query_start,
        num_rows, tables.max_num_seqs + 1, CHUNK,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ parts of building the inputs
@triton.jit
def window_tokens(
    i, is_decode, decode_rows, query_start, decode_slots, seq_len, last_token, drafts, num_slots, last_position,
    BLOCK: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """(slots, places, positions, ids) of the tokens i of decode rows, [BLOCK] each; is_decode: which of them are any."""
    low = tl.zeros([BLOCK], tl.int32)
    high = low + decode_rows
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        inside = high - low > 1
        reached = tl.load(query_start + middle, inside, other=0) <= i
        low = tl.where(inside & reached, middle, low)
        high = tl.where(inside & (reached == 0), middle, high)
    slot = tl.minimum(tl.maximum(tl.load(decode_slots + low, is_decode, other=0), 0), num_slots - 1)
    place = tl.where(is_decode, i - tl.load(query_start + low, is_decode, other=0), 0)
    place = tl.minimum(tl.maximum(place, 0), MAX_DRAFTS)
    position = tl.maximum(tl.load(seq_len + slot, is_decode, other=0), 0) + place
    token = tl.load(last_token + slot, is_decode, other=0)
    draft = tl.load(drafts + slot * MAX_DRAFTS + place - 1, is_decode & (place > 0), other=0)
    return slot, place, tl.minimum(position, last_position), tl.where(place > 0, draft, token)


@triton.jit
def write_samples(
    i, R, decode_tokens, prefill_rows, is_decode, slot, place, position, prefill_slot, prefill_end, prefill_token, num_slots,
    sample_slots, sample_positions, sample_places, logits_indices, num_samples,
):  # fmt: skip
    """Describe the samples i: those of decode rows' tokens, then one of each prefill row, of which `prefill_*` say the slot,
    the length with its chunk, and the index of its last token.
    """
    count = decode_tokens + prefill_rows
    is_prefill = (i >= decode_tokens) & (i < count)
    tl.store(sample_slots + i, tl.where(is_decode, slot, tl.where(is_prefill, prefill_slot, num_slots - 1)), i < R)
    tl.store(sample_positions + i, tl.where(is_decode, position + 1, tl.where(is_prefill, prefill_end, 0)), i < R)
    tl.store(sample_places + i, tl.where(is_decode, place, 0), i < R)
    tl.store(logits_indices + i, tl.where(is_decode, i, tl.where(is_prefill, prefill_token, 0)), i < R)
    tl.store(num_samples + i, count, i == 0)
