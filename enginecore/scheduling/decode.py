"""DecodeRows: sequences that have all known tokens computed; and the meaning of a step's sampled tokens. No I/O.

How many tokens a decode row computes and samples is decided on the device, within its window (windows.py). So a length is known
by two bounds while steps are in flight: sched_tokens and sched_upper, which are num_tokens when all results are back.

    a decode row         computes 1 to `window` positions, the first one from sched_tokens - 1 to sched_upper - 1: it needs room
                         for sched_upper + window - 1 tokens, but the token at final_len - 1 is never computed
    a row that samples   yields 1 to `window` tokens, from the position num_tokens on; the lower bound grows by one when it is
                         scheduled, the upper one by `window`, and both are set right when its result is back
    a row runs           while sched_tokens < final_len. If its last token came from an earlier step, it yields none
    a step's budget      is used by a decode row as by one token of a prompt; drafts take what is left

The scheduler calls it for every step, once to schedule and once to take results; a steady step is a few numpy calls. With
pipeline stages the rows are divided into micro-batches (micro_batches.py): a step has the rows of the one that has its turn.
"""

from typing import NamedTuple, Protocol

import numpy as np

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.scheduling.micro_batches import MicroBatch, MicroBatches
from quire.enginecore.scheduling.plan_builder import PlanBuilder
from quire.enginecore.scheduling.row_states import RowStates, WindowRowStates
from quire.enginecore.scheduling.sequence import Sequence, SequenceState, Slots
from quire.enginecore.scheduling.step import ScheduledStep
from quire.enginecore.scheduling.windows import Windows
from quire.ipc.step.samples import Samples


class MakeRoom(Protocol):
    """See Leaving.make_room."""

    def __call__(self, seq: Sequence, blocks: int = 1) -> bool: ...


class Taken(NamedTuple):
    """A step's tokens that count, without those behind a stop id, in row order."""

    slots: np.ndarray  # of each token
    samples: Samples
    last: np.ndarray | slice  # int [k]: the index of each row's last token
    counts: np.ndarray | int  # int [k]: each row's tokens
    stops: np.ndarray  # bool: whether each token is a stop id


class DecodeRows:
    def __init__(self, slots: Slots, kv: KVManager, windows: Windows, num_micro_batches: int = 1):
        self._slots = slots
        self._kv = kv
        self._windows = windows
        self.states = (WindowRowStates if windows.may_be and kv.states.num_states else RowStates)(slots, kv)
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
            self.states.add(seq)
        if sequences:
            self.micro_batches.assign(np.asarray([s.slot for s in sequences], np.int32))

    def remove(self, seq: Sequence) -> None:
        self.micro_batches.remove(seq.slot)

    def leave(self, seq: Sequence) -> None:
        """A sequence, whether it was a row or not, is about to give back what it holds; all of its steps have returned."""
        self.register_filled()
        self.states.leave(seq)

    def forget_sent(self) -> None:
        """The workers are gone, and with them all that they held."""
        self.micro_batches.forget_sent()
        self.states.forget()

    # -------------------------------------------------------------------------------------------------- schedule
    def schedule(self, build: PlanBuilder, budget: int, make_room: MakeRoom) -> np.ndarray:
        """Slots of the step's decode rows, from the micro-batch that has its turn; they take at most `budget` tokens."""
        t, micro_batch = self._slots, self.micro_batches.now
        self.num_stalled = 0
        rows = micro_batch.rows
        self.states.begin(rows)
        if not len(rows):
            return rows
        left = t.sched_tokens[rows] < t.final_len[rows]
        if not left.all():
            rows = micro_batch.rows = rows[left]  # their last token is in flight
        if len(rows) > budget:  # take turns
            micro_batch.rows = np.concatenate([rows[budget:], rows[:budget]])
            rows = rows[:budget]
        build.window = self._windows.wanted(rows)
        lacking = self._lacking(rows, build.window)
        if build.window > 1 and lacking.sum() * self._kv.num_groups > self._kv.pool.num_available:
            build.window, lacking = 1, self._lacking(rows, 1)
        if lacking.any():
            rows = self._grow(micro_batch, rows, lacking, build, make_room)
        if self.micro_batches.are_several and len(rows):
            build.lag = build.step - int(t.last_step[rows].max())
        t.last_step[rows] = build.step
        return rows

    def _lacking(self, rows: np.ndarray, window: int) -> np.ndarray:
        """Tokens for which these rows lack blocks; int [rows]."""
        t = self._slots
        more = 0 if window == 1 else np.minimum(window, t.max_window[rows]) - 1 + self._windows.ahead
        reach = t.sched_upper[rows] + more
        missing = np.maximum(np.minimum(reach, t.final_len[rows] - 1) - t.capacity[rows], 0)
        return -(-missing // self._kv.block_size) if missing.any() else missing

    def _grow(
        self, micro_batch: MicroBatch, rows: np.ndarray, lacking: np.ndarray, build: PlanBuilder, make_room: MakeRoom
    ) -> np.ndarray:
        """Give rows at the end of their last block those that they lack; a row that gets none is left out, or preempted."""
        t, before = self._slots, micro_batch.rows
        at = lacking.nonzero()[0]
        needy = [(t.sequence(slot), count) for slot, count in zip(rows[at].tolist(), lacking[at].tolist(), strict=True)]
        needy.sort(key=lambda needs: needs[0].order)
        stalled: set[int] = set()
        for seq, count in needy:
            if seq.state is not SequenceState.DECODE:
                continue  # preempted just now, for an earlier one
            may_wait = t.sched_tokens[seq.slot] <= t.capacity[seq.slot]  # the results in flight may show that it lacks nothing
            if (may_wait and self._kv.pool.num_available < self._kv.num_groups) or not make_room(seq):
                if seq.state is SequenceState.DECODE:
                    stalled.add(seq.slot)
                continue
            build.block_updates += self._kv.grow(seq.blocks, seq.slot, count)
            self.states.filled(build, seq)
            t.capacity[seq.slot] += count * self._kv.block_size
        self.num_stalled = len(stalled)
        if not stalled and micro_batch.rows is before:
            return rows
        running = set(micro_batch.rows.tolist()) - stalled
        return np.asarray([slot for slot in rows.tolist() if slot in running], np.int32)

    def advance(self, build: PlanBuilder, rows: np.ndarray, samples: np.ndarray, mask_rows: np.ndarray) -> np.ndarray:
        """The step's rows, by their slots, are all chosen: decide about its window. samples: bool [rows].

        Returns the most tokens that each has computed after this step, int [rows]."""
        t, sampling = self._slots, rows[samples]
        self._windows.settle(build, rows, mask_rows)
        decode = rows[: len(rows) - len(build.prefills)]
        self.states.schedule(build, decode)
        build.has_adapters = bool(t.num_with_adapters and t.has_adapter[rows].any())
        reach = np.minimum(t.sched_upper[rows] + (build.window - 1), t.final_len[rows])
        t.sched_tokens[sampling] += 1
        t.sched_upper[sampling] += 1
        if build.row_windows is not None:
            t.sched_upper[rows[: len(build.row_windows)]] += build.row_windows - 1
        return reach

    def are_as_sent(self, rows: np.ndarray) -> bool:
        """Whether the step's decode rows equal those of its micro-batch's last step, which the workers still hold.

        From now on they hold these."""
        micro_batch = self.micro_batches.now
        sent, micro_batch.sent = micro_batch.sent, rows
        return rows is sent or (sent is not None and np.array_equal(rows, sent))

    # --------------------------------------------------------------------------------------------------- results
    def take(self, step: ScheduledStep, samples: Samples, eos: np.ndarray) -> Taken:
        """Append a step's sampled tokens to its sequences. eos: bool [vocabulary]."""
        t = self._slots
        counts = step.samples & t.alive[step.slots]
        self.states.returned(step, counts)
        at = counts[samples.rows].nonzero()[0]
        if len(at) < len(samples.tokens):
            samples = samples.only(at)
        slots = step.slots[samples.rows]
        stops = self._are_stops(slots, samples.tokens, eos)
        if step.window == 1:
            t.token_ids[slots, t.num_tokens[slots]] = samples.tokens
            t.num_tokens[slots] += 1
            return Taken(slots, samples, slice(None), 1, stops)
        self._settle(step, samples, counts.nonzero()[0])
        starts = np.diff(samples.rows, prepend=-1).nonzero()[0]
        lengths = np.diff(starts, append=len(at))
        index = np.arange(len(at)) - starts.repeat(lengths)  # of each token within its row
        before = np.cumsum(stops) - stops  # stop ids
        kept = (before == before[starts].repeat(lengths)).nonzero()[0]
        slots, stops, index = slots[kept], stops[kept], index[kept]
        samples = samples.only(kept)
        last = np.diff(samples.rows, append=-1).nonzero()[0]
        t.token_ids[slots, t.num_tokens[slots] + index] = samples.tokens
        t.num_tokens[slots[last]] += (index[last] + 1).astype(np.int32)
        return Taken(slots, samples, last, index[last] + 1, stops)

    def _settle(self, step: ScheduledStep, samples: Samples, rows: np.ndarray) -> None:
        """Set the bounds of these rows' lengths right, after a step with windows."""
        t, slots = self._slots, step.slots[rows]
        counts = np.bincount(samples.rows, minlength=len(step.slots)).astype(np.int32)[rows]
        num_decode = int(np.searchsorted(rows, len(step.slots) - len(step.prefills)))
        most = np.ones(len(rows), np.int32)
        if step.row_windows is not None:
            most[:num_decode] = step.row_windows[rows[:num_decode]]
        t.sched_tokens[slots] += counts - 1
        t.sched_upper[slots] += counts - most
        self._windows.observe(step, rows[:num_decode], samples.drafted, np.maximum(counts[:num_decode] - 1, 0))

    def _are_stops(self, slots: np.ndarray, tokens: np.ndarray, eos: np.ndarray) -> np.ndarray:
        t = self._slots
        stops: np.ndarray = eos[np.minimum(tokens, len(eos) - 1)] & t.checks_eos[slots]
        for i in t.checks_ids[slots].nonzero()[0]:
            stops[i] |= int(tokens[i]) in t.sequence(slots[i]).task.stop_ids
        return stops

    def find_ended(self, taken: Taken) -> list[tuple[Sequence, int, int, bool]]:
        """(sequence, slot, its last token, whether that is a stop id that ended it) of the rows that end with this step."""
        t, slots, stops = self._slots, taken.slots[taken.last], taken.stops[taken.last]
        ends = (stops | (t.num_tokens[slots] >= t.final_len[slots])).nonzero()[0]
        tokens = taken.samples.tokens[taken.last][ends].tolist()
        columns = slots[ends].tolist(), tokens, stops[ends].tolist()
        return [(t.sequence(slot), slot, token, stop) for slot, token, stop in zip(*columns, strict=True)]

    def note_filled(self, taken: Taken) -> None:
        """Note rows that have just filled a block for `register_filled`; give back blocks that the window has left behind."""
        slots, size = taken.slots[taken.last], self._kv.block_size
        computed = self._slots.num_tokens[slots] - 1  # of the steps that have returned
        ends = (computed // size > (computed - taken.counts) // size).nonzero()[0]
        filled = [(self._slots.sequence(slots[i]), int(computed[i])) for i in ends]
        self._filled += filled
        if self._kv.frees_early:
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
