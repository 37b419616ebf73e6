"""The device work around a step's forward: apply the plan and build the inputs; then record the tokens and write the results.

    prepare_step  1. slot updates, block updates and decode rows of the plan go into the tables (`SlotTables`)
                  2. ids, positions, slot mapping, row offsets, lengths (`StepBuffers`), padded to num_tokens and num_rows:
                     decode row r: slot = decode_slots[micro-batch, r], id = last_token[slot], position = seq_len[slot];
                     prefill rows: slot, start, length and ids from the plan, laid out after the decode rows.
                     Padded rows have the dummy slot, length 0, and start at the last token; padded tokens map to slot -1.
                     With windows a decode row has drafts, too (kernels/step/windows.py), and each token a sample.
    finish_step   seq_len, last_token, history and counts of the rows, then one 64-bit word a row: step << 32 | token. With
                  log-probabilities, at first_logprob_word + row * WORDS: the token's, its rank, NUM_TOP ids, theirs.

prepare_step is two launches, of 1 and 3 us: every entry of the tables must be written before the first input is made from one,
and the programs of a kernel can wait for one another only at its end.

The plan is an int32 buffer of fixed size (see ipc/step/sections.py). Grids and arguments depend on padded sizes alone; counts
are read from the plan's header on the device, so a captured launch serves every step. Indices from the plan are clamped to
their tables. If a plan updates an entry twice, either value may remain. Moves about 30 bytes a token and 100 a row.
`step_inputs_cpu` is the reference.
"""

import torch
import triton
import triton.language as tl

import quire.ipc.step.sections as sections
from quire.ipc.step.sections import BLOCK as BLOCK_UPDATE
from quire.ipc.step.sections import HEADER, LOGPROBS, PREFILL, SLOT
from quire.kernels.step.finish_windows import finish_windows
from quire.kernels.step.places import PLACE_WORDS, write_places
from quire.kernels.step.tables import LogitsProcessorPool, SlotTables, StepBuffers
from quire.kernels.step.token_counts import count_tokens
from quire.kernels.step.windows import S_FINAL_LEN, begin_survival, share_drafts, window_tokens, write_drafts, write_samples

H_STEP, H_FLAGS = tl.constexpr(HEADER.at["step"]), tl.constexpr(HEADER.at["flags"])
H_NUM_SLOT_UPDATES, H_SLOT_UPDATES = tl.constexpr(HEADER.at["num_slot_updates"]), tl.constexpr(HEADER.at["slot_updates"])
H_NUM_BLOCK_UPDATES, H_BLOCK_UPDATES = tl.constexpr(HEADER.at["num_block_updates"]), tl.constexpr(HEADER.at["block_updates"])
H_NUM_DECODE_ROWS, H_DECODE_ROWS = tl.constexpr(HEADER.at["num_decode_rows"]), tl.constexpr(HEADER.at["decode_rows"])
H_NUM_PREFILL_ROWS, H_PREFILL_ROWS = tl.constexpr(HEADER.at["num_prefill_rows"]), tl.constexpr(HEADER.at["prefill_rows"])
H_NUM_PREFILL_TOKENS = tl.constexpr(HEADER.at["num_prefill_tokens"])
H_PREFILL_TOKENS, H_MICRO_BATCH = tl.constexpr(HEADER.at["prefill_tokens"]), tl.constexpr(HEADER.at["micro_batch"])
FLAG_SAME_DECODE_ROWS, HISTORY = map(tl.constexpr, (sections.FLAG_SAME_DECODE_ROWS, sections.MAX_BAD_WORD_TOKENS))
SLOT_WORDS, BLOCK_WORDS, PREFILL_WORDS = tl.constexpr(SLOT.width), tl.constexpr(BLOCK_UPDATE.width), tl.constexpr(PREFILL.width)
H_NUM_PLACES, H_PLACES = tl.constexpr(HEADER.at["num_places"]), tl.constexpr(HEADER.at["places"])
S_SLOT, S_HAS_PROCESSORS = tl.constexpr(SLOT.at["slot"]), tl.constexpr(SLOT.at["has_processors"])
B_TABLE, B_INDEX, B_BLOCK = (tl.constexpr(BLOCK_UPDATE.at[name]) for name in ("table", "index", "block"))
P_SLOT, P_START, P_LENGTH, P_FLAGS = (tl.constexpr(PREFILL.at[name]) for name in ("slot", "start", "length", "flags"))
NO_TOKEN, REJECTED, PREFILL_SAMPLE = map(tl.constexpr, (sections.NO_TOKEN, sections.REJECTED, sections.PREFILL_SAMPLE))
L_LOGPROB, L_RANK, L_TOP_IDS = (tl.constexpr(LOGPROBS.at[name]) for name in ("logprob", "rank", "top_ids"))

APPLY_PROGRAMS = 16
APPLY_BLOCK = 64  # updates that a program applies at once
BUILD_BLOCK = 128  # tokens and rows of one program
BUILD_CHUNK = 32  # prefill rows that it reads at once
FINISH_BLOCK = 16


@triton.jit
def _clamp(x, most):
    """x within [0, most]."""
    return tl.minimum(tl.maximum(x, 0), most)


@triton.jit
def _slots_of_micro_batch(plan, decode_slots, num_slots, MICRO_BATCHES: tl.constexpr):
    """The decode rows of the plan's micro-batch; without pipeline parallelism there is only one."""
    if MICRO_BATCHES > 1:
        decode_slots += _clamp(tl.load(plan + H_MICRO_BATCH), MICRO_BATCHES - 1) * num_slots
    return decode_slots


@triton.jit
def _section(plan, count_word: tl.constexpr, at_word: tl.constexpr, width: tl.constexpr, plan_len):
    """(count, offset) of a section, clamped to the plan."""
    at = _clamp(tl.load(plan + at_word), plan_len)
    return _clamp(tl.load(plan + count_word), (plan_len - at) // width), at


@triton.jit
def _apply_kernel(
    plan, plan_len, slot_params, block_table, decode_slots, num_drafts, survival, num_slots, num_tables, max_blocks, num_blocks,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, MICRO_BATCHES: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    columns = tl.arange(0, SLOT_WORDS)
    n, at = _section(plan, H_NUM_SLOT_UPDATES, H_SLOT_UPDATES, SLOT_WORDS, plan_len)
    for i in range(pid * BLOCK, n, PROGRAMS * BLOCK):
        update = i + lanes
        inside = update < n
        slot = _clamp(tl.load(plan + at + update * SLOT_WORDS + S_SLOT, inside, other=0), num_slots - 1)
        mask = inside[:, None] & (columns < SLOT_WORDS)[None, :]
        values = tl.load(plan + at + update[:, None] * SLOT_WORDS + columns[None, :], mask, other=0)
        tl.store(slot_params + slot[:, None] * SLOT_WORDS + columns[None, :], values, mask)
        if DRAFTS:
            tl.store(num_drafts + slot, tl.zeros_like(slot), inside)
            begin_survival(survival, slot, inside, num_slots)
    n, at = _section(plan, H_NUM_BLOCK_UPDATES, H_BLOCK_UPDATES, BLOCK_WORDS, plan_len)
    for i in range(pid * BLOCK, n, PROGRAMS * BLOCK):
        update = i + lanes
        inside = update < n
        word = plan + at + update * BLOCK_WORDS
        row = _clamp(tl.load(word + B_TABLE, inside, other=0), num_tables - 1).to(tl.int64)
        index = _clamp(tl.load(word + B_INDEX, inside, other=0), max_blocks - 1)
        block = _clamp(tl.load(word + B_BLOCK, inside, other=0), num_blocks - 1)
        tl.store(block_table + row * max_blocks + index, block, inside)
    if (tl.load(plan + H_FLAGS) & FLAG_SAME_DECODE_ROWS) == 0:
        n, at = _section(plan, H_NUM_DECODE_ROWS, H_DECODE_ROWS, 1, plan_len)
        n = tl.minimum(n, num_slots)
        decode_slots = _slots_of_micro_batch(plan, decode_slots, num_slots, MICRO_BATCHES)
        for i in range(pid * BLOCK, n, PROGRAMS * BLOCK):
            inside = i + lanes < n
            slot = tl.load(plan + at + i + lanes, inside, other=0)
            tl.store(decode_slots + i + lanes, _clamp(slot, num_slots - 1), inside)


@triton.jit(do_not_specialize=["T", "R"])  # one compilation for all padded sizes
def _build_kernel(
    plan, plan_len, decode_slots, seq_len, last_token, block_table, input_ids, positions, slot_mapping, row_slots, query_start,
    seq_lens, logits_indices, samples, num_decode_rows, num_rows, slot_params, drafts, row_tokens, sample_slots,
    sample_positions, sample_places, first_sample, num_samples, rotary, last_visible, T, R, num_slots, max_blocks, vocab,
    stride, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, AXES: tl.constexpr,
    MICRO_BATCHES: tl.constexpr, DRAFTS: tl.constexpr, WINDOWS: tl.constexpr, SEARCH_STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)  # a token, and a row
    decode_rows = _clamp(tl.load(plan + H_NUM_DECODE_ROWS), tl.minimum(R, T))
    prefill_rows, rows_at = _section(plan, H_NUM_PREFILL_ROWS, H_PREFILL_ROWS, PREFILL_WORDS, plan_len)
    prefill_rows = tl.minimum(prefill_rows, R - decode_rows)
    rows = decode_rows + prefill_rows
    prefill_tokens, tokens_at = _section(plan, H_NUM_PREFILL_TOKENS, H_PREFILL_TOKENS, 1, plan_len)
    decode_tokens = decode_rows
    if WINDOWS:
        decode_tokens = _clamp(tl.load(query_start + decode_rows), T)
    total = decode_tokens + tl.minimum(prefill_tokens, T - decode_tokens)
    last_position = max_blocks * BLOCK_SIZE - 1

    # among the prefill rows: tokens before row i; the row of token i, and where that row begins; tokens up to sample i's
    j_row = i - decode_rows
    j_token = i - decode_tokens
    before = tl.zeros([BLOCK], tl.int32)
    sampled_end = tl.zeros([BLOCK], tl.int32)
    token_row = tl.zeros([BLOCK], tl.int32)
    row_begin = tl.zeros([BLOCK], tl.int32)
    seen = 0
    for j0 in range(0, prefill_rows, CHUNK):
        j = j0 + tl.arange(0, CHUNK)
        length = tl.load(plan + rows_at + j * PREFILL_WORDS + P_LENGTH, j < prefill_rows, other=0)
        length = tl.maximum(length, 0)
        ends = seen + tl.cumsum(length, 0)
        before += tl.sum(tl.where(j[None, :] < j_row[:, None], length[None, :], 0), 1)
        if WINDOWS:
            sampled_end += tl.sum(tl.where(j[None, :] <= j_token[:, None], length[None, :], 0), 1)
        ended = (ends[None, :] <= j_token[:, None]) & (j < prefill_rows)[None, :]
        token_row += tl.sum(ended.to(tl.int32), 1)
        row_begin = tl.maximum(row_begin, tl.max(tl.where(ended, ends[None, :], 0), 1))
        seen += tl.sum(length, 0)

    # rows
    is_decode = i < decode_rows
    is_prefill = (i >= decode_rows) & (i < rows)
    row_words = plan + rows_at + j_row * PREFILL_WORDS
    decode_slots = _slots_of_micro_batch(plan, decode_slots, num_slots, MICRO_BATCHES)
    decode_slot = tl.load(decode_slots + i, is_decode, other=0)
    slot = tl.where(is_decode, decode_slot, tl.load(row_words + P_SLOT, is_prefill, other=num_slots - 1))
    slot = _clamp(slot, num_slots - 1)
    decode_position = _clamp(tl.load(seq_len + slot, is_decode, other=0), last_position)
    length = tl.where(is_decode, 1, tl.maximum(tl.load(row_words + P_LENGTH, is_prefill, other=0), 0))
    start = tl.where(is_decode, decode_position, _clamp(tl.load(row_words + P_START, is_prefill, other=0), last_position))
    begin = tl.where(is_decode, i, tl.minimum(decode_tokens + before, total))
    begin = tl.where(i < rows, begin, total)
    flags = tl.load(row_words + P_FLAGS, is_prefill, other=0)
    has_sample = tl.where(is_decode, 1, flags & PREFILL_SAMPLE)
    tl.store(row_slots + i, slot, i < R)
    if WINDOWS:
        length = tl.where(is_decode, tl.load(row_tokens + i, is_decode, other=0), length)
        begin = tl.where(is_decode, tl.load(query_start + i, is_decode, other=0), begin)
        final_len = tl.load(slot_params + slot * SLOT_WORDS + S_FINAL_LEN, is_decode, other=0)
        has_sample = tl.where(is_decode, (start < final_len - 1).to(tl.int32), has_sample)
        first = tl.where(i < rows, tl.where(is_decode, begin, decode_tokens + j_row), decode_tokens + prefill_rows)
        tl.store(first_sample + i, first, i <= R)
        tl.store(query_start + i, begin, (i > decode_rows) & (i <= R))  # up to there it is written, and read by others
    else:
        tl.store(query_start + i, begin, i <= R)
    tl.store(seq_lens + i, tl.where(i < rows, tl.minimum(start + length, last_position + 1), 0), i < R)
    if not WINDOWS:  # else they are of samples
        tl.store(logits_indices + i, tl.where(i < rows, _clamp(begin + length - 1, T - 1), 0), i < R)
    tl.store(samples + i, has_sample, i < R)
    if pid == 0:
        tl.store(num_decode_rows, decode_rows)
        tl.store(num_rows, rows)

    # tokens
    is_token = i < total
    is_prefill = (i >= decode_tokens) & is_token
    row_words = plan + rows_at + tl.minimum(token_row, tl.maximum(prefill_rows - 1, 0)) * PREFILL_WORDS
    token_slot = _clamp(tl.load(row_words + P_SLOT, is_prefill, other=0), num_slots - 1)
    position = tl.load(row_words + P_START, is_prefill, other=0) + j_token - row_begin
    token = tl.load(plan + tokens_at + j_token, is_prefill, other=0)
    if WINDOWS:
        is_decode = i < decode_tokens
        slot, place, decode_position, decode_token = window_tokens(
            i, is_decode, decode_rows, query_start, decode_slots, seq_len, last_token, drafts, num_slots, last_position,
            BLOCK, SEARCH_STEPS,
        )  # fmt: skip
        is_sampled = (i >= decode_tokens) & (i < decode_tokens + prefill_rows)
        sample_words = plan + rows_at + j_token * PREFILL_WORDS
        prefill_slot = _clamp(tl.load(sample_words + P_SLOT, is_sampled, other=0), num_slots - 1)
        prefill_start = _clamp(tl.load(sample_words + P_START, is_sampled, other=0), last_position)
        prefill_length = tl.maximum(tl.load(sample_words + P_LENGTH, is_sampled, other=0), 0)
        write_samples(
            i, R, decode_tokens, prefill_rows, is_decode, slot, place, decode_position, prefill_slot,
            tl.minimum(prefill_start + prefill_length, last_position + 1), _clamp(decode_tokens + sampled_end - 1, T - 1),
            num_slots, sample_slots, sample_positions, sample_places, logits_indices, num_samples,
        )  # fmt: skip
    else:
        decode_token = tl.load(last_token + slot, is_decode, other=0)
    token_slot = tl.where(is_decode, slot, token_slot)
    position = tl.where(is_decode, decode_position, _clamp(position, last_position))
    token = tl.where(is_decode, decode_token, token)
    is_kept = is_token
    if DRAFTS:  # a row that has its last token may still be in a step or two, and has no block for it
        final_len = tl.load(slot_params + token_slot * SLOT_WORDS + S_FINAL_LEN, is_decode, other=0)
        is_kept = is_token & ((is_decode == 0) | (position < final_len - 1))
    tl.store(input_ids + i, tl.where(is_token, _clamp(token, vocab - 1), 0), i < T)
    tl.store(positions + i, tl.where(is_token, position, 0), i < T)
    if AXES > 0 or AHEAD:
        places, places_at = _section(plan, H_NUM_PLACES, H_PLACES, PLACE_WORDS, plan_len)
        write_places(  # a row of positions is as long as one of the mapping
            rotary + i, stride, last_visible + i, i < T, is_token, position, slot_params + token_slot * SLOT_WORDS,
            is_decode, plan + places_at + j_token * PLACE_WORDS, is_prefill & (j_token < places), AXES, AHEAD,
        )  # fmt: skip
    for group in range(GROUPS):
        row = (group * num_slots + token_slot).to(tl.int64)
        block = tl.load(block_table + row * max_blocks + position // BLOCK_SIZE, is_kept, other=0).to(tl.int64)
        mapped = tl.where(is_kept, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping + group * stride + i, mapped, i < T)


@triton.jit
def _finish_kernel(
    plan, slot_params, seq_len, last_token, history, counts, counts_stride, entries, multiplier, pool_rows, row_slots, seq_lens,
    samples, num_rows_ptr, sampled, results, results_stride, depth, vocab, num_slots, num_drafts,
    BLOCK: tl.constexpr, TABLE_BITS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < tl.load(num_rows_ptr)
    slot = _clamp(tl.load(row_slots + row, real, other=0), num_slots - 1)
    result = tl.load(sampled + row, real, other=0)
    token = _clamp(result, vocab - 1)
    new_len = tl.load(seq_lens + row, real, other=0)
    writes = real & (tl.load(samples + row, real, other=0) == 1)
    tl.store(seq_len + slot, new_len, real)
    tl.store(last_token + slot, token, writes)
    if DRAFTS:
        tl.store(num_drafts + slot, tl.zeros_like(slot), real)

    has_processors = tl.load(slot_params + slot * SLOT_WORDS + S_HAS_PROCESSORS, writes, other=0)
    processed = (has_processors != 0) & (slot < pool_rows)
    count_tokens(counts, counts_stride, entries, multiplier, slot, token, processed, TABLE_BITS)
    place = tl.arange(0, HISTORY)[None, :]
    at = history + slot[:, None] * HISTORY + place
    older = tl.load(at + 1, processed[:, None] & (place < HISTORY - 1), other=0)
    shifted = tl.where(place < HISTORY - 1, older, token[:, None])
    tl.debug_barrier()  # every thread must have read before one writes
    tl.store(at, shifted, processed[:, None] & (place < HISTORY))

    step = tl.load(plan + H_STEP).to(tl.int64)
    word = (step << 32) | (tl.where(result == NO_TOKEN, result, token).to(tl.int64) & 0xFFFFFFFF)
    tl.store(results + (step % depth) * results_stride + row, word, real)


@triton.jit
def _logprob_words_kernel(
    plan,
    num_rows_ptr,
    logprob,
    rank,
    top_ids,
    top_logprobs,
    results,
    results_stride,
    depth,
    first_word,
    sampled,
    NUM_TOP: tl.constexpr,
    TOP_LOGPROBS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    row = tl.program_id(0)
    step = tl.load(plan + H_STEP).to(tl.int64)
    has_words = row < tl.load(num_rows_ptr)
    if WINDOWS:  # a row is a sample, and may not count
        has_words = has_words & (tl.load(sampled + row) != REJECTED)
    if has_words:
        column = tl.arange(0, BLOCK)
        is_id = (column >= L_TOP_IDS) & (column < L_TOP_IDS + NUM_TOP)
        is_logprob = (column >= TOP_LOGPROBS) & (column < TOP_LOGPROBS + NUM_TOP)
        ids = tl.load(top_ids + row * NUM_TOP + column - L_TOP_IDS, is_id, other=0)
        floats = tl.load(top_logprobs + row * NUM_TOP + column - TOP_LOGPROBS, is_logprob, other=0.0)
        floats = tl.where(column == L_LOGPROB, tl.load(logprob + row), floats)
        value = tl.where(is_id, ids, floats.to(tl.int32, bitcast=True))
        value = tl.where(column == L_RANK, tl.load(rank + row), value)
        word = (step << 32) | (value.to(tl.int64) & 0xFFFFFFFF)
        at = results + (step % depth) * results_stride + first_word + row * WORDS + column
        tl.store(at, word, column < WORDS)


def prepare_step(
    plan: torch.Tensor,
    tables: SlotTables,
    step: StepBuffers,
    num_tokens: int,
    num_rows: int,
    *,
    block_size: int,
    num_blocks: int,
    vocab: int,
    windows: bool = False,
    draft_words: torch.Tensor | None = None,
) -> None:
    """Apply the plan's changes to the tables and write the inputs of a step padded to num_tokens and num_rows.

    windows: decode rows have windows, and num_rows is the padded number of samples, too. draft_words: for `write_drafts`.
    """
    groups, num_slots, max_blocks = tables.block_table.shape
    if plan.dtype != torch.int32 or not plan.is_contiguous() or not tables.block_table.is_contiguous():
        raise ValueError("prepare_step: the plan must be contiguous int32, the block tables contiguous")
    if not (0 < num_tokens <= step.max_tokens and 0 < num_rows <= step.max_rows and len(step.slot_mapping) == groups):
        raise ValueError(f"prepare_step: {num_tokens} tokens, {num_rows} rows, {groups} groups do not fit the buffers")
    drafts = tables.drafts.shape[1] > 0
    if windows and not (drafts and num_rows <= len(step.sample_slots)):
        raise ValueError(f"prepare_step: {num_rows} samples do not fit the buffers, or the tables have no drafts")
    _apply_kernel[(APPLY_PROGRAMS,)](
        plan, plan.numel(), tables.params, tables.block_table, tables.decode_slots, tables.num_drafts, tables.survival,
        num_slots, groups * num_slots, max_blocks, num_blocks, APPLY_PROGRAMS, APPLY_BLOCK, len(tables.decode_slots), drafts,
    )  # fmt: skip
    if windows:
        share_drafts(plan, tables, step, num_rows)
    _build_kernel[(triton.cdiv(max(num_tokens, num_rows + 1), BUILD_BLOCK),)](
        plan, plan.numel(), tables.decode_slots, tables.seq_len, tables.last_token, tables.block_table,
        step.input_ids, step.positions, step.slot_mapping, step.row_slots, step.query_start, step.seq_lens, step.logits_indices,
        step.samples, step.num_decode_rows, step.num_rows, tables.params, tables.drafts, step.row_tokens, step.sample_slots,
        step.sample_positions, step.sample_places, step.first_sample, step.num_samples, step.rotary, step.last_visible,
        num_tokens, num_rows, num_slots, max_blocks, vocab, step.slot_mapping.stride(0), groups, block_size, BUILD_BLOCK,
        BUILD_CHUNK, len(step.rotary), len(tables.decode_slots), drafts, windows, step.max_rows.bit_length() * windows,
        len(step.last_visible) > 0,
    )  # fmt: skip
    if draft_words is not None:
        write_drafts(plan, step, draft_words, num_rows)


def finish_step(
    plan: torch.Tensor,
    tables: SlotTables,
    pool: LogitsProcessorPool,
    step: StepBuffers,
    sampled: torch.Tensor,
    results: torch.Tensor,
    num_rows: int,
    *,
    max_rows: int,
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    max_samples: int = 0,
    windows: bool = False,
) -> None:
    """Record the sampled tokens in the tables and write the step's result words.

    sampled int32 [num_rows]: NO_TOKEN is reported as it is, and counts as token 0. results int64 [depth, words], on the device
    or in host memory registered with CUDA; the record is row step % depth. logprobs: (log-probability f32 [R], rank i32 [R],
    ids i32 [R, NUM_TOP], log-probabilities f32 [R, NUM_TOP]). Every word carries the step, and is one 64-bit store: a reader
    polls the word itself. max_samples: of the result words' layout (result_ring.py). windows: rows have windows, `accept` has
    seen `sampled` [num_rows], and num_rows is the padded number of samples, too.
    """
    if results.dtype != torch.int64 or results.dim() != 2 or results.stride(1) != 1 or sampled.dtype != torch.int32:
        raise ValueError("finish_step: results must be int64 [depth, words], sampled int32")
    if not num_rows <= (max_samples or max_rows) <= results.shape[1]:
        raise ValueError(f"finish_step: {num_rows} rows, at most {max_rows}, {results.shape[1]} result words do not fit")
    depth = results.shape[0]
    if logprobs is not None:
        logprob, rank, top_ids, top_logprobs = logprobs
        num_top = top_ids.shape[1]
        words = sections.logprob_record(num_top)
        if results.shape[1] < sections.result_words(max_rows, num_top, max_samples):
            raise ValueError("finish_step: no room for log-probabilities in the result record")
        _logprob_words_kernel[(num_rows,)](
            plan, step.num_samples if windows else step.num_rows, logprob, rank, top_ids, top_logprobs, results,
            results.stride(0), depth, sections.first_logprob_word(max_rows, max_samples), sampled, num_top,
            words.at["top_logprobs"], words.width, triton.next_power_of_2(words.width), windows, num_warps=1,
        )  # fmt: skip
    if windows:
        return finish_windows(plan, tables, pool, step, sampled, results, num_rows, max_samples)
    pool_rows, vocab = pool.counts.shape
    _finish_kernel[(triton.cdiv(num_rows, FINISH_BLOCK),)](
        plan, tables.params, tables.seq_len, tables.last_token, tables.history, pool.counts, pool.counts.stride(0),
        pool.entries, pool.multiplier, pool_rows, step.row_slots, step.seq_lens, step.samples, step.num_rows, sampled, results,
        results.stride(0), depth, vocab, tables.max_num_seqs + 1, tables.num_drafts, FINISH_BLOCK, pool.table_bits,
        tables.drafts.shape[1] > 0, num_warps=1,
    )  # fmt: skip
