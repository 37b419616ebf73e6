"""The device work around a draft model's passes: the CPU worker's path and the oracle of `draft_passes`.

A pass reads the known tokens that the draft model has not computed, as many as it has room for, and drafts for the rows that
have caught up: prompts, cached prefixes, accepted drafts and gaps are one case. Drafts are fed to the model one after another.
"""

import numpy as np
import torch

from quire.ipc.step.sections import HEADER, MAX_WINDOW, SLOT
from quire.kernels.speculation.draft_state import UNKNOWN, DraftState
from quire.kernels.step.tables import SlotTables, StepBuffers

_NUM_UPDATES, _UPDATES = HEADER.at["num_slot_updates"], HEADER.at["slot_updates"]
_SLOT, _FINAL_LEN, _MAX_WINDOW = SLOT.at["slot"], SLOT.at["final_len"], SLOT.at["max_window"]


def begin_sequences(plan: torch.Tensor, tables: SlotTables, state: DraftState, group: int) -> None:
    """For the slots that a plan gives to new sequences, before its other changes are made: empty their block tables in the KV
    group, and forget what was computed. So an entry of 0, the null block, is one that the sequence has not."""
    words = plan.numpy()
    count, at = int(words[_NUM_UPDATES]), int(words[_UPDATES])
    slots = words[at : at + count * SLOT.width].reshape(count, SLOT.width)[:, _SLOT]
    tables.host["block_table"][group, slots] = 0
    state.host["draft_len"][slots] = UNKNOWN


def note_tokens(step: StepBuffers, state: DraftState, group: int, num_tokens: int, *, block_size: int) -> None:
    """Note a step's tokens by KV slot, and that a block whose first token is written has new contents."""
    slots, ids = step.host["slot_mapping"][group, :num_tokens], step.host["input_ids"][:num_tokens]
    written = slots >= 0
    slots = slots[written]
    state.host["text"][slots] = ids[written]
    state.host["filled"][slots[slots % block_size == 0] // block_size] = 0


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
    """Build the inputs of a pass of at most num_tokens tokens for the step's first num_rows rows; its tokens are in the tables.

    Each row gets the tokens that follow those computed, as far as its block table reaches; a decode row at most MAX_WINDOW. A
    row that has all known tokens then gets drafts: at most `depth`, none whose sample would lie behind its last token, and none
    that follows a token at position `longest` or beyond. vocab: the draft model's. Returns the numbers of tokens and rows,
    padded on a GPU.
    """
    host, now, seqs, dst = tables.host, step.host, state.host, out.host
    count, num_decode = min(num_rows, int(now["num_rows"][0])), int(now["num_decode_rows"][0])
    total, dummy = 0, len(host["seq_len"]) - 1
    dst["query_start"][0] = 0
    for row in range(count):
        slot, samples = int(now["row_slots"][row]), int(now["samples"][row])
        blocks, params, length = host["block_table"][group, slot], host["params"][slot], int(host["seq_len"][slot])
        start = int(seqs["draft_len"][slot])
        if start == UNKNOWN:
            start = _computed(seqs["filled"], blocks, length, block_size)
        missing = np.flatnonzero(blocks == 0)
        reach = min(int(missing[0] if len(missing) else len(blocks)) * block_size, int(params[_FINAL_LEN]) - 1, longest)
        known = length + samples
        tokens = min(known, reach) - start
        tokens = max(min(tokens, num_tokens - total, MAX_WINDOW if row < num_decode else tokens), 0)
        end = start + tokens
        at = np.arange(start, end)
        slots = blocks[at // block_size].astype(np.int64) * block_size + at % block_size
        span = slice(total, total + tokens)
        dst["positions"][span], dst["slot_mapping"][:, span] = at, slots
        dst["input_ids"][span] = np.where(at < length, seqs["text"][slots], host["last_token"][slot]).clip(0, vocab - 1)
        if tokens:
            np.maximum.at(seqs["filled"], blocks[at // block_size], (at % block_size + 1).astype(np.int32))
        total += tokens
        dst["row_slots"][row], dst["query_start"][row + 1], dst["seq_lens"][row] = slot, total, end if tokens else 0
        seqs["draft_len"][slot] = end
        most = min(depth, int(params[_MAX_WINDOW]) - 1, reach - length, int(params[_FINAL_LEN]) - 2 - length)
        drafts = max(most, 0) if samples and end == known else 0
        seqs["first_position"][row], seqs["num_drafts"][row], seqs["ids"][row, 0] = length, drafts, host["last_token"][slot]
        seqs["slots"][row] = slot if drafts else dummy
        seqs["positions"][row], seqs["places"][row] = length + 1 if drafts else 0, 0
        dst["logits_indices"][row] = total - 1 if drafts else 0
        if drafts:
            host["num_drafts"][slot] = drafts
    dst["num_rows"][0], dst["num_decode_rows"][0] = count, num_decode
    return total, count


def _computed(filled: np.ndarray, blocks: np.ndarray, length: int, block_size: int) -> int:
    """How many of a sequence's first `length` tokens are computed, by what is of its blocks."""
    of_blocks = filled[blocks[: -(-length // block_size)]]
    partial = np.flatnonzero(of_blocks < block_size)
    return min(int(partial[0] * block_size + of_blocks[partial[0]]) if len(partial) else length, length)


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
    """Keep the drafts at `place`, int32 [num_rows], and build the inputs of the pass for the next ones, a token a row.

    A row that gets no more has a token at position 0 of the dummy slot, which is not written. Returns the number of rows; on a
    CPU 0 if none gets more.
    """
    host, seqs, dst, tokens = tables.host, state.host, out.host, sampled.numpy()[:num_rows]
    dummy = len(host["seq_len"]) - 1
    slots, drafts = dst["row_slots"][:num_rows], seqs["num_drafts"][:num_rows]
    kept = drafts > place
    host["drafts"][seqs["slots"][:num_rows][kept], place] = tokens[kept]
    if place + 1 == MAX_WINDOW - 1 or not (more := drafts > place + 1).any():
        return 0
    seqs["ids"][:num_rows, place + 1] = np.maximum(tokens, 0)
    position = np.where(more, seqs["first_position"][:num_rows] + place + 1, 0)
    slots[~more] = dummy
    seqs["slots"][:num_rows], seqs["places"][:num_rows] = slots, place + 1
    seqs["positions"][:num_rows] = np.where(more, position + 1, 0)
    dst["query_start"][: num_rows + 1] = np.arange(num_rows + 1)
    dst["seq_lens"][:num_rows], dst["positions"][:num_rows] = position + 1, position
    dst["input_ids"][:num_rows] = tokens.clip(0, vocab - 1)
    blocks = host["block_table"][group, slots, position // block_size].astype(np.int64)
    dst["slot_mapping"][:, :num_rows] = np.where(more, blocks * block_size + position % block_size, -1)
    return num_rows
