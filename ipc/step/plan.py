"""StepPlan: the workers' instructions for one step, as int32 words in one buffer. Written by the core, read by every worker.

A plan carries deltas only: the state of a running sequence (block table, length, last token, sampling parameters) is on the
device, in tables indexed by slot, and a decode row that merely continues costs no byte here. A plan is a header and the
sections that the step needs, at the places that the header says; sections.py declares their content, word by word.

Rows of a step are its decode rows, then its prefill rows; the tokens are laid out in the same order. Every row yields one
result word; the core ignores that of a prefill row without PREFILL_SAMPLE. In a step with windows, a decode row yields one for
each of its tokens; how many it has is decided on the device, within `window` and `draft_tokens`.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.ipc.step.sections import (
    FLAG_ADAPTERS,
    FLAG_SAME_DECODE_ROWS,
    HEADER,
    LOGITS_PROCESSORS,
    PREFILL_CANDIDATES,
    PREFILL_POOL,
    PREFILL_PROMPT_LOGPROBS,
    SECTIONS,
    SLOT_VALUES,
    STEP_MASK,
    WORD,
    ListField,
    Record,
)

_NUMPY = {"int32": "<i4", "float32": "<f4", "uint64": "<u8"}
_STRUCT = {"int32": "i", "float32": "f", "uint64": "Q"}


def dtype_of(record: Record) -> np.dtype:
    """The numpy dtype of a record: structured, as wide as the record, fields by name; plain int32 for words of a list."""
    if record is WORD:
        return np.dtype(np.int32)
    return np.dtype(
        {
            "names": [f.name for f in record.fields],
            "formats": [(_NUMPY[f.dtype], f.length) if f.length > 1 else _NUMPY[f.dtype] for f in record.fields],
            "offsets": [4 * record.at[f.name] for f in record.fields],
            "itemsize": 4 * record.width,
        }
    )


def struct_of(record: Record) -> struct.Struct:
    """Packs one row of a record from its fields' values, in their order."""
    formats = "".join(_STRUCT[f.dtype] * f.length for f in record.fields)
    return struct.Struct(f"<{formats}{4 * (record.width - record.used)}x")


DTYPES = {s.name: dtype_of(s.record) for s in SECTIONS}
_NO_ROWS = {name: np.zeros(0, dtype) for name, dtype in DTYPES.items()}
_STEP, _FLAGS, _SAMPLING_KIND, _WORDS = (HEADER.at[name] for name in ("step", "flags", "sampling_kind", "words"))
_MAX_SEQ_LEN, _DEVICE_WORDS = HEADER.at["max_seq_len"], HEADER.at["device_words"]
_MICRO_BATCH, _LAG = HEADER.at["micro_batch"], HEADER.at["lag"]
_WINDOW, _MASK_WINDOW, _DRAFT_TOKENS = (HEADER.at[name] for name in ("window", "mask_window", "draft_tokens"))
_DRAFT_DEPTH = HEADER.at["draft_depth"]
_DECODE = "decode_rows"
# (name, its count's word in the header, words of a row, dtype); the word after the count's is the section's offset
_PLACES = [(s.name, HEADER.at[f"num_{s.name}"], s.record.width, DTYPES[s.name]) for s in SECTIONS]
_NUM_DEVICE = sum(s.applied == "device" for s in SECTIONS)  # they come first
_ON_DEVICE, _ELSEWHERE = _PLACES[:_NUM_DEVICE], _PLACES[_NUM_DEVICE:]


def default_slots(count: int) -> np.ndarray:
    """Slot updates [count] with the defaults of unused slots."""
    rows = np.zeros(count, DTYPES["slot_updates"])
    for value in SLOT_VALUES:
        rows[value.name] = value.default
    return rows


@dataclass(frozen=True)
class StepPlan:
    """A plan before it is written, or after it is read. sections: name -> array of DTYPES, for sections that it has."""

    step: int
    sections: Mapping[str, np.ndarray]
    sampling_kind: int = 0
    same_decode_rows: bool = False  # decode_rows are those of the micro-batch's last plan: send only their number
    max_seq_len: int = 0
    micro_batch: int = 0
    lag: int = 0
    window: int = 1
    draft_tokens: int = 0
    draft_depth: int = 0
    mask_window: int = 1
    has_adapters: bool = False  # some row has an adapter

    def section(self, name: str) -> np.ndarray:
        """The section's rows; empty if the plan has none."""
        return self.sections.get(name, _NO_ROWS[name])

    @property
    def decode_rows(self) -> np.ndarray:
        """int32 [n] slots."""
        return self.section(_DECODE)

    @property
    def has_items(self) -> bool:
        """Whether some prompt tokens have embeddings of items, or positions that these have moved."""
        return "places" in self.sections

    @property
    def has_runs(self) -> bool:
        """Whether items are encoded before the step."""
        return "encoder_runs" in self.sections

    @property
    def prefill_rows(self) -> np.ndarray:
        """[n], fields of PREFILL."""
        return self.section("prefill_rows")

    @property
    def prefill_tokens(self) -> np.ndarray:
        """int32 [n], of all prefill rows, one after the other."""
        return self.section("prefill_tokens")

    @property
    def mask_rows(self) -> np.ndarray:
        """int32 [n], rows with masks, which follow in the ring: sample only after them."""
        return self.section("mask_rows")

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.prefill_rows)

    @property
    def num_tokens(self) -> int:
        """At most: there may be fewer drafts."""
        return len(self.decode_rows) + self.draft_tokens + len(self.prefill_tokens)

    @property
    def num_samples(self) -> int:
        """The number of result words; an upper bound of the samples."""
        return self.num_rows + self.draft_tokens

    @property
    def has_mask_rows(self) -> bool:
        return "mask_rows" in self.sections

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self._has_chunks(PREFILL_PROMPT_LOGPROBS)

    @property
    def wants_candidates(self) -> bool:
        return self._has_chunks(PREFILL_CANDIDATES)

    @property
    def wants_vectors(self) -> bool:
        return self._has_chunks(PREFILL_POOL)

    def _has_chunks(self, flags: int) -> bool:
        rows = self.sections.get("prefill_rows")
        return rows is not None and bool((rows["flags"] & flags).any())

    def encode(self) -> np.ndarray:
        """The plan as one int32 array."""
        header = [0] * HEADER.width
        parts: list[np.ndarray] = []
        at = self._place(_ON_DEVICE, HEADER.width, header, parts)
        header[_DEVICE_WORDS] = at
        if len(self.sections) > len(parts):
            at = self._place(_ELSEWHERE, at, header, parts)
        header[_STEP], header[_SAMPLING_KIND], header[_WORDS] = self.step & STEP_MASK, self.sampling_kind, at
        header[_FLAGS] = FLAG_SAME_DECODE_ROWS * self.same_decode_rows | FLAG_ADAPTERS * self.has_adapters
        header[_MAX_SEQ_LEN] = self.max_seq_len
        header[_MICRO_BATCH], header[_LAG] = self.micro_batch, self.lag
        header[_WINDOW], header[_MASK_WINDOW], header[_DRAFT_TOKENS] = self.window, self.mask_window, self.draft_tokens
        header[_DRAFT_DEPTH] = self.draft_depth
        return np.concatenate([np.array(header, np.int32), *parts])

    def _place(self, places: list[tuple[str, int, int, np.dtype]], at: int, header: list[int], parts: list[np.ndarray]) -> int:
        """Lay out the plan's sections among `places`, from word `at` on; returns the word after them."""
        for name, count_at, _, _ in places:
            rows = self.sections.get(name)
            if rows is None:
                continue
            header[count_at], header[count_at + 1] = len(rows), at
            if name == _DECODE and self.same_decode_rows:
                continue
            words = rows.view(np.int32)
            parts.append(words)
            at += len(words)
        return at


def decode_plan(words: np.ndarray, last_decode_rows: np.ndarray) -> StepPlan:
    """Read a plan. Its sections are views into `words`; last_decode_rows: of its micro-batch, if the plan repeats them."""
    h = words[: HEADER.width].tolist()
    same = bool(h[_FLAGS] & FLAG_SAME_DECODE_ROWS)
    sections = {}
    for name, count_at, width, dtype in _PLACES:
        if count := h[count_at]:
            at = h[count_at + 1]
            sections[name] = words[at : at + count * width].view(dtype)
    if same:
        sections[_DECODE] = last_decode_rows
    drafts = h[_WINDOW], h[_DRAFT_TOKENS], h[_DRAFT_DEPTH], h[_MASK_WINDOW]
    places = h[_MAX_SEQ_LEN], h[_MICRO_BATCH], h[_LAG], *drafts
    return StepPlan(h[_STEP], sections, h[_SAMPLING_KIND], same, *places, bool(h[_FLAGS] & FLAG_ADAPTERS))


Ids = Sequence[int] | np.ndarray


class LogitsProcessors(NamedTuple):
    """Rare sampling state of one sequence. sections.LOGITS_PROCESSORS declares and explains the fields."""

    slot: int
    prompt_ids: Ids
    output_ids: Ids
    bias_ids: Ids
    bias_values: Sequence[float] | np.ndarray
    allowed_ids: Ids
    stop_ids: Ids
    bad_words: Sequence[Sequence[int]]


def encode_logits_processors(processors: LogitsProcessors) -> np.ndarray:
    """One record of LOGITS_PROCESSORS, int32."""
    values, record = processors._asdict(), LOGITS_PROCESSORS
    lists = [_list_words(field, values[field.name]) for field in record.lists]
    head = [record.head, *(values[field.name] for field in record.fields), *map(len, lists)]
    head[0] += sum(map(len, lists))
    return np.concatenate([np.array(head, np.int32), *lists])


def _list_words(field: ListField, entries: Sequence[Any] | np.ndarray) -> np.ndarray:
    if field.item_cap is not None:
        entries = [word for entry in entries for word in (len(entry), *entry)]
    return np.asarray(entries, _NUMPY[field.dtype]).view(np.int32)


def decode_logits_processors(words: np.ndarray) -> list[LogitsProcessors]:
    """All records of a plan's section `logits_processors`; lists of single words are views into `words`."""
    out, at = [], 0
    while at < len(words):
        record = words[at : at + int(words[at])]
        out.append(_processors_of(record))
        at += len(record)
    return out


def _processors_of(words: np.ndarray) -> LogitsProcessors:
    record, at = LOGITS_PROCESSORS, LOGITS_PROCESSORS.head
    values: dict[str, Any] = {f.name: int(words[record.at[f.name]]) for f in record.fields}
    for field, length in zip(record.lists, words[record.lengths : at].tolist(), strict=True):
        part = words[at : at + length]
        values[field.name] = part.view(_NUMPY[field.dtype]) if field.item_cap is None else _items(part.tolist())
        at += length
    return LogitsProcessors(**values)


def _items(words: list[int]) -> list[list[int]]:
    items, at = [], 0
    while at < len(words):
        end = at + 1 + words[at]
        items.append(words[at + 1 : end])
        at = end
    return items
