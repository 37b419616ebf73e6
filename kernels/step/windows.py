"""Sharing a step's drafts out among its decode rows, and where their tokens are; `windows_cpu` is the reference.

A decode row's window is its last token and some of its drafts. How many it gets is decided here, on the device, before a step's
inputs are built: the plan only says how many drafts a row and all rows may have, so a captured step serves any mix. One program
reads 80 bytes a row twice, and gives drafts to the rows where they survive most likely (survival.py). `step_inputs` then finds
a token's row with `window_tokens`, and describes the step's samples with `write_samples`. `write_drafts` tells the core what
the drafts are, if it must make grammar masks for them.
"""

import torch
import triton
import triton.language as tl

import quire.ipc.step.sections as sections
from quire.ipc.step.sections import HEADER, SLOT
from quire.kernels.step import survival as of_survival
from quire.kernels.step.tables import SlotTables, StepBuffers

H_NUM_DECODE_ROWS = tl.constexpr(HEADER.at["num_decode_rows"])
H_WINDOW, H_DRAFT_TOKENS = tl.constexpr(HEADER.at["window"]), tl.constexpr(HEADER.at["draft_tokens"])
H_NUM_ROW_WINDOWS, H_ROW_WINDOWS = tl.constexpr(HEADER.at["num_row_windows"]), tl.constexpr(HEADER.at["row_windows"])
H_STEP, H_MASK_WINDOW = tl.constexpr(HEADER.at["step"]), tl.constexpr(HEADER.at["mask_window"])
SLOT_WORDS = tl.constexpr(SLOT.width)
S_MAX_WINDOW, S_FINAL_LEN = tl.constexpr(SLOT.at["max_window"]), tl.constexpr(SLOT.at["final_len"])
MAX_WINDOW, MAX_DRAFTS = tl.constexpr(sections.MAX_WINDOW), tl.constexpr(sections.MAX_DRAFTS)
FIRST_PLACE, UNUSED = tl.constexpr(sections.FIRST_PLACE), tl.constexpr(sections.UNUSED)

ROW, ONE, FIRST = tl.constexpr(of_survival.BINS), tl.constexpr(of_survival.ONE), tl.constexpr(of_survival.FIRST)
ONE_BITS, SLOW_BITS = tl.constexpr(of_survival.ONE_BITS), tl.constexpr(of_survival.SLOW_BITS)

CHUNK = 64  # rows that the program takes at once
WORDS = 128  # that a program writes


@triton.jit
def _possible_drafts(
    row, count, window, row_windows, num_row_windows, decode_slots, slot_params, seq_len, num_drafts, num_slots
):
    """(slots, the most drafts that rows may have); 0 from row `count` on."""
    live = row < count
    slot = tl.minimum(tl.maximum(tl.load(decode_slots + row, live, other=0), 0), num_slots - 1)
    params = slot_params + slot * SLOT_WORDS
    most = tl.minimum(window, tl.load(params + S_MAX_WINDOW, live, other=0))
    most = tl.minimum(most, tl.load(row_windows + row, live & (row < num_row_windows), other=MAX_WINDOW)) - 1
    most = tl.minimum(most, tl.load(num_drafts + slot, live, other=0))
    most = tl.minimum(most, tl.load(params + S_FINAL_LEN, live, other=0) - 2 - tl.load(seq_len + slot, live, other=0))
    return slot, tl.where(live, tl.maximum(most, 0), 0)


@triton.jit
def begin_survival(survival, slot, inside, num_slots):
    """New sequences are in the slots: nothing is known of their drafts."""
    columns = tl.arange(0, ROW)
    first = tl.load(survival + num_slots * ROW + columns)
    tl.store(survival + slot[:, None] * ROW + columns[None, :], first[None, :], inside[:, None])


@triton.jit
def observe_survival(survival, slot, decode, drafted, accepted):
    """Learn from decode rows' drafts: see `survival.observe_cpu`."""
    place = tl.arange(0, MAX_WINDOW)[None, :]
    at = survival + slot[:, None] * ROW + place
    acceptance = tl.load(at, decode[:, None], other=FIRST)
    tested = (place < drafted[:, None]) & (place < accepted[:, None])
    seen = tl.where(place < accepted[:, None] - 1, ONE, 0)
    learnt = acceptance + ((seen - acceptance) >> SLOW_BITS)
    acceptance = tl.where(tested, learnt, acceptance + (acceptance < FIRST).to(tl.int32))
    product = tl.zeros_like(drafted) + ONE
    found = tl.zeros_like(acceptance)
    for i in tl.static_range(MAX_DRAFTS):
        product = (product * tl.sum(tl.where(place == i, acceptance, 0), 1)) >> ONE_BITS
        found = tl.where(place == i, product[:, None], found)
    tl.store(at, acceptance, decode[:, None])
    tl.store(at + MAX_WINDOW, found, decode[:, None])


@triton.jit
def _drafts_above(survival, slot, drafts, bounds):
    """How many of each row's drafts survive at least as likely as each of `bounds`: int32 [rows, bounds]."""
    found = tl.zeros([slot.shape[0], bounds.shape[0]], tl.int32)
    for place in tl.static_range(MAX_DRAFTS):
        is_draft = place < drafts
        survives = tl.load(survival + slot * ROW + MAX_WINDOW + place, is_draft, other=0)
        found += (is_draft[:, None] & (survives[:, None] >= bounds[None, :])).to(tl.int32)
    return found


@triton.jit(do_not_specialize=["num_rows"])
def _share_kernel(
    plan, plan_len, decode_slots, slot_params, seq_len, num_drafts, survival, row_tokens, query_start, num_rows, num_slots,
    CHUNK: tl.constexpr,
):  # fmt: skip
    count = tl.minimum(tl.maximum(tl.load(plan + H_NUM_DECODE_ROWS), 0), num_rows)
    most = tl.maximum(tl.load(plan + H_DRAFT_TOKENS), 0)
    window = tl.minimum(tl.load(plan + H_WINDOW), MAX_WINDOW)
    at = tl.minimum(tl.maximum(tl.load(plan + H_ROW_WINDOWS), 0), plan_len)
    num_narrow = tl.minimum(tl.load(plan + H_NUM_ROW_WINDOWS), plan_len - at)
    lanes = tl.arange(0, CHUNK)
    levels = tl.arange(0, ROW)
    bounds = tl.load(survival + (num_slots + 1) * ROW + levels)
    totals = tl.zeros([ROW], tl.int32)  # drafts of all rows down to each bound
    for start in range(0, count, CHUNK):
        slot, drafts = _possible_drafts(
            start + lanes, count, window, plan + at, num_narrow, decode_slots, slot_params, seq_len, num_drafts, num_slots
        )
        totals += tl.sum(_drafts_above(survival, slot, drafts, bounds), 0)
    level = tl.max(tl.where(totals <= most, levels, 0), 0)
    left = most - tl.max(tl.where(totals <= most, totals, 0), 0)  # of the next bin, for rows in order
    with_more = count * 0
    begin = count * 0
    for start in range(0, num_rows, CHUNK):
        row = start + lanes
        slot, drafts = _possible_drafts(
            row, count, window, plan + at, num_narrow, decode_slots, slot_params, seq_len, num_drafts, num_slots
        )
        above = _drafts_above(survival, slot, drafts, bounds)
        drafts = tl.sum(tl.where(levels[None, :] == level, above, 0), 1)
        wants = tl.sum(tl.where(levels[None, :] == tl.minimum(level + 1, ROW - 1), above, 0), 1) - drafts
        before = with_more + tl.cumsum(wants, 0) - wants
        gets = tl.minimum(tl.maximum(left - before, 0), wants)
        tokens = tl.where(row < count, 1 + drafts + gets, 0)
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
        plan, plan.numel(), tables.decode_slots, tables.params, tables.seq_len, tables.num_drafts, tables.survival,
        step.row_tokens, step.query_start, num_rows, tables.max_num_seqs + 1, CHUNK,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- drafts to the core
@triton.jit(do_not_specialize=["num_padded"])  # one compilation for all padded sizes
def _drafts_kernel(
    plan, num_rows_ptr, num_samples_ptr, sample_places, input_ids, words, stride, depth, num_padded, WORDS: tl.constexpr
):
    if tl.load(plan + H_MASK_WINDOW) > 1:
        i = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        is_sample = i < tl.minimum(tl.load(num_samples_ptr), num_padded)
        is_draft = tl.load(sample_places + i, is_sample, other=0) > 0
        value = tl.where(is_draft, tl.load(input_ids + i, is_draft, other=0), tl.where(is_sample, FIRST_PLACE, UNUSED))
        num_words = tl.load(num_rows_ptr) + tl.maximum(tl.load(plan + H_DRAFT_TOKENS), 0)
        step = tl.load(plan + H_STEP).to(tl.int64)
        record = words + (step % depth) * stride
        tl.store(record + i, (step << 32) | (value.to(tl.int64) & 0xFFFFFFFF), i < tl.minimum(num_words, num_padded))


def write_drafts(plan: torch.Tensor, step: StepBuffers, words: torch.Tensor, num_padded: int) -> None:
    """Write the draft before each sample, if the plan's mask_window is above 1: see `windows_cpu.write_drafts`."""
    if words.dtype != torch.int64 or words.stride(1) != 1 or not 0 < num_padded <= min(words.shape[1], len(step.sample_places)):
        raise ValueError(f"write_drafts: {num_padded} samples do not fit {words.dtype} {tuple(words.shape)}")
    _drafts_kernel[(triton.cdiv(num_padded, WORDS),)](
        plan, step.num_rows, step.num_samples, step.sample_places, step.input_ids, words, words.stride(0), len(words),
        num_padded, WORDS, num_warps=1,
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
