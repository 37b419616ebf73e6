"""StepPlan: what the workers do in one step, as int32 words in one buffer. Written by the core, read by every worker.

A plan carries deltas only: the state of a running sequence (block table, length, last token, sampling parameters) lives on the
device in tables indexed by slot, and a decode row that merely continues costs no byte here.

    [0, HEADER_WORDS)   header, see H_*; sections follow in this order, each at the word offset that the header names
    slot updates        [n, SLOT_WORDS]   a slot was given to a sequence: its sampling parameters
    block updates       [n, 3]            group * num_slots + slot, index in the block table, block id
    decode rows         [n]               slots; absent if FLAG_SAME_DECODE_ROWS: then the rows of the last plan that had them
    prefill rows        [n, PREFILL_WORDS]
    prefill token ids   [n]               of all prefill rows, one after the other
    processors            variable          see `encode_logits_processors`; applied by the worker before the step's forward

Rows of a step are its decode rows, then its prefill rows; the tokens are laid out in the same order. Every row yields one
result word; the core ignores that of a prefill row without PREFILL_SAMPLE. float32 values travel as their bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HEADER_WORDS = 32
SLOT_WORDS = 16
BLOCK_WORDS = 3
PREFILL_WORDS = 8

# header words
H_STEP = 0  # counts from 1; results are tagged with it
H_FLAGS = 1
H_VARIANT = 2
H_NUM_SLOT_UPDATES, H_SLOT_UPDATES = 3, 4  # count, word offset
H_NUM_BLOCK_UPDATES, H_BLOCK_UPDATES = 5, 6
H_NUM_DECODE_ROWS, H_DECODE_ROWS = 7, 8
H_NUM_PREFILL_ROWS, H_PREFILL_ROWS = 9, 10
H_NUM_PREFILL_TOKENS, H_PREFILL_TOKENS = 11, 12
H_NUM_PROCESSOR_WORDS, H_PROCESSORS = 13, 14
H_MAX_SEQ_LEN = 15  # upper bound over the step's rows, this step's tokens included
H_WORDS = 16  # length of the whole plan
H_WORLD_SIZE = 17  # ranks that the plan is for: written by who sends it (the scheduler does not know), checked by each rank

FLAG_SAME_DECODE_ROWS = 1
FLAG_LATE_MASK = 2  # a mask record for this step follows in the ring: sample only after it

# variants: what the tail must be able to do in this step; more bits cost more time
VARIANT_RANDOM = 1  # some row has a temperature
VARIANT_FILTER = 2  # some row has top-k, top-p or min-p
VARIANT_PROCESSORS = 4  # some row has a processor row
VARIANT_LOGPROBS = 8  # some row wants logprobs
VARIANT_MASK = 16  # grammar masks, with FLAG_LATE_MASK

# words of a slot update
(
    S_SLOT,
    S_TEMPERATURE,
    S_TOP_K,
    S_TOP_P,
    S_MIN_P,
    S_PRESENCE,
    S_FREQUENCY,
    S_REPETITION,
    S_SEED_LO,
    S_SEED_HI,
    S_PROCESSOR_ROW,  # -1: none
    S_MIN_LEN,  # a token at index < this in the sequence may not be one of the processor row's stop ids
    S_NUM_LOGPROBS,  # -1: none
) = range(13)

# words of a prefill row
(
    P_SLOT,
    P_START,  # tokens of the sequence already computed: the position of the chunk's first token
    P_LENGTH,
    P_FLAGS,
    P_NEXT_TOKEN,  # the prompt token after the chunk, -1 at its end: target of the chunk's last prompt logprob
    P_NUM_PROMPT_LOGPROBS,
) = range(6)
PREFILL_SAMPLE = 1  # the chunk ends the known tokens: sample the next one
PREFILL_PROMPT_LOGPROBS = 2


class LogitsProcessors(NamedTuple):
    """Rare sampling state of one sequence, sent when it gets its slot: ids as int sequences."""

    slot: int
    processor_row: int
    prompt_ids: np.ndarray  # int32, empty without penalties
    output_ids: np.ndarray  # int32; all of them with penalties, else the last MAX_BAD_WORD_TOKENS
    bias_ids: list[int]
    bias_values: list[float]
    allowed_ids: list[int]  # empty: all
    stop_ids: list[int]  # masked while shorter than S_MIN_LEN
    bad_words: list[list[int]]


PROCESSOR_HEADER = 9  # slot, row, and the lengths of the seven lists


def encode_logits_processors(f: LogitsProcessors) -> np.ndarray:
    """One record: total words, then PROCESSOR_HEADER words, then the lists; each bad word is preceded by its length."""
    bad = [x for word in f.bad_words for x in (len(word), *word)]
    lengths = [
        len(f.prompt_ids),
        len(f.output_ids),
        len(f.bias_ids),
        len(f.allowed_ids),
        len(f.stop_ids),
        len(f.bad_words),
        len(bad),
    ]
    parts = [
        np.asarray([f.slot, f.processor_row, *lengths], np.int32),
        np.asarray(f.prompt_ids, np.int32),
        np.asarray(f.output_ids, np.int32),
        np.asarray(f.bias_ids, np.int32),
        np.asarray(f.bias_values, np.float32).view(np.int32),
        np.asarray(f.allowed_ids, np.int32),
        np.asarray(f.stop_ids, np.int32),
        np.asarray(bad, np.int32),
    ]
    body = np.concatenate(parts)
    return np.concatenate([np.asarray([len(body) + 1], np.int32), body])


def decode_logits_processors(words: np.ndarray) -> list[LogitsProcessors]:
    """All records of a plan's processors section."""
    out, at = [], 0
    while at < len(words):
        record = words[at + 1 : at + int(words[at])]
        slot, row, *n = (int(x) for x in record[:PROCESSOR_HEADER])
        lists, start = [], PROCESSOR_HEADER
        for length in (n[0], n[1], n[2], n[2], n[3], n[4], n[6]):
            lists.append(record[start : start + length])
            start += length
        bad, words_out, i = lists[6].tolist(), [], 0
        while i < len(bad):
            words_out.append(bad[i + 1 : i + 1 + bad[i]])
            i += 1 + bad[i]
        out.append(
            LogitsProcessors(
                slot,
                row,
                lists[0],
                lists[1],
                lists[2].tolist(),
                lists[3].view(np.float32).tolist(),
                lists[4].tolist(),
                lists[5].tolist(),
                words_out,
            )
        )
        at += int(words[at])
    return out


@dataclass(frozen=True)
class StepPlan:
    """A plan before it is written, or as it is read: all arrays int32, see the module's docstring."""

    step: int
    slot_updates: np.ndarray  # [n, SLOT_WORDS]
    block_updates: np.ndarray  # [n, BLOCK_WORDS]
    decode_rows: np.ndarray  # [n]
    prefill_rows: np.ndarray  # [n, PREFILL_WORDS]
    prefill_tokens: np.ndarray  # [n]
    processors: np.ndarray  # [n]
    variant: int = 0
    late_mask: bool = False
    same_decode_rows: bool = False  # decode_rows is what the last plan held: send only their number
    max_seq_len: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.prefill_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + len(self.prefill_tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return bool((self.prefill_rows[:, 3] & PREFILL_PROMPT_LOGPROBS).any())

    def encode(self) -> np.ndarray:
        """The plan as one int32 array."""
        decode_words = self.decode_rows[:0] if self.same_decode_rows else self.decode_rows
        sections = (
            self.slot_updates,
            self.block_updates,
            decode_words,
            self.prefill_rows,
            self.prefill_tokens,
            self.processors,
        )
        total = HEADER_WORDS + sum(s.size for s in sections)
        out = np.empty(total, np.int32)
        header = out[:HEADER_WORDS]
        header[:] = 0
        header[H_STEP], header[H_VARIANT], header[H_WORDS] = self.step & 0x7FFFFFFF, self.variant, total
        header[H_FLAGS] = FLAG_LATE_MASK * self.late_mask | FLAG_SAME_DECODE_ROWS * self.same_decode_rows
        header[H_MAX_SEQ_LEN] = self.max_seq_len
        at = HEADER_WORDS
        for i, section in enumerate(sections):
            header[H_NUM_SLOT_UPDATES + 2 * i], header[H_SLOT_UPDATES + 2 * i] = len(section), at
            out[at : at + section.size] = section.reshape(-1)
            at += section.size
        header[H_NUM_DECODE_ROWS] = len(self.decode_rows)
        return out


def decode_plan(words: np.ndarray, last_decode_rows: np.ndarray) -> StepPlan:
    """Read a plan; views into `words`, except that unchanged decode rows are `last_decode_rows`."""
    h = words[:HEADER_WORDS].tolist()

    def section(index: int, width: int) -> np.ndarray:
        count, at = h[H_NUM_SLOT_UPDATES + 2 * index], h[H_SLOT_UPDATES + 2 * index]
        return words[at : at + count * width]

    same = bool(h[H_FLAGS] & FLAG_SAME_DECODE_ROWS)
    return StepPlan(
        step=h[H_STEP],
        slot_updates=section(0, SLOT_WORDS).reshape(-1, SLOT_WORDS),
        block_updates=section(1, BLOCK_WORDS).reshape(-1, BLOCK_WORDS),
        decode_rows=last_decode_rows if same else section(2, 1),
        prefill_rows=section(3, PREFILL_WORDS).reshape(-1, PREFILL_WORDS),
        prefill_tokens=section(4, 1),
        processors=section(5, 1),
        variant=h[H_VARIANT],
        late_mask=bool(h[H_FLAGS] & FLAG_LATE_MASK),
        same_decode_rows=same,
        max_seq_len=h[H_MAX_SEQ_LEN],
    )


def max_plan_words(
    max_num_seqs: int, max_num_batched_tokens: int, block_size: int, num_groups: int, max_blocks_per_seq: int
) -> int:
    """The longest plan that a scheduler may send, its processors section left out."""
    new_blocks = num_groups * (max_num_seqs * 2 + max_num_batched_tokens // block_size + 4 * max_blocks_per_seq)
    rows = max_num_seqs * (1 + SLOT_WORDS + PREFILL_WORDS)
    return HEADER_WORDS + rows + BLOCK_WORDS * new_blocks + max_num_batched_tokens
