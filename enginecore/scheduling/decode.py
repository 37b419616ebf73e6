"""DecodeRows: sequences that have all known tokens computed; and the meaning of a row's sampled token. No I/O.

All code of the scheduler that relies on a decode row computing one token, and on a row sampling one, is in this file (for the
rest of the engine see ipc/step/sections.py, beside TOKENS_PER_ROW):

    a decode row         computes position sched_tokens - 1: it needs room for sched_tokens tokens
    a row that samples   yields the token at position sched_tokens, which grows by one when it is scheduled, as num_tokens does
                         when the result is back; it ends by length with its token at final_len - 1
    a step's results     are one id a row, in row order; that of a row that does not sample is ignored
    a step's budget      is used by a decode row as by one token of a prompt

The scheduler calls it for every step, once to schedule and once to take results; a steady step is a few numpy calls. With
pipeline stages the rows are divided into micro-batches (micro_batches.py): a step has the rows of the one that has its turn.
"""

from collections.abc import Callable

import numpy as np

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.scheduling.micro_batches import MicroBatch, MicroBatches
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.sequence import Sequence, SequenceState, Slots
from quire.enginecore.scheduling.step import ScheduledStep
from quire.ipc.step.sections import TOKENS_PER_ROW

MakeRoom = Callable[[Sequence], bool]  # see Leaving.make_room


def num_tokens_of(rows: np.ndarray) -> int:
    """Tokens of a step's budget that its decode rows take."""
    return len(rows) * TOKENS_PER_ROW


class DecodeRows:
    def __init__(self, slots: Slots, kv: KVManager, num_micro_batches: int = 1):
        self._slots = slots
        self._kv = kv
        self.micro_batches = MicroBatches(num_micro_batches)
        self._filled: list[tuple[Sequence, int]] = []  # rows that filled a block, and their computed tokens
        self.num_stalled = 0  # rows left out of this step for lack of blocks

    def __len__(self) -> int:
        return len(self.micro_batches)

    @property
    def num_streams(self) -> int:
        """Rows, of all micro-batches, that belong to streamed requests."""
        return sum(int(self._slots.is_stream[rows].sum()) for rows in self.micro_batches.rows())

    def add(self, sequences: list[Sequence]) -> None:
        """Make these sequences rows, from the next step on."""
        for seq in sequences:
            seq.state = SequenceState.DECODE
        if sequences:
            self.micro_batches.assign(np.asarray([s.slot for s in sequences], np.int32))

    def remove(self, seq: Sequence) -> None:
        self.micro_batches.remove(seq.slot)

    # -------------------------------------------------------------------------------------------------- schedule
    def schedule(self, build: PlanBuilder, budget: int, make_room: MakeRoom) -> np.ndarray:
        """Slots of the step's decode rows, from the micro-batch that has its turn; they take at most `budget` tokens."""
        t, micro_batch = self._slots, self.micro_batches.now
        self.num_stalled = 0
        rows, most = micro_batch.rows, budget // TOKENS_PER_ROW
        if not len(rows):
            return rows
        left = t.sched_tokens[rows] < t.final_len[rows]
        if not left.all():
            rows = micro_batch.rows = rows[left]  # their last token is in flight
        if len(rows) > most:  # take turns
            micro_batch.rows = np.concatenate([rows[most:], rows[:most]])
            rows = rows[:most]
        short = t.sched_tokens[rows] > t.capacity[rows]
        if short.any():
            rows = self._grow(micro_batch, rows, short, build, make_room)
        if self.micro_batches.are_several and len(rows):
            build.lag = build.step - int(t.last_step[rows].max())
        t.last_step[rows] = build.step
        return rows

    def _grow(
        self, micro_batch: MicroBatch, rows: np.ndarray, short: np.ndarray, build: PlanBuilder, make_room: MakeRoom
    ) -> np.ndarray:
        """Give rows at the end of their last block another one; a row that gets none is left out, or preempted."""
        t, before = self._slots, micro_batch.rows
        needy = [t.sequence(slot) for slot in rows[short]]
        needy.sort(key=lambda s: s.order)
        stalled: set[int] = set()
        for seq in needy:
            if seq.state is not SequenceState.DECODE:
                continue  # preempted just now, for an earlier one
            if not make_room(seq):
                if seq.state is SequenceState.DECODE:
                    stalled.add(seq.slot)
                continue
            build.block_updates += self._kv.grow(seq.blocks, seq.slot, 1)
            t.capacity[seq.slot] += self._kv.block_size
        self.num_stalled = len(stalled)
        if not stalled and micro_batch.rows is before:
            return rows
        running = set(micro_batch.rows.tolist()) - stalled
        return np.asarray([slot for slot in rows.tolist() if slot in running], np.int32)

    def advance(self, sampling: np.ndarray, lengths: np.ndarray) -> None:
        """The rows of these slots, all of which sample, were scheduled; `lengths`: their sched_tokens before."""
        self._slots.sched_tokens[sampling] = lengths + TOKENS_PER_ROW

    def are_as_sent(self, rows: np.ndarray) -> bool:
        """Whether the step's decode rows equal those of its micro-batch's last step, which the workers still hold.

        From now on they hold these."""
        micro_batch = self.micro_batches.now
        sent, micro_batch.sent = micro_batch.sent, rows
        return rows is sent or (sent is not None and np.array_equal(rows, sent))

    # --------------------------------------------------------------------------------------------------- results
    def take(self, step: ScheduledStep, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Append a step's sampled tokens, int32 [rows], to its sequences; returns rows, slots, tokens of those that count."""
        t = self._slots
        rows = (step.samples & t.alive[step.slots]).nonzero()[0]
        slots, tokens = step.slots[rows], sampled[rows]
        t.token_ids[slots, t.num_tokens[slots]] = tokens
        t.num_tokens[slots] += TOKENS_PER_ROW
        return rows, slots, tokens

    def find_ended(self, slots: np.ndarray, tokens: np.ndarray, eos: np.ndarray) -> list[tuple[int, bool]]:
        """(index, whether a stop id ended it) of the rows that end with this token. eos: bool [vocabulary]."""
        t = self._slots
        stops = eos[np.minimum(tokens, len(eos) - 1)] & t.checks_eos[slots]
        for i in t.checks_ids[slots].nonzero()[0]:
            stops[i] |= int(tokens[i]) in t.sequence(slots[i]).stop_ids
        ends = stops | (t.num_tokens[slots] >= t.final_len[slots])
        return [(int(i), bool(stops[i])) for i in ends.nonzero()[0]]

    def note_filled(self, slots: np.ndarray) -> None:
        """Note rows that have just filled a block for `register_filled`; give back blocks that the window has left behind."""
        computed = self._slots.num_tokens[slots] - TOKENS_PER_ROW  # of the steps that have returned
        ends = (computed % self._kv.block_size == 0).nonzero()[0]
        filled = [(self._slots.sequence(slots[i]), int(computed[i])) for i in ends]
        self._filled += filled
        if any(self._kv.windows):
            self.register_filled()  # blocks that are given back should be findable
            for seq, num_computed in filled:
                self._kv.release_outside_window(seq.blocks, num_computed)

    def register_filled(self) -> None:
        """Make the blocks that decode rows have filled findable. Code that depends on that calls it first; else it is called
        when there is time: hashing took a third of the time to a large batch's next plan, which does not need it."""
        filled, self._filled = self._filled, []
        for seq, num_computed in filled:
            if seq.blocks.use_cache:
                self._kv.hash_known(seq.blocks, self._slots.known(seq)[:num_computed])
                self._kv.register(seq.blocks, num_computed // self._kv.block_size)

    def check(self, held: list[Sequence]) -> None:
        """Assert that the rows are sequences in this state, each once. A sequence with its last token in flight has no row."""
        rows = self.micro_batches.check()
        assert rows <= {s.slot for s in held if s.state is SequenceState.DECODE}
