"""The sampler on the device: processors, masks, temperature, filters, race, log-probabilities. No sort, no host decision.

    mask       token_mask[r] = allowed ids without bad words and stop ids; rows with processors only
    partial    block_max[r, b] = max over block b; block_sum[r, b] = sum exp((x - block_max) / T)
    filter     (kernels/sampling/sampler_filter.py) rows with top-k, top-p or min-p: threshold, race over what passes
    combine    greedy: the block with the largest max, the first token that has it; random: the block with the largest
               block_max / T + log(block_sum) - log(E_b), and in it the token with the largest x / T - log(E_v)

logits [R, V] bfloat16, float16 or float32, any row stride; row_slots, positions int32 [R] (position: index in its sequence of
the token to be sampled = seq_lens); bitmask int32 [R, V / 32 or more], bit set = allowed (optional). V up to 2^18 = 512 blocks.
x are the logits in float32. Rows with processors are penalized and masked whenever they are read: a byte and two bits more per
token, where a float32 copy would take 622 MB for 1,024 rows. Bytes: R * V of these, plus one block a row. In a step with
windows a row here is a sample.

Products and sums are rounded one by one (no fused multiply-add), so that a row's logits are the same bits in every kernel, with
every combination of flags, and on the CPU. `sampler_cpu` defines the semantics, and the differences that are allowed. Launches,
grids and arguments depend on shapes and flags alone, so a graph may hold them.
"""

import torch
import triton
import triton.language as tl

from quire.ipc.step.sections import MAX_WINDOW
from quire.kernels.sampling.sampler_filter import launch_filter
from quire.kernels.sampling.sampler_logits import (
    BLOCK,
    HISTORY,
    MAX_BAD_WORDS,
    MAX_MASKED_STOPS,
    NO_TOKEN,
    PURPOSE_BLOCK,
    PURPOSE_TOKEN,
    S_MIN_LEN,
    S_SEED_HI,
    S_SEED_LO,
    S_TEMPERATURE,
    drafts_of_row,
    end_window,
    float_param,
    has_processors,
    is_filtered,
    leaves_nothing,
    load_logits,
    log_exponential,
    noise_bits,
    processors_of_row,
    row_state,
)
from quire.kernels.sampling.top_logits import top_logits
from quire.kernels.step import tables as words
from quire.kernels.step.tables import LogitsProcessorPool, SamplerWorkspace, SlotTables, WindowIds

PARTIAL_BLOCKS = 8  # blocks of SAMPLER_BLOCK tokens that one program of the first pass takes
MASK_TILE = 1024  # words
MAX_VOCAB = 1 << 18


@triton.jit
def _ban(mask_row, token, banned):
    """Clear the bits of banned tokens; several may be in one word."""
    tl.atomic_and(mask_row + (token >> 5), ~(1 << (token & 31)), banned, sem="relaxed")


@triton.jit
def _token_mask_kernel(
    row_slots, positions, slot_params, history, allowed, bad_words, stop_ids, pool_rows, token_mask, token_mask_stride, V,
    num_words, num_slots, input_ids, places, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Allowed ids minus the last token of bad words that match the history's end, and stop ids below the minimum length."""
    row = tl.program_id(0)
    param_row, position, slot = row_state(row, row_slots, positions, slot_params, num_slots)
    if has_processors(slot, param_row, pool_rows):
        out = token_mask + row.to(tl.int64) * token_mask_stride
        for start in range(0, num_words, TILE):
            at = start + tl.arange(0, TILE)
            tl.store(out + at, tl.load(allowed + slot.to(tl.int64) * num_words + at, at < num_words), at < num_words)
        tl.debug_barrier()  # words stored above are changed below by other threads
        if position < tl.load(param_row + S_MIN_LEN):
            stop = tl.load(stop_ids + slot * MAX_MASKED_STOPS + tl.arange(0, MAX_MASKED_STOPS))
            _ban(out, stop, (stop >= 0) & (stop < V))
        word = tl.arange(0, MAX_BAD_WORDS)
        place = tl.arange(0, HISTORY)
        at = bad_words + (slot * MAX_BAD_WORDS + word) * HISTORY
        tokens = tl.load(at[:, None] + place[None, :])
        if WINDOW:  # drafts take the places of the oldest
            last_draft, num_drafts = drafts_of_row(row, input_ids, places, WINDOW)
            older = place + 1 + num_drafts
            recent = tl.load(history + slot * HISTORY + older, older < HISTORY, other=-1)
            is_draft = (older >= HISTORY) & (place < HISTORY - 1)
            recent = tl.where(is_draft, tl.load(last_draft + place - (HISTORY - 2), is_draft, other=-1), recent)
        else:
            recent = tl.load(history + slot * HISTORY + place + 1, place < HISTORY - 1, other=-1)
        fits = (tokens == -1) | (tokens == recent[None, :]) | (place == HISTORY - 1)[None, :]
        matches = tl.min(fits.to(tl.int32), 1) == 1
        banned = tl.load(at + HISTORY - 1)
        _ban(out, banned, matches & (banned >= 0) & (banned < V))


@triton.jit
def _partial_kernel(
    logits, stride, counts, counts_stride, entries, multiplier, pool_rows, token_mask, token_mask_stride, bitmask, mask_stride,
    row_slots, input_ids, places, slot_params, block_max, block_sum, V, num_blocks, num_slots,
    BLOCKS: tl.constexpr, RANDOM: tl.constexpr, PROCESSORS: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    cols = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    param_row, _, slot = row_state(row, row_slots, row_slots, slot_params, num_slots)
    processors = processors_of_row(
        row, slot, param_row, counts, counts_stride, entries, multiplier, pool_rows, token_mask, token_mask_stride, input_ids,
        places, PROCESSORS, WINDOW,
    )  # fmt: skip
    x = load_logits(logits + row * stride, processors, bitmask + row * mask_stride, cols, V, PROCESSORS, MASK, WINDOW)
    top = tl.max(x, 1)
    tl.store(block_max + row * num_blocks + blocks, top, blocks < num_blocks)
    if RANDOM:
        temperature = float_param(param_row, S_TEMPERATURE)
        scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        reference = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(tl.exp((x - reference[:, None]) * scale), 1)
        tl.store(block_sum + row * num_blocks + blocks, total, blocks < num_blocks)


@triton.jit
def _combine_kernel(
    logits, stride, counts, counts_stride, entries, multiplier, pool_rows, token_mask, token_mask_stride, bitmask, mask_stride,
    row_slots, input_ids, places, positions, slot_params, block_max, block_sum, sampled, V, num_blocks, num_slots,
    BLOCKS: tl.constexpr, RANDOM: tl.constexpr, FILTER: tl.constexpr, PROCESSORS: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    param_row, position, slot = row_state(row, row_slots, positions, slot_params, num_slots)
    blocks = tl.arange(0, BLOCKS)
    maxima = tl.load(block_max + row * num_blocks + blocks, blocks < num_blocks, other=-float("inf"))
    key = maxima
    if RANDOM:
        temperature = float_param(param_row, S_TEMPERATURE)
        random = temperature > 0.0
        scale = 1.0 / tl.where(random, temperature, 1.0)
        top = tl.max(maxima, 0)
        top = tl.where(top == -float("inf"), 0.0, top)
        seed_lo = tl.load(param_row + S_SEED_LO)
        seed_hi = tl.load(param_row + S_SEED_HI)
        total = tl.load(block_sum + row * num_blocks + blocks, blocks < num_blocks, other=1.0)
        log_e = log_exponential(noise_bits(seed_lo, seed_hi, position, PURPOSE_BLOCK, blocks))
        key = tl.where(random, (maxima - top) * scale + tl.log(total) - log_e, maxima)
    first = tl.argmax(key, 0) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    processors = processors_of_row(
        row, slot, param_row, counts, counts_stride, entries, multiplier, pool_rows, token_mask, token_mask_stride, input_ids,
        places, PROCESSORS, WINDOW,
    )  # fmt: skip
    x = load_logits(logits + row * stride, processors, bitmask + row * mask_stride, cols, V, PROCESSORS, MASK, WINDOW)
    if RANDOM:
        log_e = log_exponential(noise_bits(seed_lo, seed_hi, position, PURPOSE_TOKEN, cols))
        x = tl.where(random, (x - top) * scale - log_e, x)
    token = tl.minimum(first + tl.argmax(x, 0), V - 1).to(tl.int32)
    if PROCESSORS:
        token = tl.where(leaves_nothing(maxima, processors), NO_TOKEN, token)
    token = end_window(token, maxima, row, places, MASK, WINDOW)
    if FILTER:
        tl.store(sampled + row, token, is_filtered(param_row, V) == 0)
    else:
        tl.store(sampled + row, token)


@triton.jit
def _logprob_partial_kernel(
    logits, stride, sampled, part_max, part_sum, part_greater, V, num_parts, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    """For one tile of raw logits: maximum, sum of exponentials, number of logits above the sampled token's."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = tl.minimum(tl.maximum(tl.load(sampled + row), 0), V - 1)
    target = tl.load(logits + row * stride + token).to(tl.float32)
    top = tl.full([CHUNK], -3e38, tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    greater = tl.zeros([CHUNK], tl.int32)
    for i in range(0, TILE, CHUNK):
        cols = part * TILE + i + tl.arange(0, CHUNK)
        x = tl.load(logits + row * stride + cols, cols < V, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
        greater += (x > target).to(tl.int32)
    best = tl.max(top, 0)
    at = row * num_parts + part
    tl.store(part_max + at, best)
    tl.store(part_sum + at, tl.sum(total * tl.exp(top - best), 0))
    tl.store(part_greater + at, tl.sum(greater, 0))


@triton.jit
def _logprob_combine_kernel(
    logits, stride, sampled, part_max, part_sum, part_greater, logsumexp, logprob, rank, V, num_parts, PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    top = tl.load(part_max + row * num_parts + parts, inside, other=-3e38)
    total = tl.load(part_sum + row * num_parts + parts, inside, other=0.0)
    best = tl.max(top, 0)
    norm = best + tl.log(tl.sum(total * tl.exp(top - best), 0))
    token = tl.minimum(tl.maximum(tl.load(sampled + row), 0), V - 1)
    tl.store(logsumexp + row, norm)
    tl.store(logprob + row, tl.load(logits + row * stride + token).to(tl.float32) - norm)
    tl.store(rank + row, 1 + tl.sum(tl.load(part_greater + row * num_parts + parts, inside, other=0), 0))


def _check(logits: torch.Tensor, workspace: SamplerWorkspace, bitmask: torch.Tensor | None) -> None:
    rows, vocab = logits.shape
    if not logits.dtype.is_floating_point or logits.stride(1) != 1 or vocab > MAX_VOCAB:
        raise ValueError(f"sampler: logits of {logits.dtype}, {vocab} tokens (at most {MAX_VOCAB}), must have unit stride")
    if rows > len(workspace.sampled) or workspace.block_max.shape[1] != triton.cdiv(vocab, words.SAMPLER_BLOCK):
        raise ValueError(f"sampler: workspace does not fit {rows} rows of {vocab} tokens")
    if bitmask is not None and (bitmask.dtype != torch.int32 or bitmask.shape[0] < rows or bitmask.shape[1] * 32 < vocab):
        raise ValueError(f"sampler: bitmask {bitmask.dtype} {bitmask.shape} does not fit {rows} rows of {vocab} tokens")


def sample(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    positions: torch.Tensor,
    tables: SlotTables,
    pool: LogitsProcessorPool,
    workspace: SamplerWorkspace,
    *,
    random: bool,
    filtered: bool = False,
    processors: bool = False,
    bitmask: torch.Tensor | None = None,
    window: WindowIds | None = None,
) -> torch.Tensor:
    """int32 [R] tokens, a view of the workspace. The flags say what any row of the step may need.

    A superfluous flag only costs time. A row that needs a flag that is not set is sampled without it. Every result is a valid
    token id, whatever the logits, except for a row with processors (and mask) that allow no token: NO_TOKEN. With `window`,
    rows are samples, and processors count the drafts before them; a sample behind a draft is NO_TOKEN, too, if its mask allows
    no token.
    """
    _check(logits, workspace, bitmask)
    rows, vocab = logits.shape
    num_slots, pool_rows, bits = tables.max_num_seqs + 1, pool.num_rows, pool.table_bits if processors else 0
    num_blocks = triton.cdiv(vocab, words.SAMPLER_BLOCK)
    most, ids = 0, (row_slots, row_slots)
    if window is not None and (processors or bitmask is not None):
        most, ids = -window.stride or MAX_WINDOW, window[:2]
    sampled, token_mask = workspace.sampled[:rows], workspace.token_mask
    if rows == 0:
        return sampled
    if processors:
        if pool.counts.shape[1] != vocab or token_mask.shape[1] != pool.allowed.shape[1]:
            raise ValueError(f"sampler: pool {pool.counts.shape}, workspace {token_mask.shape}, {vocab} tokens do not fit")
        _token_mask_kernel[(rows,)](
            row_slots, positions, tables.params, tables.history, pool.allowed, pool.bad_words, pool.stop_ids, pool_rows,
            token_mask, token_mask.stride(0), vocab, pool.allowed.shape[1], num_slots, *ids, MASK_TILE, most, num_warps=4,
        )  # fmt: skip
    mask, mask_stride = (row_slots, 0) if bitmask is None else (bitmask, bitmask.stride(0))
    source = (
        logits, logits.stride(0), pool.counts, pool.counts.stride(0), pool.entries, pool.multiplier, pool_rows, token_mask,
        token_mask.stride(0), mask, mask_stride, row_slots, *ids,
    )  # fmt: skip
    _partial_kernel[(rows, triton.cdiv(num_blocks, PARTIAL_BLOCKS))](
        *source, tables.params, workspace.block_max, workspace.block_sum, vocab, num_blocks, num_slots,
        PARTIAL_BLOCKS, random, bits, bitmask is not None, most, num_warps=8, maxnreg=128 if bits else None,
        enable_fp_fusion=False,
    )  # fmt: skip
    if random and filtered:
        launch_filter(source, positions, tables, workspace, rows, vocab, bits, bitmask is not None, most)
    _combine_kernel[(rows,)](
        *source, positions, tables.params, workspace.block_max, workspace.block_sum, sampled, vocab, num_blocks, num_slots,
        triton.next_power_of_2(num_blocks), random, random and filtered, bits, bitmask is not None, most, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return sampled


def sampled_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, workspace: SamplerWorkspace, num_top: int = words.NUM_TOP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For raw logits: (log-probability of the sampled token f32 [R], its rank i32 [R], top ids i32 [R, num_top], theirs).

    rank = 1 + number of larger logits. Reads the logits twice. `top_logits` chooses among equal logits.
    """
    _check(logits, workspace, None)
    rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, words.LOGPROB_TILE)
    parts = (workspace.part_max, workspace.part_sum, workspace.part_greater)
    logsumexp, logprob, rank = workspace.logsumexp[:rows], workspace.logprob[:rows], workspace.rank[:rows]
    _logprob_partial_kernel[(rows, num_parts)](
        logits, logits.stride(0), sampled, *parts, vocab, num_parts, words.LOGPROB_TILE, 1024, num_warps=4
    )
    _logprob_combine_kernel[(rows,)](
        logits, logits.stride(0), sampled, *parts, logsumexp, logprob, rank, vocab, num_parts,
        triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip
    values, ids = top_logits(logits, min(num_top, vocab))
    missing = num_top - values.shape[1]
    values = values.float() - logsumexp.unsqueeze(1)
    if missing:
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(ids, (0, missing))
    return logprob, rank, ids.int(), values
