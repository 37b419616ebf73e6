"""PlanBuilder: what one step tells the workers, collected while the scheduler decides, as arrays in the end. No I/O.

The scheduler owns every decision and all state of sequences; this file only puts them into words (ipc/step/plan.py).
"""

import numpy as np

from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.sampling import MAX_BAD_WORD_TOKENS
from quire.ipc.step.plan import (
    BLOCK_WORDS,
    PREFILL_SAMPLE,
    PREFILL_WORDS,
    SLOT_WORDS,
    LogitsProcessors,
    StepPlan,
    encode_logits_processors,
)

EXTREME = 1e30  # parameters beyond it, or below its inverse, would be infinite or zero in float32
NO_WORDS = np.zeros(0, np.int32)


class PlanBuilder:
    """Collects one step's deltas and rows."""

    def __init__(self, step: int, now: float) -> None:
        self.step = step
        self.now = now
        self.slot_updates: list[np.ndarray] = []
        self.block_updates: list[tuple[int, int, int]] = []
        self.prefills: list[tuple[Sequence, int]] = []
        self.samples: list[bool] = []
        self._prefill_words: list[tuple[int, ...]] = []
        self._prefill_tokens: list[np.ndarray] = []
        self._processors: list[np.ndarray] = []
        self.processor_words = 0
        self.table_updates = 0  # block updates that repeat a cached prefix

    def add_prefill(self, seq: Sequence, token_ids: np.ndarray, words: tuple[int, ...]) -> None:
        _, start, length, flags, _, _ = words
        self.prefills.append((seq, start + length))
        self.samples.append(bool(flags & PREFILL_SAMPLE))
        self._prefill_words.append((*words, *[0] * (PREFILL_WORDS - len(words))))
        self._prefill_tokens.append(token_ids)

    def add_processors(self, processors: LogitsProcessors) -> None:
        record = encode_logits_processors(processors)
        self._processors.append(record)
        self.processor_words += len(record)

    def finish(self, decode: np.ndarray, same: bool, variants: np.ndarray, lengths: np.ndarray) -> StepPlan:
        ends = [end for _, end in self.prefills]
        return StepPlan(
            step=self.step,
            slot_updates=np.stack(self.slot_updates) if self.slot_updates else np.zeros((0, SLOT_WORDS), np.int32),
            block_updates=np.asarray(self.block_updates, np.int32).reshape(-1, BLOCK_WORDS),
            decode_rows=decode,
            prefill_rows=np.asarray(self._prefill_words, np.int32).reshape(-1, PREFILL_WORDS),
            prefill_tokens=np.concatenate(self._prefill_tokens) if self._prefill_tokens else NO_WORDS,
            processors=np.concatenate(self._processors) if self._processors else NO_WORDS,
            variant=int(np.bitwise_or.reduce(variants)) if len(variants) else 0,
            same_decode_rows=same,
            max_seq_len=max([int(lengths[: len(decode)].max()) if len(decode) else 0, *ends]),
        )


def slot_words(seq: Sequence) -> np.ndarray:
    p = seq.params
    words = np.zeros(SLOT_WORDS, np.int32)
    floats = words.view(np.float32)
    words[0] = seq.slot
    floats[1] = min(p.temperature, EXTREME)
    words[2] = min(max(p.top_k, 0), 2**31 - 1)
    floats[3], floats[4] = max(p.top_p, 1 / EXTREME), p.min_p
    floats[5], floats[6], floats[7] = (
        p.presence_penalty,
        p.frequency_penalty,
        min(max(p.repetition_penalty, 1 / EXTREME), EXTREME),
    )
    words[8:10] = np.asarray([seq.seed & (2**64 - 1)], np.uint64).view(np.int32)
    words[10] = seq.processor_row
    words[11] = min(len(seq.prompt) + p.min_tokens, seq.final_len)
    words[12] = -1 if p.logprobs is None else p.logprobs
    return words


def logits_processors_of(seq: Sequence, known: np.ndarray) -> LogitsProcessors:
    p, outputs = seq.params, known[len(seq.prompt) :]
    bias = p.logit_bias or {}
    return LogitsProcessors(
        slot=seq.slot,
        processor_row=seq.processor_row,
        prompt_ids=seq.prompt if p.has_penalties else NO_WORDS,
        output_ids=outputs if p.has_penalties else outputs[-MAX_BAD_WORD_TOKENS:],
        bias_ids=list(bias),
        bias_values=list(bias.values()),
        allowed_ids=p.allowed_token_ids or [],
        stop_ids=seq.min_tokens_stop_ids if p.min_tokens > 0 else [],
        bad_words=p.bad_words_token_ids or [],
    )
