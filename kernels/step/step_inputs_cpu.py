"""Applying a plan and building a step's inputs on the CPU: the CPU worker's path and the oracle of `step_inputs`.

numpy on memory shared with the tables: a dozen operations a step, where torch would take 5 µs each. An index outside its table
raises IndexError here; on the device it is clamped.
"""

import numpy as np
import torch

from quire.ipc.step.sections import BLOCK, FLAG_SAME_DECODE_ROWS, HEADER, LOGPROBS, MAX_LOGPROBS, PREFILL, PREFILL_SAMPLE, SLOT
from quire.kernels.step.tables import LogitsProcessorPool, SlotTables, StepBuffers
from quire.kernels.step.token_counts_cpu import count_tokens

_STEP, _FLAGS = HEADER.at["step"], HEADER.at["flags"]
_NUM_DECODE, _NUM_PREFILL = HEADER.at["num_decode_rows"], HEADER.at["num_prefill_rows"]
_NUM_PREFILL_TOKENS, _MICRO_BATCH = HEADER.at["num_prefill_tokens"], HEADER.at["micro_batch"]
_START, _LENGTH = PREFILL.at["start"], PREFILL.at["length"]
_TOP_IDS, _TOP_LOGPROBS = LOGPROBS.at["top_ids"], LOGPROBS.at["top_logprobs"]


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
    """Apply the plan's changes to the tables, and write the inputs of a step padded to num_tokens and num_rows."""
    words = plan.numpy()
    h = words[: HEADER.width].tolist()
    state = tables.host
    _apply(words, h, state)
    nd, n_prefill, n_prefill_tokens = h[_NUM_DECODE], h[_NUM_PREFILL], h[_NUM_PREFILL_TOKENS]
    total, rows = nd + n_prefill_tokens, nd + n_prefill
    out = step.host
    ids, positions, slots = out["input_ids"], out["positions"], out["row_slots"]
    query_start, seq_lens, samples = out["query_start"], out["seq_lens"], out["samples"]
    decode = state["decode_slots"][h[_MICRO_BATCH], :nd]
    slots[:nd] = decode
    ids[:nd] = state["last_token"][decode]
    positions[:nd] = state["seq_len"][decode]
    seq_lens[:nd] = positions[:nd] + 1
    samples[:nd] = 1
    query_start[: nd + 1] = np.arange(nd + 1)
    token_slots = decode
    if n_prefill:
        prefill = _rows(words, h, "prefill_rows", PREFILL.width)
        start, length = prefill[:, _START], prefill[:, _LENGTH]
        slots[nd:rows] = prefill[:, PREFILL.at["slot"]]
        seq_lens[nd:rows] = start + length
        samples[nd:rows] = prefill[:, PREFILL.at["flags"]] & PREFILL_SAMPLE
        query_start[nd + 1 : rows + 1] = nd + np.cumsum(length)
        ids[nd:total] = _rows(words, h, "prefill_tokens", 1)[:, 0]
        positions[nd:total] = np.arange(nd, total) + np.repeat(start - query_start[nd:rows], length)
        token_slots = np.concatenate([decode, np.repeat(slots[nd:rows], length)])
    block, offset = np.divmod(positions[:total], block_size)
    mapping, block_table = out["slot_mapping"], state["block_table"]
    for group in range(len(mapping)):
        mapping[group, :total] = block_table[group, token_slots, block].astype(np.int64) * block_size + offset
    out["logits_indices"][:rows] = query_start[1 : rows + 1] - 1
    out["num_decode_rows"][0], out["num_rows"][0] = nd, rows
    _pad(out, rows, num_rows, total, num_tokens, len(state["seq_len"]) - 1)


def _rows(words: np.ndarray, h: list[int], section: str, width: int) -> np.ndarray:
    """[n, width]: a section of the plan with header h."""
    n, at = h[HEADER.at[f"num_{section}"]], h[HEADER.at[section]]
    return words[at : at + n * width].reshape(n, width)


def _apply(words: np.ndarray, h: list[int], state: dict[str, np.ndarray]) -> None:
    """Slot updates, block updates and, if the plan has them, decode rows."""
    if h[HEADER.at["num_slot_updates"]]:
        updates = _rows(words, h, "slot_updates", SLOT.width)
        state["params"][updates[:, SLOT.at["slot"]]] = updates
    if h[HEADER.at["num_block_updates"]]:
        updates = _rows(words, h, "block_updates", BLOCK.width)
        tables, indices, blocks = (updates[:, BLOCK.at[name]] for name in ("table", "index", "block"))
        table = state["block_table"]
        table.reshape(-1, table.shape[2])[tables, indices] = blocks
    if not h[_FLAGS] & FLAG_SAME_DECODE_ROWS:
        state["decode_slots"][h[_MICRO_BATCH], : h[_NUM_DECODE]] = _rows(words, h, "decode_rows", 1)[:, 0]


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
    rows, step_number = int(out["num_rows"][0]), int(plan[_STEP])
    tag = np.int64(step_number << 32)
    slots, tokens = out["row_slots"][:rows], sampled.numpy()[:rows]
    record = results.numpy()[step_number % len(results)]
    samples = out["samples"][:rows] == 1
    state["seq_len"][slots] = out["seq_lens"][:rows]
    sampling, new = slots[samples], np.maximum(tokens[samples], 0)
    state["last_token"][sampling] = new
    if (processed := state["params"][sampling, SLOT.at["has_processors"]] != 0).any():
        history, slots_f, new_f = state["history"], sampling[processed], new[processed]
        history[slots_f, :-1] = history[slots_f, 1:]
        history[slots_f, -1] = new_f
        count_tokens(pool, slots_f, new_f)
    if logprobs is not None:
        columns = record[max_rows : max_rows + rows * LOGPROBS.width].reshape(rows, LOGPROBS.width)
        logprob, rank, top_ids, top_logprobs = (x[:rows].numpy() for x in logprobs)
        columns[:, LOGPROBS.at["logprob"]] = tag | logprob.view(np.uint32)
        columns[:, LOGPROBS.at["rank"]] = tag | rank.view(np.uint32)
        columns[:, _TOP_IDS : _TOP_IDS + MAX_LOGPROBS] = tag | top_ids.view(np.uint32)
        columns[:, _TOP_LOGPROBS : _TOP_LOGPROBS + MAX_LOGPROBS] = tag | top_logprobs.view(np.uint32)
    record[:rows] = tag | tokens.view(np.uint32)
