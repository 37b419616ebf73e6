"""Drafts from a sequence's own text: the CPU worker's path and the oracle of `ngram`.

The text is kept by KV slot, an int32 id for each token of the cache: a row's block table reads it, whoever has written it, so
a prefix that was cached needs nothing. See `ngram.py` of workers/speculation/.
"""

import numpy as np
import torch

from quire.kernels.step.tables import SlotTables, StepBuffers


def write_text(step: StepBuffers, text: torch.Tensor, group: int, num_tokens: int) -> None:
    """Note a step's tokens: text int32 [num_blocks * block_size], by slot of the KV group. Its inputs must be built."""
    slots, ids = step.host["slot_mapping"][group, :num_tokens], step.host["input_ids"][:num_tokens]
    written = slots >= 0
    text.numpy()[slots[written]] = ids[written]


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

    The longest suffix of the row's text, of min_n to max_n tokens, that occurs before its end; of several places the last. The
    num_drafts drafts are the tokens that follow there, again and again if the text ends before: it may be a loop.
    """
    state, ids = tables.host, text.numpy()
    for row in range(min(num_rows, int(step.host["num_rows"][0]))):
        if not step.host["samples"][row]:
            continue
        slot = step.host["row_slots"][row]
        length = int(state["seq_len"][slot])
        blocks = state["block_table"][group, slot, : -(-length // block_size)].astype(np.int64)
        known = ids.reshape(-1, block_size)[blocks].reshape(-1)[:length]
        known = np.append(known, state["last_token"][slot])
        following = _following(known, min_n, max_n)
        drafts = np.resize(following, num_drafts if len(following) else 0)
        state["drafts"][slot, : len(drafts)] = drafts
        state["num_drafts"][slot] = len(drafts)


def _following(known: np.ndarray, min_n: int, max_n: int) -> np.ndarray:
    """The tokens behind the last occurrence of the longest suffix."""
    ends, longest = np.flatnonzero(known[:-1] == known[-1]), 1
    while longest < max_n:
        longer = ends[ends >= longest]
        longer = longer[known[longer - longest] == known[-1 - longest]]
        if not len(longer):
            break
        ends, longest = longer, longest + 1
    return known[ends[-1] + 1 :] if len(ends) and longest >= min_n else known[:0]
