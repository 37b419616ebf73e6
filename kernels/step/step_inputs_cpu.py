"""Applying a plan and building a step's inputs on the CPU: the CPU worker's path and the oracle of `step_inputs`.

numpy over memory that the tables share with it: a dozen operations a step, where torch would take 5 µs each. An index outside
its table raises IndexError here; on the device it is clamped.
"""

import numpy as np
import torch

from quire.kernels.sampling.token_counts_cpu import count_tokens
from quire.kernels.step.tables import (
    BLOCK_WORDS,
    FLAG_SAME_DECODE_ROWS,
    H_BLOCK_UPDATES,
    H_DECODE_ROWS,
    H_FLAGS,
    H_NUM_BLOCK_UPDATES,
    H_NUM_DECODE_ROWS,
    H_NUM_PREFILL_ROWS,
    H_NUM_PREFILL_TOKENS,
    H_NUM_SLOT_UPDATES,
    H_PREFILL_ROWS,
    H_PREFILL_TOKENS,
    H_SLOT_UPDATES,
    H_STEP,
    LOGPROB_WORDS,
    NUM_TOP,
    P_FLAGS,
    P_LENGTH,
    P_SLOT,
    P_START,
    PREFILL_SAMPLE,
    PREFILL_WORDS,
    S_PROCESSOR_ROW,
    S_SLOT,
    SLOT_WORDS,
    LogitsProcessorPool,
    SlotTables,
    StepBuffers,
)


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
) -> None:
    """Apply the plan's changes to the tables and write the inputs of a step padded to num_tokens and num_rows."""
    words, h = plan.numpy(), plan[: H_PREFILL_TOKENS + 1].tolist()
    state = tables.host
    _apply(words, h, state)
    nd, n_prefill, n_prefill_tokens = h[H_NUM_DECODE_ROWS], h[H_NUM_PREFILL_ROWS], h[H_NUM_PREFILL_TOKENS]
    total, rows = nd + n_prefill_tokens, nd + n_prefill
    out = step.host
    ids, positions, slots = out["input_ids"], out["positions"], out["row_slots"]
    query_start, seq_lens, samples = out["query_start"], out["seq_lens"], out["samples"]
    decode = state["decode_slots"][:nd]
    slots[:nd] = decode
    ids[:nd] = state["last_token"][decode]
    positions[:nd] = state["seq_len"][decode]
    seq_lens[:nd] = positions[:nd] + 1
    samples[:nd] = 1
    query_start[: nd + 1] = np.arange(nd + 1)
    token_slots = decode
    if n_prefill:
        at = h[H_PREFILL_ROWS]
        prefill = words[at : at + n_prefill * PREFILL_WORDS].reshape(-1, PREFILL_WORDS)
        start, length = prefill[:, P_START], prefill[:, P_LENGTH]
        slots[nd:rows] = prefill[:, P_SLOT]
        seq_lens[nd:rows] = start + length
        samples[nd:rows] = prefill[:, P_FLAGS] & PREFILL_SAMPLE
        query_start[nd + 1 : rows + 1] = nd + np.cumsum(length)
        ids[nd:total] = words[h[H_PREFILL_TOKENS] : h[H_PREFILL_TOKENS] + n_prefill_tokens]
        positions[nd:total] = np.arange(nd, total) + np.repeat(start - query_start[nd:rows], length)
        token_slots = np.concatenate([decode, np.repeat(prefill[:, P_SLOT], length)])
    block, offset = np.divmod(positions[:total], block_size)
    mapping, block_table = out["slot_mapping"], state["block_table"]
    for group in range(len(mapping)):
        mapping[group, :total] = block_table[group, token_slots, block].astype(np.int64) * block_size + offset
    out["logits_indices"][:rows] = query_start[1 : rows + 1] - 1
    out["num_decode_rows"][0], out["num_rows"][0] = nd, rows
    _pad(out, rows, num_rows, total, num_tokens, len(state["seq_len"]) - 1)


def _apply(words: np.ndarray, h: list[int], state: dict[str, np.ndarray]) -> None:
    """Slot updates, block updates and, if the plan has them, decode rows."""
    if n := h[H_NUM_SLOT_UPDATES]:
        updates = words[h[H_SLOT_UPDATES] : h[H_SLOT_UPDATES] + n * SLOT_WORDS].reshape(n, SLOT_WORDS)
        state["params"][updates[:, S_SLOT]] = updates
    if n := h[H_NUM_BLOCK_UPDATES]:
        updates = words[h[H_BLOCK_UPDATES] : h[H_BLOCK_UPDATES] + n * BLOCK_WORDS].reshape(n, BLOCK_WORDS)
        table = state["block_table"]
        table.reshape(-1, table.shape[2])[updates[:, 0], updates[:, 1]] = updates[:, 2]
    if not h[H_FLAGS] & FLAG_SAME_DECODE_ROWS:
        n, at = h[H_NUM_DECODE_ROWS], h[H_DECODE_ROWS]
        state["decode_slots"][:n] = words[at : at + n]


def _pad(out: dict[str, np.ndarray], rows: int, num_rows: int, total: int, num_tokens: int, dummy: int) -> None:
    if rows < num_rows:
        out["row_slots"][rows:num_rows] = dummy
        out["query_start"][rows + 1 : num_rows + 1] = total
        for name in ("seq_lens", "samples", "logits_indices"):
            out[name][rows:num_rows] = 0
    if total < num_tokens:
        out["input_ids"][total:num_tokens] = 0
        out["positions"][total:num_tokens] = 0
        out["slot_mapping"][:, total:num_tokens] = -1


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
) -> None:
    """Record the sampled tokens in the tables and write the step's result words. See `step_inputs.finish_step`."""
    state, out = tables.host, step.host
    rows, step_number = int(out["num_rows"][0]), int(plan[H_STEP])
    tag = np.int64(step_number << 32)
    slots, tokens = out["row_slots"][:rows], sampled.numpy()[:rows]
    record = results.numpy()[step_number % len(results)]
    samples = out["samples"][:rows] == 1
    state["seq_len"][slots] = out["seq_lens"][:rows]
    sampling, new = slots[samples], tokens[samples]
    state["last_token"][sampling] = new
    processor_rows = state["params"][sampling, S_PROCESSOR_ROW]
    if (processed := processor_rows >= 0).any():
        history, slots_f, new_f = state["history"], sampling[processed], new[processed]
        history[slots_f, :-1] = history[slots_f, 1:]
        history[slots_f, -1] = new_f
        count_tokens(pool, processor_rows[processed], new_f)
    if logprobs is not None:
        columns = record[max_rows : max_rows + rows * LOGPROB_WORDS].reshape(rows, LOGPROB_WORDS)
        logprob, rank, top_ids, top_logprobs = (x[:rows].numpy() for x in logprobs)
        columns[:, 0] = tag | logprob.view(np.uint32)
        columns[:, 1] = tag | rank.view(np.uint32)
        columns[:, 2 : 2 + NUM_TOP] = tag | top_ids.view(np.uint32)
        columns[:, 2 + NUM_TOP :] = tag | top_logprobs.view(np.uint32)
    record[:rows] = tag | tokens.view(np.uint32)
