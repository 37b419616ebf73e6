"""Logits processors: filling rows of the pool (any device), and their effect on logits (CPU path and oracle).

`apply_logits_processors` runs eagerly, before the step in which sequences get their slots, for all of them at once. The
sampler's kernels keep the rows up to date from then on. A row applies, in order: bias and allowed ids, bad words, stop ids
below the minimum length, repetition penalty (over prompt and output), frequency and presence penalties (over the output).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from quire.ipc.step.sections import LOGITS_PROCESSORS, MAX_BAD_WORDS, MAX_MASKED_STOPS, SLOT
from quire.kernels.step.tables import (
    HISTORY,
    IN_TABLE,
    PROMPT_BIT,
    LogitsProcessorPool,
    SlotTables,
)
from quire.kernels.step.token_counts_cpu import entries_of_row, new_entries

S_PRESENCE, S_FREQUENCY, S_REPETITION = (SLOT.at[name] for name in ("presence", "frequency", "repetition"))
S_MIN_LEN = SLOT.at["min_len"]
Ids = Sequence[int] | np.ndarray
NO_DRAFTS = np.zeros(0, np.int32)


class SequenceProcessors(Protocol):
    """A sequence with logits processors: LogitsProcessors of the step plan."""

    @property
    def slot(self) -> int: ...
    @property
    def prompt_ids(self) -> Ids: ...
    @property
    def output_ids(self) -> Ids: ...
    @property
    def bias_ids(self) -> Ids: ...
    @property
    def bias_values(self) -> Sequence[float] | np.ndarray: ...
    @property
    def allowed_ids(self) -> Ids: ...
    @property
    def stop_ids(self) -> Ids: ...
    @property
    def bad_words(self) -> Sequence[Ids]: ...


def apply_logits_processors(tables: SlotTables, pool: LogitsProcessorPool, sequences: Sequence[SequenceProcessors]) -> None:
    """Fill the sequences' rows of the pool and their slots' history: one copy to the device, at most 18 launches.

    Rows are wholly replaced. Ids outside the vocabulary are dropped. Raises ValueError for a list beyond its cap.
    """
    for s in sequences:
        _check_caps(s)
    x = _on_device({**_lists(pool, sequences), **_counted(pool, sequences)}, pool.counts.device)
    slots, counts = x["slots"], pool.counts.view(-1)
    tables.history.index_copy_(0, slots, x["history"])
    pool.stop_ids.index_copy_(0, slots, x["stop_ids"])
    for tensor, empty in ((pool.counts, 0), (pool.entries, 0), (pool.allowed, -1), (pool.bad_words, -1)):
        _fill_rows(tensor, slots, empty)
    if len(x["allowed_rows"]):
        pool.allowed.index_copy_(0, x["allowed_rows"], x["allowed"])
    if len(x["bad_rows"]):
        pool.bad_words.index_copy_(0, x["bad_rows"], x["bad_words"])
    if len(x["prompt_at"]):
        counts.index_fill_(0, x["prompt_at"], PROMPT_BIT)
    if len(x["output_at"]):
        counts[x["output_at"]] = counts[x["output_at"]] | x["output_counts"]
    if len(x["counts_at"]):
        counts[x["counts_at"]] = counts[x["counts_at"]] | IN_TABLE
        pool.entries.view(-1)[x["entries_at"]] = x["entries"]


def _check_caps(sequence: SequenceProcessors) -> None:
    for field in LOGITS_PROCESSORS.lists:
        entries = getattr(sequence, field.name)
        if field.cap is not None and len(entries) > field.cap:
            raise ValueError(f"{len(entries)} {field.name}: at most {field.cap}")
        if field.item_cap is not None and max(map(len, entries), default=0) > field.item_cap:
            raise ValueError(f"one of {field.name} is longer than {field.item_cap}")


def _fill_rows(tensor: torch.Tensor, rows: torch.Tensor, value: int) -> None:
    """tensor[rows] = value; on a CPU by numpy, as torch takes 50 times as long for bytes."""
    if tensor.is_cpu:
        tensor.numpy()[rows.numpy()] = value
    else:
        tensor.index_fill_(0, rows, value)


def _lists(pool: LogitsProcessorPool, sequences: Sequence[SequenceProcessors]) -> dict[str, np.ndarray]:
    """Arrays that are copied unchanged: rows of stop ids, bad words, masks of allowed ids, history."""
    history = np.full((len(sequences), HISTORY), -1, np.int32)
    stop_ids = np.full((len(sequences), MAX_MASKED_STOPS), -1, np.int32)
    with_allowed = [s for s in sequences if len(s.allowed_ids)]
    with_bad = [s for s in sequences if len(s.bad_words)]
    bad_words = np.full((len(with_bad), MAX_BAD_WORDS, HISTORY), -1, np.int32)
    for i, s in enumerate(sequences):
        last = s.output_ids[-HISTORY:]
        history[i, HISTORY - len(last) :] = last
        stop_ids[i, : len(s.stop_ids)] = s.stop_ids
    for matrix, s in zip(bad_words, with_bad, strict=True):
        for row, word in zip(matrix, s.bad_words, strict=False):
            row[HISTORY - len(word) :] = word
    allowed = [_bits(s.allowed_ids, pool.counts.shape[1]) for s in with_allowed]
    return {
        "slots": np.array([s.slot for s in sequences], np.int64),
        "history": history,
        "stop_ids": stop_ids,
        "bad_rows": np.array([s.slot for s in with_bad], np.int64),
        "bad_words": bad_words,
        "allowed_rows": np.array([s.slot for s in with_allowed], np.int64),
        "allowed": np.concatenate(allowed) if allowed else np.zeros(0, np.int32),
    }


def _bits(ids: Ids, vocab: int) -> np.ndarray:
    """int32 [1, ceil(vocab / 32)], the ids' bits set."""
    array = np.asarray(ids, np.int64)
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[array[(array >= 0) & (array < vocab)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)[None]


def _counted(pool: LogitsProcessorPool, sequences: Sequence[SequenceProcessors]) -> dict[str, np.ndarray]:
    """Prompts, outputs and biases: tokens as indices of pool.counts flattened.

    A prompt is sent with its repetitions: they write the same byte, and sorting them here would take longer.
    """
    rows, vocab = [s.slot for s in sequences], pool.counts.shape[1]
    prompt_at, _ = _flat_ids(rows, (s.prompt_ids for s in sequences), vocab)
    output_at, output_counts = np.unique(_flat_ids(rows, (s.output_ids for s in sequences), vocab)[0], return_counts=True)
    bias_at, inside = _flat_ids(rows, (s.bias_ids for s in sequences), vocab)
    biases = np.concatenate([np.asarray(s.bias_values, np.float32) for s in sequences])[inside]
    entries = new_entries(pool, output_at, output_counts, bias_at, biases)
    return {
        "prompt_at": prompt_at,
        "output_at": output_at,
        "output_counts": np.minimum(output_counts, IN_TABLE).astype(np.uint8),
        "counts_at": entries.counts_at,
        "entries_at": entries.entries_at,
        "entries": entries.values,
    }


def _flat_ids(rows: list[int], lists: Iterable[Ids], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(row * vocab + id of each id inside the vocabulary, int64; which of the ids these are, bool)."""
    arrays = [np.asarray(ids, np.int64) for ids in lists]
    ids = np.concatenate(arrays)
    inside = (ids >= 0) & (ids < vocab)
    return (np.repeat(np.array(rows, np.int64) * vocab, [len(a) for a in arrays]) + ids)[inside], inside


def _on_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors: on a GPU by one asynchronous copy out of pinned memory."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays.values()]).tolist()
    staged = torch.empty(ends[-1], dtype=torch.uint8).pin_memory()
    begins = dict(zip(arrays, [0, *ends], strict=False))
    for name, array in arrays.items():
        staged.numpy()[begins[name] :][: array.nbytes] = array.reshape(-1).view(np.uint8)
    copied = staged.to(device, non_blocking=True)
    return {
        name: copied[begins[name] :][: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for name, array in arrays.items()
    }


def processed_row(
    logits: np.ndarray,
    slot: int,
    position: int,
    tables: SlotTables,
    pool: LogitsProcessorPool,
    drafts: np.ndarray = NO_DRAFTS,
) -> np.ndarray:
    """The logits (float32 [V]) of one sample after its slot's processors; position: of the token that is to be sampled.

    drafts: int32 [n], tokens before it that count as output although the tables do not have them yet."""
    params = tables.host["params"][slot]
    floats, x = params.view(np.float32), logits.copy()
    words = pool.counts[slot].numpy()
    seen = np.flatnonzero(words != 0)  # penalties and biases touch nothing else
    if len(drafts):
        seen = np.union1d(seen, drafts)
    words = words[seen]
    count = (words & IN_TABLE).astype(np.int32)
    if (count == IN_TABLE).any():
        tokens, extra, bias = entries_of_row(pool, slot)
        count[np.searchsorted(seen, tokens)] += extra
        x[tokens] += bias
    if len(drafts):
        np.add.at(count, np.searchsorted(seen, drafts), 1)
    allowed = pool.allowed[slot].numpy()
    if not (allowed == -1).all():
        x[np.unpackbits(allowed.view(np.uint8), bitorder="little", count=len(x)) == 0] = -np.inf
    history = tables.host["history"][slot]
    banned = banned_ids(pool.bad_words[slot].numpy(), np.concatenate([history, drafts])[-HISTORY:] if len(drafts) else history)
    if position < params[S_MIN_LEN]:
        banned += pool.stop_ids[slot].tolist()
    if banned:
        ids = np.array(banned)
        x[ids[(ids >= 0) & (ids < len(x))]] = -np.inf
    y = x[seen]
    penalised = np.where(y > 0, y / floats[S_REPETITION], y * floats[S_REPETITION])
    y = np.where((count > 0) | (words >= PROMPT_BIT), penalised, y)
    x[seen] = y - floats[S_FREQUENCY] * count.astype(np.float32) - np.where(count > 0, floats[S_PRESENCE], np.float32(0))
    return x


def banned_ids(bad_words: np.ndarray, history: np.ndarray) -> list[int]:
    """Last tokens of those bad words [n, HISTORY] of which the other tokens end the history [HISTORY]."""
    prefix = bad_words[:, :-1]
    matches = ((prefix == -1) | (prefix == history[1:])).all(1)
    return [x for x in bad_words[matches, -1].tolist() if x >= 0]
