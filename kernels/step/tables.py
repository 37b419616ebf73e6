"""Device state of the sequences, by slot, and the buffers of one step.

`SlotTables`, `LogitsProcessorPool` and `StepBuffers` only hold tensors: allocated once by the worker, changed in place by the
step kernels (`step_inputs`) and by `apply_logits_processors`, and read by the sampler. The last slot (`max_num_seqs`) is the
dummy slot of padded rows. `params` holds a plan's slot updates unchanged, so applying one is a copy of its words;
ipc/step/sections.py declares them, and the kernels share its constants. No triton here: CPU machines use these too.
"""

import secrets
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from quire.ipc.step.sections import (
    LOGPROBS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_DRAFTS,
    MAX_LOGIT_BIAS,
    MAX_MASKED_STOPS,
    SLOT,
    SLOT_VALUES,
    USUAL_LOGPROBS,
)
from quire.kernels.step.survival import new_survival

HISTORY = MAX_BAD_WORD_TOKENS  # last output tokens kept for bad words
PROMPT_BIT = 1 << 7  # in LogitsProcessorPool.counts: the token occurs in the prompt
IN_TABLE = PROMPT_BIT - 1  # the bits below: occurrences in the output; if all are set, they are in LogitsProcessorPool.entries
ENTRY_KEY, ENTRY_EXTRA, ENTRY_BIAS = range(3)
ENTRY_PLANES = 3
NUM_TOP = USUAL_LOGPROBS
LOGPROB_WORDS = LOGPROBS.width  # result words of one row's log-probabilities
_VALUES = {v.name: v for v in SLOT_VALUES}


@dataclass
class SlotTables:
    """The state of each slot's sequence; S = max_num_seqs + 1."""

    block_table: torch.Tensor  # int32 [num_groups, S, max_blocks]
    last_token: torch.Tensor  # int32 [S]
    seq_len: torch.Tensor  # int32 [S], tokens with computed KV
    params: torch.Tensor  # int32 [S, SLOT.width], rows of SLOT; float32 values as bits
    history: torch.Tensor  # int32 [S, HISTORY], last output tokens of slots with logits processors, newest last, -1 padded
    decode_slots: torch.Tensor  # int32 [micro-batches, S], the decode rows of each one's last plan that had them
    drafts: torch.Tensor  # int32 [S, MAX_DRAFTS], tokens that may follow the last one; [S, 0] without speculation
    num_drafts: torch.Tensor  # int32 [S], how many of them are there
    survival: torch.Tensor  # int32 [S + 2, 2 * MAX_WINDOW], see survival.py; [S + 2, 0] without speculation

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_groups: int,
        max_blocks: int,
        device: torch.device | str,
        num_micro_batches: int = 1,
        speculates: bool = False,
    ) -> "SlotTables":
        """Empty tables: every slot samples greedily and has no logits processors."""
        s = max_num_seqs + 1

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        decode, drafts = ints(num_micro_batches, s), ints(s, MAX_DRAFTS if speculates else 0)
        block_table, params, history = ints(num_groups, s, max_blocks), ints(s, SLOT.width), ints(s, HISTORY) - 1
        survival = new_survival(s, device) if speculates else ints(s + 2, 0)
        tables = cls(block_table, ints(s), ints(s), params, history, decode, drafts, ints(s), survival)
        for value in SLOT_VALUES:
            tables.column(value.name).fill_(value.default)
        return tables

    @property
    def max_num_seqs(self) -> int:
        return self.seq_len.shape[0] - 1

    def column(self, name: str) -> torch.Tensor:
        """A value of SLOT_VALUES for every slot: a view [S], float32 or int32; for a uint64 int32 [S, 2], low word first."""
        at, dtype = SLOT.at[name], _VALUES[name].dtype
        if dtype == "uint64":
            return self.params[:, at : at + 2]
        return self.params.view(torch.float32 if dtype == "float32" else torch.int32)[:, at]

    @cached_property
    def host(self) -> dict[str, np.ndarray]:
        """numpy views of tables on the CPU, made once: a view costs a microsecond, and a step needs a dozen."""
        names = ("block_table", "last_token", "seq_len", "params", "history", "decode_slots")
        names_of_drafts = ("drafts", "num_drafts", "survival")
        return {name: getattr(self, name).numpy() for name in (*names, *names_of_drafts)}


@dataclass
class LogitsProcessorPool:
    """State of sequences with logits processors: a slot's row has its number. V tokens: V * 9 / 8 bytes a row and about 42 KB.

    P rows, as many as sequences can run: at 1,024 rows of 151,936 tokens this is 218 MB. An int32 count and a bias of each
    token, at hand for the kernels, would be 1.2 GB. But a count beyond a byte's is rare, and a bias is one of few: both are in
    a hash table of the row, with linear probing, where a token's byte is IN_TABLE. Without an entry such a token has occurred
    IN_TABLE times and has no bias. Prompt tokens that were never sampled are seen, not counted.
    """

    counts: torch.Tensor  # uint8 [P, V], see PROMPT_BIT and IN_TABLE
    entries: torch.Tensor  # int32 [P, ENTRY_PLANES, table_size]: token + 1 (0: no entry), occurrences - IN_TABLE, float32 bias
    allowed: torch.Tensor  # int32 [P, ceil(V / 32)], bit set = may be sampled
    stop_ids: torch.Tensor  # int32 [P, MAX_MASKED_STOPS], -1 padded; masked while the sequence is shorter than its min_len
    bad_words: torch.Tensor  # int32 [P, MAX_BAD_WORDS, HISTORY], right-aligned, -1 padded; the last element is the banned token
    multiplier: int  # of the hash: odd, below 2^31

    @classmethod
    def allocate(
        cls, rows: int, vocab: int, max_len: int, device: torch.device | str, multiplier: int | None = None
    ) -> "LogitsProcessorPool":
        """For sequences of at most max_len tokens, with empty rows.

        The multiplier is random unless given: otherwise a client could choose biases for tokens that collide, and slow all
        steps.
        """

        def ints(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        entries = MAX_LOGIT_BIAS + max(max_len - 1, 0) // (IN_TABLE + 1)  # at most; one place stays empty
        size = 1 << entries.bit_length()
        return cls(
            counts=torch.zeros((rows, vocab), dtype=torch.uint8, device=device),
            entries=torch.zeros((rows, ENTRY_PLANES, size), dtype=torch.int32, device=device),
            allowed=ints(rows, -(-vocab // 32)),
            stop_ids=ints(rows, MAX_MASKED_STOPS),
            bad_words=ints(rows, MAX_BAD_WORDS, HISTORY),
            multiplier=secrets.randbits(30) * 2 + 1 if multiplier is None else multiplier,
        )

    @property
    def num_rows(self) -> int:
        return self.counts.shape[0]

    @property
    def table_size(self) -> int:
        """A power of two."""
        return self.entries.shape[2]

    @property
    def table_bits(self) -> int:
        return self.table_size.bit_length() - 1


@dataclass
class StepBuffers:
    """Inputs of one step at the largest size; a step of T padded tokens and R padded rows uses the first T or R entries.

    A step with windows has N padded samples, and as many padded rows. Its decode rows come first, so that a token of theirs and
    its sample have the same index; the sample of prefill row j has index (tokens of decode rows) + j. Other steps have as many
    samples as rows, and do not touch the tensors from sample_slots on. Padded samples have the dummy slot, and zeros.
    """

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    slot_mapping: torch.Tensor  # int64 [num_groups, T], block * block_size + offset; -1: do not write
    row_slots: torch.Tensor  # int32 [R]
    query_start: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R], KV length with this step's tokens; 0 for padded rows
    logits_indices: torch.Tensor  # int32 [R], index of each row's last token; with windows [N], of each sample's token
    samples: torch.Tensor  # int32 [R], 1 if the row samples
    num_decode_rows: torch.Tensor  # int32 [1]
    num_rows: torch.Tensor  # int32 [1]
    sample_slots: torch.Tensor  # int32 [N]
    sample_positions: torch.Tensor  # int32 [N], index in its sequence of the token to be sampled
    sample_places: torch.Tensor  # int32 [N], index of the sample in its row's window: the number of drafts before it
    first_sample: torch.Tensor  # int32 [R + 1], index of each row's first sample; of padded rows the number of samples
    num_samples: torch.Tensor  # int32 [1]
    row_tokens: torch.Tensor  # int32 [R], tokens of each decode row in this step; 0 for other rows
    accepted: torch.Tensor  # int32 [R], samples of each row that count: see kernels/speculation/accept.py
    rotary: torch.Tensor  # int32 [axes, T], positions on the axes of rotation; [0, T]: they are `positions`
    last_visible: torch.Tensor  # int32 [T], the last position that each token sees; [0]: its own
    max_tokens: int = field(default=0)
    max_rows: int = field(default=0)
    sees_ahead: bool = False  # some token of the next step sees keys behind its own; attention sets it back

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        max_rows: int,
        num_groups: int,
        device: torch.device | str,
        max_samples: int = 0,
        axes: int = 0,
        may_see_ahead: bool = False,
    ) -> "StepBuffers":
        """max_samples: of a step with windows; 0 if there are none. axes: of rotation; 0: positions are plain. may_see_ahead:
        tokens of items may see keys behind their own."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        mapping = torch.full((num_groups, max_tokens), -1, dtype=torch.int64, device=device)
        t, r, n = max_tokens, max(max_rows, max_samples), max_samples
        inputs = ints(t), ints(t), mapping, ints(r), ints(r + 1), ints(r), ints(r), ints(r), ints(1), ints(1)
        more = ints(n), ints(n), ints(n), ints(r + 1 if n else 0), ints(1), ints(n), ints(n)
        return cls(*inputs, *more, ints(axes, t), ints(t if may_see_ahead else 0), t, r)

    def see_ahead(self, places: np.ndarray) -> None:
        """The next step has these places of items, [n] of PLACE."""
        self.sees_ahead = bool(len(self.last_visible) and places["last_visible"].any())

    @cached_property
    def host(self) -> dict[str, np.ndarray]:
        """numpy views of buffers on the CPU, by name."""
        return {f.name: getattr(self, f.name).numpy() for f in fields(self) if not f.name.startswith(("max_", "sees_"))}


class WindowIds(NamedTuple):
    """The tokens of a step with windows, for samples that count the drafts before them as if they were known.

    The sample's own token has index i or, with a stride, i * stride + place; its drafts are the `place` tokens up to there.
    """

    input_ids: torch.Tensor  # int32 [T]
    places: torch.Tensor  # int32 [N], the number of drafts before each sample
    stride: int = 0  # tokens from one row's first to the next one's, if each sample is of another row; 0: one index for both


@dataclass
class StateRows:
    """Ids of the recurrent states of one step's rows at the largest number of rows; 0 is the dummy state."""

    own: torch.Tensor  # int32 [R], of the row's sequence: a decode row reads and writes it, a chunk writes it
    first: torch.Tensor  # int32 [R], that a chunk begins with, 0: zeros; a decode row's own
    last: torch.Tensor  # int32 [R], where a chunk leaves its last state, too; 0: nowhere
    num_states: int = 1  # that there are

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device | str) -> "StateRows":
        own, first, last = torch.zeros((3, max_rows), dtype=torch.int32, device=device)
        return cls(own, first, last)


@dataclass
class KeptTables:
    """Which tokens of each slot's sequence are not in its recurrent state yet: layers have kept their inputs. S slots.

    Two steps in turn keep inputs in two halves: a step applies those of the step before while it keeps its own.
    """

    num_kept: torch.Tensor  # int32 [S], tokens that were accepted and are not in the state
    first_kept: torch.Tensor  # int32 [S], where the inputs of the first of them are
    keep_at: torch.Tensor  # int32 [S], the state is left once it has so many tokens; 0: nowhere
    keep_state: torch.Tensor  # int32 [S], where it is left
    base: torch.Tensor  # int32 [1], where the step's half begins
    half: int  # tokens in a half

    @classmethod
    def allocate(cls, num_slots: int, half: int, device: torch.device) -> "KeptTables":
        num_kept, first_kept, keep_at, keep_state = torch.zeros((4, num_slots), dtype=torch.int32, device=device)
        return cls(num_kept, first_kept, keep_at, keep_state, torch.zeros(1, dtype=torch.int32, device=device), half)


SAMPLER_BLOCK = 512  # tokens in a block of the sampler's two-level race; changing it changes the tokens of a given seed
CANDIDATES = 4096  # that the filter kernel lists; a row with more of them above its bounds is searched in place
LOGPROB_TILE = 8192


@dataclass
class SamplerWorkspace:
    """Intermediate results of the sampler's kernels; NB = ceil(V / SAMPLER_BLOCK). The CPU path needs none of it."""

    sampled: torch.Tensor  # int32 [R], the result
    block_max: torch.Tensor  # float32 [R, NB]
    block_sum: torch.Tensor  # float32 [R, NB]
    near_blocks: torch.Tensor  # int32 [R, NB], those with candidates
    candidates: torch.Tensor  # float32 [R, CANDIDATES]
    candidate_ids: torch.Tensor  # int32 [R, CANDIDATES]
    token_mask: (
        torch.Tensor
    )  # int32 [R, ceil(V / 32)], of rows with logits processors: what is allowed and not banned in this step
    part_max: torch.Tensor  # float32 [R, ceil(V / LOGPROB_TILE)]
    part_sum: torch.Tensor
    part_greater: torch.Tensor  # int32
    logsumexp: torch.Tensor  # float32 [R]
    logprob: torch.Tensor  # float32 [R]
    rank: torch.Tensor  # int32 [R]

    @classmethod
    def allocate(cls, max_rows: int, vocab: int, device: torch.device | str) -> "SamplerWorkspace":
        """For the largest padded number of rows; for 1024 rows 33 MB of candidates, and with 152k tokens a mask of 19 MB."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        r, nb, nt = max_rows, -(-vocab // SAMPLER_BLOCK), -(-vocab // LOGPROB_TILE)
        return cls(
            sampled=new(r, dtype=torch.int32),
            block_max=new(r, nb),
            block_sum=new(r, nb),
            near_blocks=new(r, nb, dtype=torch.int32),
            candidates=new(r, CANDIDATES),
            candidate_ids=new(r, CANDIDATES, dtype=torch.int32),
            token_mask=new(r, -(-vocab // 32), dtype=torch.int32),
            part_max=new(r, nt),
            part_sum=new(r, nt),
            part_greater=new(r, nt, dtype=torch.int32),
            logsumexp=new(r),
            logprob=new(r),
            rank=new(r, dtype=torch.int32),
        )


SHARD_WORDS = 3  # exchanged between ranks for each row: see kernels/sampling/sampler_sharded.py


@dataclass
class ShardedWorkspace:
    """Intermediate results of the kernels for a rank's shard of the vocabulary; the CPU path needs none of it."""

    block_max: torch.Tensor  # float32 [R, NB], of the rank's own blocks
    block_sum: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, own_vocab: int, device: torch.device | str) -> "ShardedWorkspace":
        shape = max_rows, -(-own_vocab // SAMPLER_BLOCK)
        return cls(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
