"""Sequence: one child of a request as the scheduler sees it; and Slots, the numpy tables of all running sequences. No I/O.

Index ranges of a running sequence's tokens, counted from the prompt's start:

    [0, num_computed)            KV written, or being written by steps in flight: all that has been scheduled
    [0, num_tokens)              ids known to the host
    [num_tokens, sched_tokens)   sampled by steps in flight: ids not known yet
    [num_tokens, sched_upper)    the most that these steps may sample, if rows have windows
    [0, final_len)               all that may ever exist: prompt + max_tokens, bounded by the context

decode.py says which of these a decode row computes and samples.
"""

import math
import mmap
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from quire.enginecore.kv.sequence_blocks import SequenceBlocks
from quire.enginecore.media.prompt_items import PromptItems
from quire.enginecore.tasks.task import Task
from quire.enginecore.tenants.tenant import TenantState
from quire.ipc.step.sections import INT32_MAX, MAX_WINDOW

SMALL_TABLE = 1 << 26  # bytes


class SequenceState(IntEnum):
    WAITING = 0
    PREFILL = 1  # has a slot; some known tokens are not computed
    DECODE = 2  # has a slot; every known token is computed or in flight
    DRAINING = 3  # preempted, waiting for its last step in flight
    FINISHED = 4


@dataclass(eq=False, slots=True)
class Sequence:
    # the request: written by Intake, once
    owner: int  # index of the frontend
    key: int
    request_id: int
    child: int
    task: Task
    prompt: np.ndarray  # int32
    final_len: int
    seed: int
    order: tuple[int, int]  # (priority, arrival number): smaller runs first
    arrival_time: float
    tenant: TenantState | None = field(default=None, kw_only=True)  # None: that of a WaitingQueue's only tenant
    expected_output: int = field(default=0, kw_only=True)  # tokens, an estimate
    is_bounded: bool = field(default=False, kw_only=True)  # it may not wait longer than --max-queue-s
    items: PromptItems | None = field(default=None, kw_only=True)  # of its prompt
    # a constraint on its next token, if there is one: made by a preparer (grammar/compiler.py), used only by the core
    constraint: Any = None  # grammar/matchers.Constraint
    mask_from: int = INT32_MAX  # the length from which its rows need masks
    is_deferred: bool = False  # in no step until `Scheduler.release`, because its next mask is not made yet
    # its adapter, held to its end: written by a preparer (adapters/adapters.py); None: the model itself
    adapter: Any = None  # adapters/registry.Adapter
    adapter_from: int = 0  # the first position that the adapter applies to
    adapter_slot: int = -1  # written by the lease of adapter slots while it runs; -1: none
    # its KV blocks: written by KVManager
    blocks: SequenceBlocks = field(kw_only=True)
    # what its tenant was charged: written by WaitingQueue
    is_aged: bool = False  # it has waited for so long that it comes before all priorities
    stint: tuple[int, int, int] = (0, 0, 0)  # since it has its slot: known tokens then, cached ones, tokens charged
    # its progress: written by the scheduler's parts
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    num_computed: int = 0  # scheduled; meaningful in PREFILL
    tokens: np.ndarray | None = None  # all known ids, more than the prompt, of a sequence without a slot
    num_scored: int = 0  # prompt tokens whose logprobs, if they are wanted, were sent
    died_at: int = -1  # how many ids were known when workers died in a step of this sequence, the last time
    num_cached_tokens: int = -1  # of the prompt, at the first admission
    first_scheduled: float = 0.0
    last_token_time: float = math.nan  # time of its last token while it has no slot; NaN before the first

    @property
    def known(self) -> np.ndarray:
        """All known ids of a sequence without a slot."""
        return self.prompt if self.tokens is None else self.tokens

    @property
    def prompt_cost(self) -> int:
        """Tokens of the prompt, which the first child computes for all."""
        return len(self.prompt) if self.child == 0 else 0

    @property
    def has_processors(self) -> bool:
        """Whether it has rare sampling state, in its slot's row of the device's LogitsProcessorPool."""
        return self.task.sampling.needs_logits_processors

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def rotary_delta(self) -> int:
        return 0 if self.items is None else self.items.delta

    @property
    def max_window(self) -> int:
        """Most tokens of a decode row: one if the operator's own code has a say in each of its tokens."""
        return 1 if self.task.is_processed else MAX_WINDOW

    @property
    def mask_window(self) -> int:
        """Most tokens of its next decode row with a mask."""
        return min(self.constraint.max_window, self.max_window) if self.constraint is not None else 1

    @property
    def min_len(self) -> int:
        """The length below which none of min_tokens_stop_ids may be sampled."""
        return min(len(self.prompt) + self.task.sampling.min_tokens, self.final_len)


def _sparse_zeros(rows: int, columns: int) -> np.ndarray:
    """int32 zeros [rows, columns]; a large table takes memory only for the parts of rows that are written.

    np.zeros uses huge pages if it can. With them 1,024 short sequences of a context of 128k tokens took 512 MiB, and clearing
    that delayed the step that admitted them by 130 ms. A small table keeps huge pages: with small ones a step of 1,024 rows
    writes to as many pages, and takes 4 us longer.
    """
    num_bytes = rows * columns * 4
    if num_bytes <= SMALL_TABLE:
        return np.zeros((rows, columns), np.int32)
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32).reshape(rows, columns)


class Slots:
    """Tables indexed by slot, so that a steady decode step costs a few numpy calls whatever the batch."""

    def __init__(self, max_num_seqs: int, max_model_len: int):
        n = max_num_seqs
        self._free = list(range(n - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * n
        self.token_ids = _sparse_zeros(n, max_model_len + 1)
        self.num_tokens = np.zeros(n, np.int32)
        self.sched_tokens = np.zeros(n, np.int32)  # when all scheduled steps are done: the fewest tokens,
        self.sched_upper = np.zeros(n, np.int32)  # and the most, which may be beyond final_len
        self.max_window = np.zeros(n, np.int32)
        self.capacity = np.zeros(n, np.int32)  # tokens that the allocated blocks hold
        self.prompt_len = np.zeros(n, np.int32)
        self.final_len = np.zeros(n, np.int32)
        self.ends_by_length = np.zeros(n, bool)
        self.key = np.zeros(n, np.int64)
        self.owner = np.zeros(n, np.int32)
        self.last_step = np.zeros(n, np.int64)
        self.sampling_kind = np.zeros(n, np.int32)
        self.running = np.zeros(n, bool)  # in state PREFILL or DECODE
        self.alive = np.zeros(n, bool)  # results count: neither finished nor aborted
        self.checks_eos = np.zeros(n, bool)
        self.checks_ids = np.zeros(n, bool)  # has stop ids of its own
        self.is_stream = np.zeros(n, bool)
        self.wants_logprobs = np.zeros(n, bool)
        self.num_logprobs = np.zeros(n, np.int32)  # of those with wants_logprobs
        self.is_first = np.zeros(n, bool)  # no token was sent yet
        self.last_token_time = np.full(n, np.nan)  # time of its last token, by the clock of `Scheduler.update`
        self.constrained = np.zeros(n, bool)  # has a constraint
        self.mask_from = np.full(n, INT32_MAX, np.int32)
        self.mask_window = np.ones(n, np.int32)  # most tokens of a decode row with a mask
        self.has_adapter = np.zeros(n, bool)
        self.num_with_adapters = 0  # while it is 0, that table is not read
        self.num_constrained = 0  # while it is 0, the three tables are not read

    # A lease (leases.py).
    @property
    def free(self) -> int:
        return len(self._free)

    def need(self, seq: Sequence) -> int:
        return 1

    def take(self, seq: Sequence) -> None:
        slot, tokens, task = self._free.pop(), seq.known, seq.task
        self.sequences[slot], seq.slot = seq, slot
        n = len(tokens)
        self.token_ids[slot, :n] = tokens
        self.num_tokens[slot] = self.sched_tokens[slot] = self.sched_upper[slot] = n
        self.max_window[slot] = seq.max_window
        self.capacity[slot] = 0
        self.prompt_len[slot], self.final_len[slot] = len(seq.prompt), seq.final_len
        self.ends_by_length[slot] = task.ends_by_length
        self.key[slot], self.owner[slot] = seq.key, seq.owner
        self.last_step[slot] = 0
        self.sampling_kind[slot] = task.sampling_kind
        self.running[slot] = self.alive[slot] = True
        self.checks_eos[slot] = not task.sampling.ignore_eos
        self.checks_ids[slot] = bool(task.stop_ids)
        self.is_stream[slot] = task.is_stream
        self.wants_logprobs[slot] = task.sampling.logprobs is not None
        self.num_logprobs[slot] = task.sampling.logprobs or 0
        self.is_first[slot] = n == len(seq.prompt)
        self.last_token_time[slot] = seq.last_token_time
        self.constrained[slot], self.mask_from[slot] = seq.constraint is not None, seq.mask_from
        self.mask_window[slot] = seq.mask_window
        self.num_constrained += seq.constraint is not None
        self.has_adapter[slot] = seq.adapter_slot >= 0
        self.num_with_adapters += seq.adapter_slot >= 0

    def sequence(self, slot: int) -> Sequence:
        """The sequence with this slot, which must be leased."""
        seq = self.sequences[slot]
        assert seq is not None, f"slot {slot} is empty"
        return seq

    def known(self, seq: Sequence) -> np.ndarray:
        """All ids that the host knows of a running sequence; a view."""
        return self.token_ids[seq.slot, : self.num_tokens[seq.slot]]

    def give_back(self, seq: Sequence) -> None:
        self.sequences[seq.slot] = None
        seq.last_token_time = float(self.last_token_time[seq.slot])
        self.alive[seq.slot] = False
        self.num_constrained -= seq.constraint is not None
        self.num_with_adapters -= seq.adapter_slot >= 0
        self._free.append(seq.slot)
        seq.slot = -1

    @property
    def holders(self) -> list[Sequence]:
        """All sequences with a slot."""
        return [s for s in self.sequences if s is not None]

    def check(self, held: list[Sequence]) -> None:
        assert held == self.holders
        assert len(held) + len(self._free) == len(self.sequences) and len(set(self._free)) == len(self._free)
        assert all(self.sequences[s.slot] is s for s in held)
        assert self.num_constrained == sum(s.constraint is not None for s in held)
        assert self.num_with_adapters == sum(s.adapter_slot >= 0 for s in held)
