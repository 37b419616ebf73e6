"""Admission: decides which waiting sequences start in a step, and whether memory suffices for them. No I/O.

It takes sequences in order, while the step has tokens, slots and work left, and looks each up in the prefix cache. A sequence
waits aside if it shares a prefix that another is computing. If a sequence is not expected to fit into memory until its end, the
queue stops until memory is freed. The others get a slot and their first chunk. The work of a step is bounded, whatever arrives,
because decode rows wait for it; the rest is done in the next steps. Called by the scheduler once a step.
"""

import numpy as np

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.kv.sequence_blocks import PrefixHits
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.decode import DecodeRows
from quire.enginecore.scheduling.leases import Leases
from quire.enginecore.scheduling.leaving import Leaving
from quire.enginecore.scheduling.peak_estimate import PeakEstimate, Projection
from quire.enginecore.scheduling.plan_builder import PlanBuilder, logits_processors_of, slot_words
from quire.enginecore.scheduling.prefill import Prefills
from quire.enginecore.scheduling.sequence import Sequence, SequenceState, Slots
from quire.enginecore.scheduling.step import Counters
from quire.enginecore.scheduling.waiting import WaitingQueue

MAX_PROCESSOR_WORDS = 1 << 20  # most words of a plan, but for the record of one sequence
# Most work of a step. The unit is a KV block that is found in the cache and put into a table: 0.6 us on a slow core, 3 ms in
# all. With prompts of 74 tokens or more, a budget of 8,192 tokens is spent first.
MAX_WORK = 5120
LOOK_WORK = 46  # for a sequence that is checked and started
HASH_WORK = 2  # for a block that is hashed
PEAK_WORK = 16  # for the projection of memory with a sequence, if memory is short
PROCESSOR_WORK = 40  # for a sequence's record of logits processors


class Admission:
    def __init__(
        self,
        config: SchedulerConfig,
        slots: Slots,
        kv: KVManager,
        leases: Leases,
        waiting: WaitingQueue,
        prefills: Prefills,
        decode: DecodeRows,
        leaving: Leaving,
        counters: Counters,
    ):
        self.peak = PeakEstimate()
        self._config, self._slots, self._kv, self._leases, self._counters = config, slots, kv, leases, counters
        self._waiting, self._prefills, self._decode, self._leaving = waiting, prefills, decode, leaving
        # the cap of block updates is four whole block tables; the last sequence admitted may add the fourth
        self._max_table_updates = 3 * max(kv.num_groups, 1) * -(-config.max_model_len // config.block_size)
        self._projection: Projection | None = None  # of the running sequences, for the step being made
        self._work = 0  # left for this step

    def backlog(self, enough: int) -> tuple[int, int]:
        """Prompts that could be computed now if a step had room for all: (streams, tokens), counted up to `enough` tokens.

        Cached prefixes count, too: they are looked up only when a sequence's turn comes.
        """
        num_streams = num_tokens = 0
        places = self._slots.free
        for seq in self._waiting.could_start():
            if num_tokens >= enough or not places or seq is self._waiting.no_room_for:
                break
            if seq.child == 0 or seq.tokens is not None:  # other children share the first one's prompt
                num_tokens += len(seq.known)
                num_streams += seq.task.is_stream
            places -= 1
        return num_streams, num_tokens

    # ----------------------------------------------------------------------------------------------------- a step
    def begin_step(self, now: float) -> None:
        """Before a step's rows are chosen: if there is no slot or no memory for the next sequence, and its tenant has none,
        take from a tenant with several. now: as in `Scheduler.schedule`."""
        self._leaving.has_preempted = False
        self._prefills.items.cache.returned = self._leaving.returned
        self._counters.mean_output = self.peak.mean_output
        self._waiting.age(now)
        if len(self._leaving) or (self._slots.free and self._waiting.no_room_for is None):
            return
        seq = self._waiting.first()
        if seq is None or seq.tenant is None or seq.tenant.num_running:
            return
        if not self._slots.free or seq is self._waiting.no_room_for:
            self._leaving.preempt_for(seq)

    def admit(self, build: PlanBuilder, budget: int) -> bool:
        """Start sequences, with first chunks of at most `budget` tokens in all; returns whether it stopped because the step's
        work was spent."""
        for there in (*self._kv.take_resolved(), *self._leases.take_resolved(), *self._prefills.items.take_resolved()):
            self._waiting.resolved(there)
        self._work = MAX_WORK
        self._projection = None
        while budget > 0 and self._slots.free and not self._leaving.has_preempted:
            if build.processor_words >= MAX_PROCESSOR_WORDS or build.table_updates >= self._max_table_updates:
                break
            seq = self._waiting.first()
            if seq is None or seq is self._waiting.no_room_for:
                break
            hits = self._look(seq)
            if hits is None:
                return True
            items, start = self._prefills.items, hits.num_blocks * self._config.block_size
            # a prefix in the making, a lease, or the bytes of an item
            if (key := hits.waits_for or self._leases.waits_for(seq) or items.waits_for(seq, start)) is not None:
                self._waiting.wait_for(seq, key)
            elif self._prefills.puts_off(seq, start, build, budget) or not items.can_start(seq, start, build.step):
                break
            elif self._has_room_for(seq):
                self._waiting.remove(seq)
                budget -= self._start(seq, build, budget)
            else:
                self._waiting.no_room_for = seq
        return False

    def _look(self, seq: Sequence) -> PrefixHits | None:
        """Its hits in the prefix cache; None if that is too much work for this step. Hashes are kept for the next step."""
        if self._work < LOOK_WORK:
            return None
        self._decode.register_filled()
        self._work -= HASH_WORK * self._kv.hash_waiting(seq.blocks, seq.known, self._work // HASH_WORK)
        if not self._kv.is_hashed(seq.blocks, len(seq.known)):
            return None
        hits = self._kv.find_prefix(seq.blocks, len(seq.known))
        self._work -= LOOK_WORK + hits.num_blocks  # may go below 0: hits cannot be split
        return hits

    def _has_room_for(self, seq: Sequence) -> bool:
        """Look ahead: whether the blocks of all sequences are expected to fit until their ends."""
        kv, length, hits = self._kv, len(seq.known), seq.blocks.hits
        if self._slots.free == self._config.max_num_seqs:
            return True  # no other sequence holds anything
        if not self._leases.are_enough(seq):
            return False
        if not self._config.look_ahead:
            return True
        projection = self._projection = self._projection or self._project()
        final = self.peak.final_len(length, len(seq.prompt), seq.final_len, seq.task.ends_by_length)
        counted_twice = max(projection.num_held - kv.pool.num_used, 0) + hits.num_held - hits.num_unused
        self._work -= PEAK_WORK if projection.is_short else 0
        return projection.add_if_it_fits(length, final, self._config.num_blocks - 1 + counted_twice)

    def _project(self) -> Projection:
        """A projection of the running sequences; sequences that the step admits are added later."""
        t = self._slots
        live = t.running.nonzero()[0]
        used = np.minimum(t.sched_upper[live], t.final_len[live])
        final = self.peak.final_lens(used, t.prompt_len[live], t.final_len[live], t.ends_by_length[live])
        return Projection(used, final, self._kv.blocks_needed, self._config.max_num_seqs + 1)

    def _start(self, seq: Sequence, build: PlanBuilder, budget: int) -> int:
        """Give a sequence its slot and first chunk; returns the chunk's tokens."""
        known = seq.known
        self._leases.take(seq)
        slot, cached = seq.slot, seq.blocks.num_blocks * self._config.block_size
        self._waiting.started(seq, len(known), cached)
        seq.tokens = None
        seq.num_computed = cached
        self._slots.capacity[slot] = cached
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = cached
            self._counters.prompt_tokens += len(seq.prompt)
            self._counters.cached_tokens += cached
        if seq.has_processors:
            build.add_processors(logits_processors_of(seq, known))
            self._work -= PROCESSOR_WORK
        if seq.task.is_processed:
            build.add_custom_processors(seq, known)
            self._work -= PROCESSOR_WORK
        build.slot_updates.append(slot_words(seq))
        table = self._kv.table_of(seq.blocks, slot)
        build.block_updates += table
        build.table_updates += len(table)
        self._kv.add_pending(seq.blocks)
        self._prefills.add(seq)
        length = self._prefills.chunk(seq, build, budget, self._leaving.make_room)
        if not length and seq.state is SequenceState.PREFILL:
            self._leaving.preempt(seq)  # no room after all: it has no row in the step, so its slot and blocks are freed now
        return length
