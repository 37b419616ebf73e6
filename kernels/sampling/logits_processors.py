"""Logits processors: filling a row of the pool (any device), and what a row does to logits (CPU path and oracle).

`apply_logits_processors` runs eagerly, before the step in which a sequence gets its slot. The sampler's kernels keep the row
up to date from then on. What a row does, in order: bias and allowed ids, bad words, stop ids below the minimum length,
repetition penalty (over prompt and output), frequency and presence penalties (over the output).
"""

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.step.tables import (
    HISTORY,
    MAX_BAD_WORDS,
    MAX_STOP_IDS,
    PROMPT_BIT,
    S_FREQUENCY,
    S_MIN_LEN,
    S_PRESENCE,
    S_PROCESSOR_ROW,
    S_REPETITION,
    LogitsProcessorPool,
    SlotTables,
)

Ids = Sequence[int] | np.ndarray


def apply_logits_processors(
    tables: SlotTables,
    pool: LogitsProcessorPool,
    slot: int,
    processor_row: int,
    prompt_ids: Ids,
    output_ids: Ids,
    bias_ids: Ids,
    bias_values: Sequence[float],
    allowed_ids: Ids,
    stop_ids: Ids,
    bad_words: Sequence[Ids],
) -> None:
    """Fill row `processor_row` of the pool, and the slot's history, for one sequence.

    The arguments after `pool` are those of plan.LogitsProcessors. Ids outside the vocabulary are dropped. Lists
    beyond their caps raise ValueError.
    """
    device, vocab = pool.counts.device, pool.counts.shape[1]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def ids(values: Ids) -> np.ndarray:
        array = np.asarray(values, np.int64)
        return array[(array >= 0) & (array < vocab)]

    counts = pool.counts[processor_row].zero_()
    seen, values = _counts(ids(prompt_ids), ids(output_ids))
    if len(seen):
        counts[put(seen)] = put(values)

    bias = pool.bias[processor_row].fill_(-torch.inf if len(allowed_ids) else 0.0)
    if len(allowed_ids):
        bias[put(ids(allowed_ids))] = 0.0
    if len(bias_ids):
        inside = np.asarray(bias_ids, np.int64) < vocab
        bias.index_add_(0, put(np.asarray(bias_ids, np.int64)[inside]), put(np.asarray(bias_values, np.float32)[inside]))

    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    if len(stop_ids) > MAX_STOP_IDS or len(bad_words) > MAX_BAD_WORDS:
        raise ValueError(f"{len(stop_ids)} stop ids, {len(bad_words)} bad words: at most {MAX_STOP_IDS} and {MAX_BAD_WORDS}")
    stops[: len(stop_ids)] = stop_ids
    pool.stop_ids[processor_row].copy_(put(stops))
    words = np.full((MAX_BAD_WORDS, HISTORY), -1, np.int32)
    for row, word in zip(words, bad_words, strict=False):
        row[HISTORY - len(word) :] = word
    pool.bad_words[processor_row].copy_(put(words))

    history = np.full(HISTORY, -1, np.int32)
    last = np.asarray(output_ids, np.int32)[-HISTORY:]
    history[HISTORY - len(last) :] = last
    tables.history[slot].copy_(put(history))


def _counts(prompt: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids that occur, and their words for LogitsProcessorPool.counts."""
    seen, inverse = np.unique(np.concatenate([prompt, output]), return_inverse=True)
    counts = np.bincount(inverse[len(prompt) :], minlength=len(seen)).astype(np.int32)
    counts[inverse[: len(prompt)]] |= PROMPT_BIT
    return seen, counts


def processed_row(
    logits: np.ndarray, params: np.ndarray, position: int, history: np.ndarray, pool: LogitsProcessorPool
) -> np.ndarray:
    """One row's logits (float32 [V]) after its processors; params int32 [SLOT_WORDS], history int32 [HISTORY] of its slot."""

    row, floats = int(params[S_PROCESSOR_ROW]), params.view(np.float32)
    x = logits + pool.bias[row].numpy()
    for banned in banned_ids(pool.bad_words[row].numpy(), history):
        if 0 <= banned < len(x):
            x[banned] = -np.inf
    if position < params[S_MIN_LEN]:
        stops = pool.stop_ids[row].numpy()
        x[stops[(stops >= 0) & (stops < len(x))]] = -np.inf
    words = pool.counts[row].numpy()
    seen = np.flatnonzero(words)  # penalties touch nothing else
    count, y = (words[seen] & (PROMPT_BIT - 1)).astype(np.float32), x[seen]
    y = np.where(y > 0, y / floats[S_REPETITION], y * floats[S_REPETITION])
    x[seen] = y - floats[S_FREQUENCY] * count - np.where(count > 0, floats[S_PRESENCE], np.float32(0))
    return x


def banned_ids(bad_words: np.ndarray, history: np.ndarray) -> list[int]:
    """Last tokens of the bad words [n, HISTORY] whose other tokens end the history [HISTORY]."""
    prefix = bad_words[:, :-1]
    matches = ((prefix == -1) | (prefix == history[1:])).all(1)
    return [x for x in bad_words[matches, -1].tolist() if x >= 0]
