"""PlanBuilder: collects one step's plan for the workers while the scheduler decides, and makes arrays of it. No I/O.

The scheduler owns every decision and all state of sequences; this file only encodes them (ipc/step/plan.py).
"""

from operator import attrgetter, itemgetter

import numpy as np

from quire.enginecore.scheduling.sequence import Sequence
from quire.enginecore.tasks.task import Chunk, SideTarget
from quire.ipc.media import MAX_AXES
from quire.ipc.step.custom_processors import CustomProcessorsRecord, encode_record
from quire.ipc.step.items import Run, encode_runs
from quire.ipc.step.late_queries import encode_queries
from quire.ipc.step.plan import DTYPES, LogitsProcessors, StepPlan, encode_logits_processors, struct_of
from quire.ipc.step.sections import (
    MAX_BAD_WORD_TOKENS,
    PREFILL,
    PREFILL_SAMPLE,
    SAMPLING_WINDOWS,
    SLOT,
    SLOT_VALUES,
)

NO_WORDS = np.zeros(0, np.int32)
_prefill_values = itemgetter(*(f.name for f in PREFILL.fields))
_PREFILL_ROW, _SLOT_ROW = struct_of(PREFILL), struct_of(SLOT)


class PlanBuilder:
    """Collects one step's changes and rows."""

    def __init__(self, step: int, now: float) -> None:
        self.step = step
        self.now = now
        self.micro_batch = self.lag = 0  # see sections.HEADER
        self.window, self.draft_tokens, self.draft_depth, self.mask_window = 1, 0, 0, 1
        self.row_windows: np.ndarray | None = None  # int32 [decode rows], most tokens of each in a step with windows
        self.has_adapters = False  # some row has an adapter
        self.has_narrow_rows = False  # some row has fewer than its slot and the step allow
        self.slot_updates: list[bytes] = []  # of slot_words
        self.block_updates: list[tuple[int, int, int]] = []  # fields of BLOCK
        self.state_copies: list[tuple[int, int]] = []  # fields of STATE_COPY
        self.kept_inputs: list[tuple[int, int, int, int]] = []  # fields of KEPT_INPUTS
        self.prefills: list[tuple[Sequence, int]] = []
        self.samples: list[bool] = []
        self.side_targets: dict[int, SideTarget] = {}  # by the index of a prefill row
        self._prefill_rows: list[bytes] = []
        self._prefill_tokens: list[np.ndarray] = []
        self._processors: list[np.ndarray] = []
        self._custom_processors: list[np.ndarray] = []
        self._places: list[np.ndarray | tuple[int, int]] = []  # of each prefill row; (start, end) if they are plain
        self._runs: list[Run] = []
        self._queries: dict[bytes, list[int]] = {}  # prefill rows, by the vectors that they are compared with
        self.num_prefill_tokens = 0
        self.processor_words = 0  # of the sections that have no cap: processors and queries
        self.table_updates = 0  # block updates that repeat a cached prefix

    def add_prefill(self, seq: Sequence, token_ids: np.ndarray, start: int, chunk: Chunk, **states: int) -> None:
        """Add a chunk of a prompt, from position `start` on; `states`: the fields of PREFILL about states."""
        end = start + len(token_ids)
        values = {"slot": seq.slot, "start": start, "length": len(token_ids), **chunk._asdict(), **states}
        if (target := seq.task.side_target(seq, chunk, start, end)) is not None:
            self.side_targets[len(self.prefills)] = target
        if chunk.query:
            self.processor_words += len(chunk.query) // 4 * (chunk.query not in self._queries)
            self._queries.setdefault(chunk.query, []).append(len(self.prefills))
        self.prefills.append((seq, end))
        self.samples.append(bool(chunk.flags & PREFILL_SAMPLE))
        self._prefill_rows.append(_PREFILL_ROW.pack(*_prefill_values(values)))
        self._prefill_tokens.append(token_ids)
        self.num_prefill_tokens += len(token_ids)

    def add_places(self, places: np.ndarray | None, runs: list[Run], start: int, end: int) -> None:
        """Add the places of the chunk added last, tokens [start, end) (None: they are plain), and runs of the encoder."""
        self._places.append((start, end) if places is None else places)
        self._runs += runs

    def add_processors(self, processors: LogitsProcessors) -> None:
        record = encode_logits_processors(processors)
        self._processors.append(record)
        self.processor_words += len(record)

    def add_custom_processors(self, seq: Sequence, known: np.ndarray) -> None:
        """Add a sequence with a new slot, for the operator's own logits processors; `known`: all its ids."""
        record = encode_record(CustomProcessorsRecord(seq.slot, seq.prompt, known[len(seq.prompt) :], seq.task.sampling))
        self._custom_processors.append(record)
        self.processor_words += len(record)

    def finish(
        self, decode: np.ndarray, same: bool, sampling_kinds: np.ndarray, lengths: np.ndarray, mask_rows: np.ndarray = NO_WORDS
    ) -> StepPlan:
        sections: dict[str, np.ndarray] = {}
        if self.slot_updates:
            sections["slot_updates"] = np.frombuffer(b"".join(self.slot_updates), DTYPES["slot_updates"])
        if self.block_updates:
            sections["block_updates"] = np.array(self.block_updates, np.int32).view(DTYPES["block_updates"])[:, 0]
        if len(decode):
            sections["decode_rows"] = decode
        if self.prefills:
            sections["prefill_rows"] = np.frombuffer(b"".join(self._prefill_rows), DTYPES["prefill_rows"])
            sections["prefill_tokens"] = np.concatenate(self._prefill_tokens)
        if any(isinstance(places, np.ndarray) for places in self._places):
            sections["places"] = np.concatenate([plain_places(*p) if isinstance(p, tuple) else p for p in self._places])
        if self._runs:
            sections["encoder_runs"] = encode_runs(self._runs)
        if self._processors:
            sections["logits_processors"] = np.concatenate(self._processors)
        if self._custom_processors:
            sections["custom_processors"] = np.concatenate(self._custom_processors)
        if self._queries:
            sections["late_queries"] = encode_queries(self._queries)
        if len(mask_rows):
            sections["mask_rows"] = mask_rows
        if self.has_narrow_rows and self.row_windows is not None:
            sections["row_windows"] = self.row_windows
        if self.state_copies:
            sections["state_copies"] = np.array(self.state_copies, np.int32).view(DTYPES["state_copies"])[:, 0]
        if self.kept_inputs:
            sections["kept_inputs"] = np.array(self.kept_inputs, np.int32).view(DTYPES["kept_inputs"])[:, 0]
        windows = SAMPLING_WINDOWS if self.window > 1 else 0
        longest = int(lengths[: len(decode)].max()) if len(decode) else 0
        return StepPlan(
            step=self.step,
            sections=sections,
            sampling_kind=windows | (int(np.bitwise_or.reduce(sampling_kinds)) if len(sampling_kinds) else 0),
            same_decode_rows=same,
            max_seq_len=max([longest, *(end for _, end in self.prefills)]),
            micro_batch=self.micro_batch,
            lag=self.lag,
            window=self.window,
            draft_tokens=self.draft_tokens,
            draft_depth=self.draft_depth,
            mask_window=self.mask_window,
            has_adapters=self.has_adapters,
        )

    @property
    def drafts(self) -> tuple[int, int, np.ndarray | None, int]:
        """The fields of a ScheduledStep about drafts: its windows, and how deep drafts are made behind it."""
        return self.window, self.draft_tokens, self.row_windows, self.draft_depth

    def side_rows(self, first_prefill_row: int) -> dict[int, SideTarget]:
        """Rows of the step with results that come by message, too."""
        return {first_prefill_row + i: target for i, target in self.side_targets.items()}


def plain_places(start: int, end: int) -> np.ndarray:
    """The places of tokens [start, end) of a prompt without items."""
    places = np.zeros(end - start, DTYPES["places"])
    places["row"] = -1
    for axis in range(MAX_AXES):
        places[f"rotary_{axis}"] = np.arange(start, end)
    return places


_read_values = attrgetter(*(v.source for v in SLOT_VALUES))
# (index, low, high, value for None) of the values that are not sent as they are
_BOUNDED = [(i, v.low, v.high, v.none) for i, v in enumerate(SLOT_VALUES) if (v.low, v.high, v.none) != (None, None, None)]
_UNSIGNED = [i for i, v in enumerate(SLOT_VALUES) if v.dtype == "uint64"]


def slot_words(seq: Sequence) -> bytes:
    """A slot update: every value of SLOT_VALUES, read from the sequence."""
    values = list(_read_values(seq))
    for i, low, high, none in _BOUNDED:
        value = values[i]
        if value is None:
            values[i] = none
        elif low is not None and value < low:
            values[i] = low
        elif high is not None and value > high:
            values[i] = high
    for i in _UNSIGNED:
        values[i] &= 2**64 - 1
    return _SLOT_ROW.pack(*values)


def logits_processors_of(seq: Sequence, known: np.ndarray) -> LogitsProcessors:
    p, outputs = seq.task.sampling, known[len(seq.prompt) :]
    bias = p.logit_bias or {}
    return LogitsProcessors(
        slot=seq.slot,
        prompt_ids=seq.prompt if p.has_penalties else NO_WORDS,
        output_ids=outputs if p.has_penalties else outputs[-MAX_BAD_WORD_TOKENS:],
        bias_ids=list(bias),
        bias_values=list(bias.values()),
        allowed_ids=p.allowed_token_ids or [],
        stop_ids=seq.task.min_tokens_stop_ids if p.min_tokens > 0 else [],
        bad_words=p.bad_words_token_ids or [],
    )
