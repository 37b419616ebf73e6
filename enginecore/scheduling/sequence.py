"""Sequence: one child of a request as the scheduler sees it; and Slots, the numpy tables of all running ones. No I/O.

Index ranges of a running sequence's tokens, all counted from the prompt's start:

    [0, num_computed)            KV written, or being written by a step in flight, as far as has been scheduled
    [0, num_tokens)              ids known to the host
    [num_tokens, sched_tokens)   sampled by steps in flight: ids not known yet
    [0, final_len)               may ever exist: prompt + max_tokens, bounded by the context

A decode row computes position sched_tokens - 1 and samples position sched_tokens.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from quire.ipc.sampling import SamplingParams
from quire.ipc.step.plan import VARIANT_FILTER, VARIANT_LOGPROBS, VARIANT_PROCESSORS, VARIANT_RANDOM


class State(IntEnum):
    WAITING = 0
    PREFILL = 1  # has a slot; some known tokens are not computed
    DECODE = 2  # has a slot; every known token is computed or in flight
    DRAINING = 3  # preempted, waiting for its last step in flight
    FINISHED = 4


@dataclass(eq=False, slots=True)
class Sequence:
    owner: int  # index of the frontend
    key: int
    request_id: int
    child: int
    params: SamplingParams
    prompt: np.ndarray  # int32
    final_len: int
    seed: int
    order: tuple[int, int]  # (priority, arrival number): smaller runs first
    arrival_time: float
    root_hash: bytes
    use_cache: bool
    stop_ids: frozenset[int]  # custom ones; the model's own end ids are a table of the scheduler
    min_tokens_stop_ids: list[int] = field(default_factory=list)  # every id that min_tokens keeps away
    state: State = State.WAITING
    slot: int = -1
    processor_row: int = -1
    num_computed: int = 0  # scheduled; meaningful in PREFILL
    tokens: np.ndarray | None = None  # all known ids while it has no slot, if it was preempted
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)  # per KV group, by index in the block table
    num_registered: int = 0  # full blocks that were made findable
    num_released: list[int] = field(default_factory=list)  # per KV group: leading blocks given back, outside the window
    num_cached_tokens: int = -1  # of the prompt, at the first admission
    first_scheduled: float = 0.0
    waits_for: bytes | None = None  # the hash of a block that another sequence is computing and this one wants to hit
    pending: bool = False  # its unregistered hashes are in the scheduler's table of prefixes being computed

    @property
    def known(self) -> np.ndarray:
        """All known ids of a sequence without a slot."""
        return self.prompt if self.tokens is None else self.tokens

    @property
    def ends_by_length(self) -> bool:
        """Whether only max_tokens ends it, so that its length is known beforehand."""
        return self.params.ignore_eos and not self.stop_ids and not self.params.stop

    @property
    def variant(self) -> int:
        p = self.params
        return (
            (0 if p.is_greedy else VARIANT_RANDOM)
            | (VARIANT_FILTER if p.needs_filter else 0)
            | (VARIANT_PROCESSORS if p.needs_logits_processors else 0)
            | (VARIANT_LOGPROBS if p.logprobs is not None else 0)
        )


class Slots:
    """Tables indexed by slot, so that a steady decode step costs a few numpy calls whatever the batch."""

    def __init__(self, max_num_seqs: int, max_model_len: int):
        n = max_num_seqs
        self.free = list(range(n - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * n
        # pages are touched only as far as sequences reach
        self.token_ids = np.zeros((n, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(n, np.int32)
        self.sched_tokens = np.zeros(n, np.int32)
        self.capacity = np.zeros(n, np.int32)  # tokens that the allocated blocks hold
        self.prompt_len = np.zeros(n, np.int32)
        self.final_len = np.zeros(n, np.int32)
        self.ends_by_length = np.zeros(n, bool)
        self.key = np.zeros(n, np.int64)
        self.owner = np.zeros(n, np.int32)
        self.last_step = np.zeros(n, np.int64)
        self.variant = np.zeros(n, np.int32)
        self.running = np.zeros(n, bool)  # in state PREFILL or DECODE
        self.alive = np.zeros(n, bool)  # results count: neither finished nor aborted
        self.checks_eos = np.zeros(n, bool)
        self.checks_ids = np.zeros(n, bool)  # has stop ids of its own
        self.wants_logprobs = np.zeros(n, bool)
        self.is_first = np.zeros(n, bool)  # no token was sent yet

    def lease(self, seq: Sequence, tokens: np.ndarray) -> int:
        """Give `seq` a slot; `tokens` are all its known ids."""
        slot = self.free.pop()
        self.sequences[slot], seq.slot = seq, slot
        n = len(tokens)
        self.token_ids[slot, :n] = tokens
        self.num_tokens[slot] = self.sched_tokens[slot] = n
        self.capacity[slot] = 0
        self.prompt_len[slot], self.final_len[slot] = len(seq.prompt), seq.final_len
        self.ends_by_length[slot] = seq.ends_by_length
        self.key[slot], self.owner[slot] = seq.key, seq.owner
        self.last_step[slot] = 0
        self.variant[slot] = seq.variant
        self.running[slot] = self.alive[slot] = True
        self.checks_eos[slot] = not seq.params.ignore_eos
        self.checks_ids[slot] = bool(seq.stop_ids)
        self.wants_logprobs[slot] = seq.params.logprobs is not None
        self.is_first[slot] = n == len(seq.prompt)
        return slot

    def known(self, seq: Sequence) -> np.ndarray:
        """All ids of a running sequence that the host knows; a view."""
        return self.token_ids[seq.slot, : self.num_tokens[seq.slot]]

    def give_back(self, seq: Sequence) -> None:
        self.sequences[seq.slot] = None
        self.alive[seq.slot] = False
        self.free.append(seq.slot)
        seq.slot = -1
