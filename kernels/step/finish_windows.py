"""Recording the tokens of a step with windows: what `step_inputs.finish_step` does where rows have several samples.

seq_len, last_token, history and counts of the rows go by their accepted tokens; then come a 64-bit word a sample, REJECTED if
it does not count, UNUSED behind the last one, and a word a row, the index of its first sample. Rows and samples are padded to
one number, so a program takes as many of each. `step_inputs_cpu` is the reference. Moves 8 bytes a sample, and 100 a row.
"""

import torch
import triton
import triton.language as tl

import quire.ipc.step.sections as sections
from quire.ipc.step.sections import HEADER, SLOT
from quire.kernels.step.tables import HISTORY as HISTORY_TOKENS
from quire.kernels.step.tables import LogitsProcessorPool, SlotTables, StepBuffers
from quire.kernels.step.token_counts import count_tokens
from quire.kernels.step.windows import observe_survival

H_STEP, H_DRAFT_TOKENS = tl.constexpr(HEADER.at["step"]), tl.constexpr(HEADER.at["draft_tokens"])
SLOT_WORDS, S_HAS_PROCESSORS = tl.constexpr(SLOT.width), tl.constexpr(SLOT.at["has_processors"])
MAX_WINDOW, HISTORY = tl.constexpr(sections.MAX_WINDOW), tl.constexpr(HISTORY_TOKENS)
UNUSED = tl.constexpr(sections.UNUSED)

ROWS = 16  # of a program, and samples


@triton.jit
def _shift_history(history, slot, sampled, first, count, processed, vocab):
    """Append each row's accepted tokens to its history, of which as many leave at the other end."""
    place = tl.arange(0, HISTORY)[None, :]
    at = place + count[:, None]
    row = history + slot[:, None] * HISTORY
    is_new = processed[:, None] & (at >= HISTORY)
    older = tl.load(row + at, processed[:, None] & (at < HISTORY), other=0)
    new = tl.load(sampled + first[:, None] + at - HISTORY, is_new, other=0)
    shifted = tl.where(is_new, tl.minimum(tl.maximum(new, 0), vocab - 1), older)
    tl.debug_barrier()  # every thread must have read before one writes
    tl.store(row + place, shifted, processed[:, None] & (place < HISTORY))


@triton.jit(do_not_specialize=["num_padded"])  # one compilation for all padded sizes
def _finish_kernel(
    plan, slot_params, seq_len, last_token, num_drafts, survival, history, counts, counts_stride, entries, multiplier,
    pool_rows, row_slots, seq_lens, row_tokens, first_sample, accepted, num_decode_rows, num_rows_ptr, num_samples_ptr,
    sampled, results, results_stride, depth, max_samples, num_padded, vocab, num_slots,
    ROWS: tl.constexpr, TABLE_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    num_rows = tl.load(num_rows_ptr)
    real = (row < num_rows) & (row < num_padded)
    slot = tl.minimum(tl.maximum(tl.load(row_slots + row, real, other=0), 0), num_slots - 1)
    count = tl.minimum(tl.maximum(tl.load(accepted + row, real, other=0), 0), MAX_WINDOW)
    first = tl.minimum(tl.maximum(tl.load(first_sample + row, real, other=0), 0), num_padded - 1)
    count = tl.minimum(count, num_padded - first)
    new_len = tl.load(seq_lens + row, real, other=0) - tl.load(row_tokens + row, real, other=0)
    new_len += tl.where(row < tl.load(num_decode_rows), count, 0)  # a prefill row has computed all of its tokens
    writes = real & (count > 0)
    last = tl.load(sampled + first + count - 1, writes, other=0)
    tl.store(seq_len + slot, new_len, real)
    tl.store(last_token + slot, tl.minimum(tl.maximum(last, 0), vocab - 1), writes)
    tl.store(num_drafts + slot, tl.zeros_like(slot), real)
    decode = real & (row < tl.load(num_decode_rows))
    observe_survival(survival, slot, decode, tl.load(row_tokens + row, decode, other=1) - 1, count)

    has_processors = tl.load(slot_params + slot * SLOT_WORDS + S_HAS_PROCESSORS, writes, other=0)
    processed = (has_processors != 0) & (slot < pool_rows)
    for place in range(tl.max(tl.where(processed, count, 0), 0)):
        counted = processed & (place < count)
        token = tl.load(sampled + first + place, counted, other=0)
        token = tl.minimum(tl.maximum(token, 0), vocab - 1)
        count_tokens(counts, counts_stride, entries, multiplier, slot, token, counted, TABLE_BITS)
        tl.debug_barrier()  # the next token may be the same
    _shift_history(history, slot, sampled, first, count, processed, vocab)

    step = tl.load(plan + H_STEP).to(tl.int64)
    record = results + (step % depth) * results_stride
    num_samples = tl.minimum(tl.load(num_samples_ptr), num_padded)
    result = tl.load(sampled + row, row < num_samples, other=UNUSED)
    result = tl.where(result >= 0, tl.minimum(result, vocab - 1), result)
    num_words = tl.minimum(num_rows + tl.maximum(tl.load(plan + H_DRAFT_TOKENS), 0), num_padded)
    tl.store(record + row, (step << 32) | (result.to(tl.int64) & 0xFFFFFFFF), row < num_words)
    tl.store(record + max_samples + row, (step << 32) | first.to(tl.int64), real)


def finish_windows(
    plan: torch.Tensor,
    tables: SlotTables,
    pool: LogitsProcessorPool,
    step: StepBuffers,
    sampled: torch.Tensor,
    results: torch.Tensor,
    num_rows: int,
    max_samples: int,
) -> None:
    """`step_inputs.finish_step` for a step with windows, of which `accept` has seen `sampled`; num_rows: of samples, too."""
    if not 0 < num_rows <= min(len(sampled), len(step.accepted), max_samples):
        raise ValueError(f"finish_windows: {num_rows} rows and samples do not fit {len(sampled)}, at most {max_samples}")
    pool_rows, vocab = pool.counts.shape
    _finish_kernel[(triton.cdiv(num_rows, ROWS),)](
        plan, tables.params, tables.seq_len, tables.last_token, tables.num_drafts, tables.survival, tables.history, pool.counts,
        pool.counts.stride(0), pool.entries, pool.multiplier, pool_rows, step.row_slots, step.seq_lens, step.row_tokens,
        step.first_sample, step.accepted, step.num_decode_rows, step.num_rows, step.num_samples, sampled, results,
        results.stride(0), len(results), max_samples, num_rows, vocab, tables.max_num_seqs + 1, ROWS, pool.table_bits,
        num_warps=1,
    )  # fmt: skip
