"""Applying a plan and building a step's inputs on the CPU: the CPU worker's path and the oracle of `step_inputs`.

numpy on memory shared with the tables: a dozen operations a step, where torch would take 5 µs each. An index outside its table
raises IndexError here; on the device it is clamped.
"""

import numpy as np
import torch

from quire.ipc.step.sections import (
    BLOCK,
    FLAG_SAME_DECODE_ROWS,
    HEADER,
    PLACE,
    PREFILL,
    PREFILL_SAMPLE,
    REJECTED,
    SLOT,
    UNUSED,
    first_logprob_word,
    logprob_record,
)
from quire.kernels.step.survival import observe_cpu
from quire.kernels.step.tables import LogitsProcessorPool, SlotTables, StepBuffers
from quire.kernels.step.token_counts_cpu import count_tokens
from quire.kernels.step.windows_cpu import share_drafts, write_drafts

_STEP, _FLAGS = HEADER.at["step"], HEADER.at["flags"]
_NUM_DECODE, _NUM_PREFILL = HEADER.at["num_decode_rows"], HEADER.at["num_prefill_rows"]
_NUM_PREFILL_TOKENS, _MICRO_BATCH = HEADER.at["num_prefill_tokens"], HEADER.at["micro_batch"]
_DRAFT_TOKENS, _FINAL_LEN = HEADER.at["draft_tokens"], SLOT.at["final_len"]
_START, _LENGTH = PREFILL.at["start"], PREFILL.at["length"]


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
    """Apply the plan's changes to the tables, and write the inputs of a step padded to num_tokens and num_rows.

    windows: decode rows have windows, and num_rows is the padded number of samples, too. draft_words: for `write_drafts`.
    """
    words = plan.numpy()
    h = words[: HEADER.width].tolist()
    state, out = tables.host, step.host
    _apply(words, h, state)
    if windows:
        share_drafts(plan, tables, step, num_rows)
    nd, n_prefill, n_prefill_tokens = h[_NUM_DECODE], h[_NUM_PREFILL], h[_NUM_PREFILL_TOKENS]
    rows = nd + n_prefill
    ids, positions, slots = out["input_ids"], out["positions"], out["row_slots"]
    query_start, seq_lens, samples = out["query_start"], out["seq_lens"], out["samples"]
    slots[:nd] = decode = state["decode_slots"][h[_MICRO_BATCH], :nd]
    computed, last = state["seq_len"][decode], state["params"][decode, _FINAL_LEN] - 1
    samples[:nd] = 1
    if windows:
        first = _put_windows(state, out, nd, vocab)
        samples[:nd] = computed < last
    else:
        first = nd
        ids[:nd], positions[:nd], seq_lens[:nd] = state["last_token"][decode], computed, computed + 1
        query_start[: nd + 1] = np.arange(nd + 1)
    total = first + n_prefill_tokens
    if first != nd:
        decode, last = (x.repeat(out["row_tokens"][:nd]) for x in (decode, last))
    token_slots = decode
    if n_prefill:
        prefill = _rows(words, h, "prefill_rows", PREFILL.width)
        start, length = prefill[:, _START], prefill[:, _LENGTH]
        slots[nd:rows] = prefill[:, PREFILL.at["slot"]]
        seq_lens[nd:rows] = start + length
        samples[nd:rows] = prefill[:, PREFILL.at["flags"]] & PREFILL_SAMPLE
        query_start[nd + 1 : rows + 1] = first + np.cumsum(length)
        ids[first:total] = _rows(words, h, "prefill_tokens", 1)[:, 0]
        positions[first:total] = np.arange(first, total) + np.repeat(start - query_start[nd:rows], length)
        token_slots = np.concatenate([decode, np.repeat(slots[nd:rows], length)])
    places = _rows(words, h, "places", PLACE.width)
    if len(rotary := out["rotary"]):
        _put_rotary(rotary, positions, state["params"][decode, SLOT.at["rotary_delta"]], places, total)
    if len(ahead := out["last_visible"]):
        ahead[:num_tokens] = 0
        ahead[:total] = positions[:total]
        if len(places):
            np.maximum(ahead[first:total], places[:, PLACE.at["last_visible"]], out=ahead[first:total])
    block, offset = np.divmod(positions[:total], block_size)
    mapping, block_table = out["slot_mapping"], state["block_table"]
    ended = np.flatnonzero(positions[:first] >= last)  # the row's last token was sampled, which is never computed
    for group in range(len(mapping)):
        mapping[group, :total] = block_table[group, token_slots, block].astype(np.int64) * block_size + offset
        mapping[group, ended] = -1
    out["num_decode_rows"][0], out["num_rows"][0] = nd, rows
    if windows:
        _put_samples(out, nd, rows, num_rows, len(state["seq_len"]) - 1)
    else:
        out["logits_indices"][:rows] = query_start[1 : rows + 1] - 1
        out["logits_indices"][rows:num_rows] = 0
    _pad(out, rows, num_rows, total, num_tokens, len(state["seq_len"]) - 1)
    rotary[:, total:num_tokens] = 0
    if draft_words is not None:
        write_drafts(plan, step, draft_words, num_rows)


def _put_rotary(rotary: np.ndarray, positions: np.ndarray, deltas: np.ndarray, places: np.ndarray, total: int) -> None:
    """Write rotary positions [axes, tokens]: those of places [n, PLACE.width], if prompts have some; deltas: of decode rows."""
    first = len(deltas)
    rotary[:, :first] = positions[:first] + deltas
    rotary[:, first:total] = positions[first:total]
    if len(places):
        rotary[:, first:total] = places[:, PLACE.at["rotary_0"] :][:, : len(rotary)].T


def _put_windows(state: dict[str, np.ndarray], out: dict[str, np.ndarray], nd: int, vocab: int) -> int:
    """Write the tokens of nd decode rows with windows; returns their number. Drafts of a hostile drafter are clamped."""
    slots, lengths, starts = out["row_slots"][:nd], out["row_tokens"][:nd], out["query_start"]
    starts[0], starts[1 : nd + 1] = 0, np.cumsum(lengths)
    total = int(starts[nd])
    places = out["sample_places"][:total] = np.arange(total) - starts[:nd].repeat(lengths)
    token_slots = slots.repeat(lengths)
    drafts = state["drafts"][token_slots, places - 1].clip(0, vocab - 1)
    out["input_ids"][:total] = np.where(places > 0, drafts, state["last_token"][token_slots])
    out["positions"][:total] = state["seq_len"][token_slots] + places
    out["seq_lens"][:nd] = state["seq_len"][slots] + lengths
    return total


def _put_samples(out: dict[str, np.ndarray], nd: int, rows: int, padded: int, dummy: int) -> None:
    """Write what samples are, in a step with windows: a decode row's are its tokens."""
    first = int(out["query_start"][nd])
    count = first + rows - nd
    out["num_samples"][0] = count
    out["first_sample"][:nd] = out["query_start"][:nd]
    out["first_sample"][nd:rows] = np.arange(first, count)
    out["first_sample"][rows : padded + 1] = count
    out["sample_slots"][:first] = out["row_slots"][:nd].repeat(out["row_tokens"][:nd])
    out["sample_positions"][:first] = out["positions"][:first] + 1
    out["logits_indices"][:first] = np.arange(first)
    out["sample_slots"][first:count] = out["row_slots"][nd:rows]
    out["sample_positions"][first:count] = out["seq_lens"][nd:rows]
    out["logits_indices"][first:count] = out["query_start"][nd + 1 : rows + 1] - 1
    out["sample_slots"][count:padded] = dummy
    out["sample_places"][first:padded] = 0
    for name in ("sample_positions", "logits_indices"):
        out[name][count:padded] = 0


def _rows(words: np.ndarray, h: list[int], section: str, width: int) -> np.ndarray:
    """[n, width]: a section of the plan with header h."""
    n, at = h[HEADER.at[f"num_{section}"]], h[HEADER.at[section]]
    return words[at : at + n * width].reshape(n, width)


def _apply(words: np.ndarray, h: list[int], state: dict[str, np.ndarray]) -> None:
    """Slot updates, block updates and, if the plan has them, decode rows."""
    if h[HEADER.at["num_slot_updates"]]:
        updates = _rows(words, h, "slot_updates", SLOT.width)
        slots = updates[:, SLOT.at["slot"]]
        state["params"][slots], state["num_drafts"][slots] = updates, 0
        state["survival"][slots] = state["survival"][-2]  # that of a new sequence
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
        for name in ("seq_lens", "samples"):
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
    max_samples: int = 0,
    windows: bool = False,
) -> None:
    """Record the sampled tokens in the tables and write the step's result words. See `step_inputs.finish_step`."""
    state, out = tables.host, step.host
    rows, step_number = int(out["num_rows"][0]), int(plan[_STEP])
    tag = np.int64(step_number << 32)
    record, tokens = results.numpy()[step_number % len(results)], sampled.numpy()
    if windows:
        tokens = tokens[: int(out["num_samples"][0])]
        _record_windows(state, out, pool, rows, tokens)
        record[len(tokens) : rows + int(plan[_DRAFT_TOKENS])] = tag | np.int64(UNUSED & 0xFFFFFFFF)
        record[max_samples : max_samples + rows] = tag | out["first_sample"][:rows]
    else:
        tokens, samples = tokens[:rows], out["samples"][:rows] == 1
        state["seq_len"][out["row_slots"][:rows]] = out["seq_lens"][:rows]
        _record(state, pool, out["row_slots"][:rows][samples], tokens[samples])
    if state["drafts"].size:
        state["num_drafts"][out["row_slots"][:rows]] = 0
    if logprobs is not None:
        columns = record[first_logprob_word(max_rows, max_samples) :]
        _write_logprobs(columns, tag, np.flatnonzero(tokens != REJECTED), *(x.numpy() for x in logprobs))
    record[: len(tokens)] = tag | tokens.view(np.uint32)


def _record(state: dict[str, np.ndarray], pool: LogitsProcessorPool, slots: np.ndarray, tokens: np.ndarray) -> None:
    """One token of each of some slots, all different."""
    new = np.maximum(tokens, 0)
    state["last_token"][slots] = new
    if (processed := state["params"][slots, SLOT.at["has_processors"]] != 0).any():
        history, slots_f, new_f = state["history"], slots[processed], new[processed]
        history[slots_f, :-1] = history[slots_f, 1:]
        history[slots_f, -1] = new_f
        count_tokens(pool, slots_f, new_f)


def _record_windows(
    state: dict[str, np.ndarray], out: dict[str, np.ndarray], pool: LogitsProcessorPool, rows: int, tokens: np.ndarray
) -> None:
    """The accepted tokens of a step with windows. A decode row computes more tokens than it accepts."""
    slots, accepted, first = out["row_slots"][:rows], out["accepted"][:rows], out["first_sample"][:rows]
    decode = int(out["num_decode_rows"][0])
    state["seq_len"][slots] = out["seq_lens"][:rows] - out["row_tokens"][:rows]
    state["seq_len"][slots[:decode]] += accepted[:decode]
    observe_cpu(state["survival"], slots[:decode], out["row_tokens"][:decode] - 1, accepted[:decode])
    for place in range(int(accepted.max(initial=0))):
        has_it = accepted > place
        _record(state, pool, slots[has_it], tokens[first[has_it] + place])


def _write_logprobs(
    columns: np.ndarray,
    tag: np.int64,
    samples: np.ndarray,
    logprob: np.ndarray,
    rank: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
) -> None:
    """Write the records of some samples, int [n], into the result words from the first record on."""
    num_top = top_ids.shape[1]
    words = logprob_record(num_top)
    values = np.empty((len(samples), words.width), np.int64)
    values[:, words.at["logprob"]] = logprob.view(np.uint32)[samples]
    values[:, words.at["rank"]] = rank.view(np.uint32)[samples]
    for name, some in (("top_ids", top_ids), ("top_logprobs", top_logprobs)):
        values[:, words.at[name] : words.at[name] + num_top] = some.view(np.uint32)[samples]
    columns[: len(columns) // words.width * words.width].reshape(-1, words.width)[samples] = tag | values
