"""Scheduler: a pure state machine. Events in (add, abort, step results), plans and outputs out. No I/O, no torch, no clock.

There is no prefill phase: every running sequence has tokens that are known and tokens that are computed, and a step's token
budget closes the gap, running sequences first (decode rows, then prefills under way), then waiting ones. Steps are scheduled
before the results of earlier ones are known, by counts alone; blocks and slots are given back only when the last step that
uses them has returned. Who calls: the core's loop (core.py); tests call it as a list of events.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.enginecore.kv.manager import NULL_BLOCK, KVManager
from quire.enginecore.scheduling.peak_estimate import PeakEstimate
from quire.enginecore.scheduling.plan_builder import PlanBuilder, logits_processors_of, slot_words
from quire.enginecore.scheduling.prefill_budget import SMOOTH_TOKENS, tokens_beside
from quire.enginecore.scheduling.sequence import Sequence, Slots, State
from quire.enginecore.scheduling.waiting import WaitingQueue
from quire.ipc.messages import Finished, Started
from quire.ipc.step.plan import PREFILL_PROMPT_LOGPROBS, PREFILL_SAMPLE, StepPlan

MAX_PROCESSOR_WORDS = 1 << 20  # of one plan; one sequence's record may go beyond
MAX_HELD = 256  # waiting sequences that a step looks at in vain


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    windows: tuple[int, ...]  # per KV group; 0: sees everything
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    num_processor_rows: int = 64
    look_ahead: bool = True  # False: admit while blocks are free, and preempt when they run out
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    smooth_tokens: int = SMOOTH_TOKENS  # of the steps with decode rows over which prompts are spread


@dataclass(frozen=True)
class ScheduledStep:
    """What must be remembered until a step's results are back. Rows: decode rows, then prefill rows."""

    step: int
    slots: np.ndarray  # int32 [rows]
    samples: np.ndarray  # bool [rows]
    prefills: list[tuple[Sequence, int]]  # sequence, and tokens computed once this step is done
    first_prefill_row: int
    num_tokens: int


@dataclass
class StepOutput:
    """What a step's results mean: new tokens in row order, and which sequences began or ended. Arrays have equal length."""

    owners: np.ndarray
    keys: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray  # row of the step that each token came from
    wants_logprobs: np.ndarray
    finished: list[tuple[int, Finished]] = field(default_factory=list)  # (owner, ...)
    started: list[tuple[int, Started]] = field(default_factory=list)


@dataclass
class Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.slots = Slots(config.max_num_seqs, config.max_model_len)
        self.kv = KVManager(config.num_blocks, config.block_size, config.windows, num_slots=config.max_num_seqs + 1)
        self.waiting = WaitingQueue(config.policy)
        self.counters = Counters()
        self._peak = PeakEstimate()
        # max_plan_words has room for four whole block tables: the last sequence admitted may add one more
        self._max_table_updates = 3 * self.kv.num_groups * -(-config.max_model_len // config.block_size)
        self._eos = np.zeros(max(config.vocab_size, 1), bool)
        self._eos[[i for i in config.eos_token_ids if i < config.vocab_size]] = True
        self._processor_rows = list(range(config.num_processor_rows - 1, -1, -1))
        self._step = 0
        self._returned = 0
        self._decode = np.zeros(0, np.int32)  # slots of the decode rows, in row order
        self._sent_decode: np.ndarray | None = None  # the decode rows that the workers hold
        self._prefilling: list[Sequence] = []  # by order
        self._leaving: list[Sequence] = []  # finished or preempted, with a step in flight
        self._filled: list[tuple[Sequence, int]] = []  # decode rows that filled a block, and their computed tokens
        self._stalled = 0  # decode rows left out of this step for want of blocks
        self._no_room_for: Sequence | None = None  # the first that waits: looked at again when something was given back
        self._preempted = False  # in this step: nobody is admitted, so that a slot has one owner within a plan
        self._sequences: dict[tuple[int, int], list[Sequence]] = {}  # (owner, request id) -> live children

    # ---------------------------------------------------------------------------------------------------- events
    def add(self, seq: Sequence) -> None:
        """A new sequence waits. It must be able to fit: see `fits`."""
        self._sequences.setdefault((seq.owner, seq.request_id), []).append(seq)
        self.waiting.push(seq)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens could run if it were alone."""
        return num_tokens <= self.config.max_model_len and bool(self.kv.blocks_needed(num_tokens) < self.config.num_blocks)

    def abort(self, owner: int, request_id: int) -> int:
        """Drop a request's sequences in any state; returns how many there were."""
        live = list(self._sequences.get((owner, request_id), []))
        for seq in live:
            self._end(seq)
        return len(live)

    def finish(self, owner: int, key: int) -> None:
        """The frontend ended one sequence (a stop string)."""
        for seq in list(self._sequences.get((owner, key >> 8), [])):
            if seq.key == key:
                self._end(seq)

    def abort_owner(self, owner: int) -> int:
        """Drop all of a frontend's requests."""
        return sum(self.abort(o, r) for o, r in list(self._sequences) if o == owner)

    def has_request(self, owner: int, request_id: int) -> bool:
        return (owner, request_id) in self._sequences

    @property
    def num_running(self) -> int:
        return self.config.max_num_seqs - len(self.slots.free) - len(self._leaving)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or bool(self._prefilling) or len(self._decode) > 0 or self._draining()

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._leaving

    # -------------------------------------------------------------------------------------------------- schedule
    def schedule(self, now: float = 0.0) -> tuple[StepPlan, ScheduledStep] | None:
        """The next step, or None if nothing can run before an earlier step returns or a request arrives.

        `now`, seconds since the Unix epoch, only stamps sequences that start.
        """
        step = self._step + 1
        self._preempted = False
        build = PlanBuilder(step, now)
        decode = self._schedule_decode(build, self._for_decode())
        self._schedule_prefills(build, self._for_prefill(len(decode)))
        if not len(decode) and not build.prefills and not self._preempted:  # nobody wanted what decode rows were denied
            decode = self._schedule_decode(build, self.config.max_num_batched_tokens)
        while not len(decode) and not build.prefills and len(self._decode) and self._returned == self._step:
            # whose turn it was were preempted, and no result will bring us back here: it is the next ones' turn
            decode = self._schedule_decode(build, self.config.max_num_batched_tokens)
        if not len(decode) and not build.prefills:
            return None
        self._step = step
        sent, self._sent_decode = self._sent_decode, decode
        same = decode is sent or (sent is not None and np.array_equal(decode, sent))
        rows, samples, sampling = decode, np.ones(len(decode), bool), decode
        if build.prefills:
            rows = np.concatenate([decode, np.asarray([s.slot for s, _ in build.prefills], np.int32)])
            samples = np.concatenate([samples, np.asarray(build.samples, bool)])
            sampling = rows[samples]
        lengths = self.slots.sched_tokens[rows]
        plan = build.finish(decode, same, self.slots.variant[sampling], lengths)
        self.slots.sched_tokens[sampling] = lengths[samples] + 1
        self._start_decoding(build)
        return plan, ScheduledStep(step, rows, samples, build.prefills, len(decode), plan.num_tokens)

    def _for_decode(self) -> int:
        """Tokens that decode rows may take: not all, where something waits to be computed first; in turns for a budget of 1."""
        budget = self.config.max_num_batched_tokens
        if not self._prefilling and not (self.waiting and self.slots.free):
            return budget
        return budget - (budget // 8 or (1 if budget > 1 else self._step % 2))

    def _for_prefill(self, num_decode: int) -> int:
        """Tokens that prefills may take beside so many decode rows."""
        left = self.config.max_num_batched_tokens - num_decode
        if not num_decode or not (self._prefilling or self.waiting):
            return left
        return tokens_beside(num_decode, *self._backlog(2 * left), left, self.config.smooth_tokens)

    def _backlog(self, enough: int) -> tuple[int, int]:
        """Prompts that could be computed now if a step had room for all, and their tokens, counted until these are `enough`.

        What is in the prefix cache counts, too, for it is looked for only when its turn comes.
        """
        tokens = sum(int(self.slots.num_tokens[s.slot]) - s.num_computed for s in self._prefilling)
        places, num_prompts = len(self.slots.free), len(self._prefilling)
        for seq in self.waiting.unchanged():
            lacks_row = seq.params.needs_logits_processors and not self._processor_rows
            if tokens >= enough or not places or seq is self._no_room_for or lacks_row:
                break
            if seq.waits_for is None and (seq.child == 0 or seq.tokens is not None):  # other children share the first one's
                tokens += len(seq.known)
                num_prompts += 1
            places -= 1
        return num_prompts, tokens

    def _schedule_decode(self, build: PlanBuilder, budget: int) -> np.ndarray:
        t = self.slots
        self._stalled = 0
        if not len(self._decode):
            return self._decode
        left = t.sched_tokens[self._decode] < t.final_len[self._decode]
        if not left.all():
            self._decode = self._decode[left]  # their last token is in flight
        rows = self._decode
        if len(rows) > budget:  # take turns
            self._decode = np.concatenate([rows[budget:], rows[:budget]])
            rows = rows[:budget]
        short = t.sched_tokens[rows] > t.capacity[rows]
        if short.any():
            rows = self._grow(rows, short, build)
        t.last_step[rows] = build.step
        return rows

    def _grow(self, rows: np.ndarray, short: np.ndarray, build: PlanBuilder) -> np.ndarray:
        """Give the rows at the end of their last block another one; who gets none is left out, or preempted."""
        needy = [self._sequence(slot) for slot in rows[short]]
        needy.sort(key=lambda s: s.order)
        stalled: set[int] = set()
        for seq in needy:
            if seq.state is not State.DECODE:
                continue  # preempted just now, for an earlier one
            if not self._make_room(seq, 1):
                if seq.state is State.DECODE:
                    stalled.add(seq.slot)
                continue
            build.block_updates += self.kv.grow(seq, 1)
            self.slots.capacity[seq.slot] += self.config.block_size
        self._stalled = len(stalled)
        if not stalled and not self._preempted:
            return rows
        keep = [s for s in rows.tolist() if s not in stalled and (q := self.slots.sequences[s]) and q.state is State.DECODE]
        return np.asarray(keep, np.int32)

    def _make_room(self, seq: Sequence, blocks_each: int) -> bool:
        """See that `blocks_each` blocks per KV group are available for `seq`, preempting later ones (or itself)."""
        need = blocks_each * self.kv.num_groups
        while self.kv.pool.num_available < need:
            if self.kv.pool.num_available + self._coming() >= need:
                return False  # blocks come back with a step in flight
            victim = max(self._running(), key=lambda s: s.order)
            if victim is seq and self._alone(seq):
                # its own steps in flight give back what its window leaves behind
                assert self.slots.last_step[seq.slot] > self._returned, "a sequence was let in that does not fit"
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _schedule_prefills(self, build: PlanBuilder, budget: int) -> None:
        for seq in list(self._prefilling):
            if budget <= 0:
                break
            if seq.state is State.PREFILL:
                budget -= self._prefill_chunk(seq, budget, build)
        self._admit(budget, build)
        build.registrations.apply(self.kv)

    def _prefill_chunk(self, seq: Sequence, budget: int, build: PlanBuilder) -> int:
        """Schedule the next chunk of a running prefill; returns its tokens (0 if there is no room now)."""
        total = int(self.slots.num_tokens[seq.slot])
        length = min(total - seq.num_computed, budget)
        length = self._room_for_chunk(seq, length)
        if length <= 0:
            return 0
        grow = self.kv.blocks_to_grow(seq, seq.num_computed + length)
        if grow:
            build.block_updates += self.kv.grow(seq, grow)
            self.slots.capacity[seq.slot] += grow * self.config.block_size
        self._put_chunk(seq, length, build)
        return length

    def _room_for_chunk(self, seq: Sequence, length: int) -> int:
        """How many of `length` tokens can be computed now: fewer if blocks are short, at least one block's worth or none."""
        size, groups = self.config.block_size, self.kv.num_groups
        grow = self.kv.blocks_to_grow(seq, seq.num_computed + length)
        if grow * groups <= self.kv.pool.num_available:
            return length
        spare = int(self.slots.capacity[seq.slot]) - seq.num_computed
        if spare <= 0 and not self._make_room(seq, 1):
            return 0
        blocks = self.kv.pool.num_available // groups
        return min(length, spare + blocks * size)

    def _put_chunk(self, seq: Sequence, length: int, build: PlanBuilder) -> None:
        t, start = self.slots, seq.num_computed
        total = int(t.num_tokens[seq.slot])
        end = start + length
        flags, next_token, num_prompt_logprobs = 0, -1, 0
        if end == total:
            flags |= PREFILL_SAMPLE
        wanted = seq.params.prompt_logprobs
        if wanted is not None and seq.child == 0 and start < len(seq.prompt) and t.is_first[seq.slot]:
            flags |= PREFILL_PROMPT_LOGPROBS
            num_prompt_logprobs = wanted
            next_token = int(seq.prompt[end]) if end < len(seq.prompt) else -1
        build.add_prefill(
            seq, t.token_ids[seq.slot, start:end], (seq.slot, start, length, flags, next_token, num_prompt_logprobs)
        )
        seq.num_computed = end
        t.last_step[seq.slot] = build.step
        if not seq.first_scheduled:
            seq.first_scheduled = build.now
        if seq.use_cache:
            build.registrations.add(seq, end // self.config.block_size)

    def _start_decoding(self, build: PlanBuilder) -> None:
        """Sequences whose known tokens are all computed now are decode rows from the next step on."""
        rows = zip(build.prefills, build.samples, strict=True)
        done = [seq for (seq, _), samples in rows if samples and seq.state is State.PREFILL]
        for seq in done:
            self._prefilling.remove(seq)
            self.kv.remove_pending(seq)
            seq.state = State.DECODE
        if done:
            self._decode = np.concatenate([self._decode, np.asarray([s.slot for s in done], np.int32)])

    # ------------------------------------------------------------------------------------------------- admission
    def _admit(self, budget: int, build: PlanBuilder) -> None:
        held: list[Sequence] = []
        while budget > 0 and self.waiting and self.slots.free and build.processor_words < MAX_PROCESSOR_WORDS:
            if self._stalled or self._preempted or len(held) >= MAX_HELD or build.table_updates >= self._max_table_updates:
                break
            seq = self.waiting.pop()
            if seq is self._no_room_for:
                held.append(seq)
                break
            self.register_filled_blocks()
            known = seq.known
            if seq.params.needs_logits_processors and not self._processor_rows:
                held.append(seq)
                break
            hits, must_wait = self.kv.find_prefix(seq, known)
            if must_wait:  # another sequence is computing the same prefix: let it, then hit its blocks
                held.append(seq)
                continue
            if not self._has_room_for(seq, known, hits):
                self._no_room_for = seq
                held.append(seq)
                break
            budget -= self._start(seq, known, hits, budget, build)
        for seq in reversed(held):
            self.waiting.push_front(seq)

    def _has_room_for(self, seq: Sequence, known: np.ndarray, hits: list[list[int]]) -> bool:
        """Look ahead: will everybody's blocks fit to the end, as far as can be guessed?"""
        if self.num_running == 0 and not self._leaving:
            return True
        cached = [b for group in hits for b in group if b != NULL_BLOCK]
        held, unused = len(cached), sum(map(self.kv.pool.is_cached_unused, cached))
        new = max(int(self.kv.blocks_needed(len(known) + 1)) - held, self.kv.num_groups) + unused
        if new > self.kv.pool.num_available:
            return False
        if not self.config.look_ahead:
            return True
        t = self.slots
        live = t.running.nonzero()[0]
        used = np.append(t.sched_tokens[live], len(known))
        final = np.append(
            self._peak.final_len(used[:-1], t.prompt_len[live], t.final_len[live], t.ends_by_length[live]),
            self._peak.final_len(len(known), len(seq.prompt), seq.final_len, seq.ends_by_length),
        )
        counted_twice = max(int(self.kv.blocks_needed(used[:-1]).sum()) - self.kv.pool.num_used, 0) + held - unused
        return self._peak.fits(used, final, self.kv.blocks_needed, self.config.num_blocks - 1 + counted_twice)

    def _start(self, seq: Sequence, known: np.ndarray, hits: list[list[int]], budget: int, build: PlanBuilder) -> int:
        """Give a waiting sequence its slot and first chunk; returns the chunk's tokens."""
        slot = self.slots.lease(seq, known)
        seq.tokens = None
        seq.state = State.PREFILL
        cached = self.kv.attach(seq, hits) * self.config.block_size
        seq.num_computed = cached
        self.slots.capacity[slot] = cached
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = cached
            self.counters.prompt_tokens += len(seq.prompt)
            self.counters.cached_tokens += cached
        if seq.params.needs_logits_processors:
            seq.processor_row = self._processor_rows.pop()
            build.add_processors(logits_processors_of(seq, known))
        build.slot_updates.append(slot_words(seq))
        table = self.kv.table_of(seq)
        build.block_updates += table
        build.table_updates += len(table)
        self.kv.add_pending(seq)
        self._prefilling.append(seq)
        self._prefilling.sort(key=lambda s: s.order)
        length = self._prefill_chunk(seq, budget, build)
        if not length and seq.state is State.PREFILL:
            self._preempt(seq)  # no room after all: it has no row, so slot and blocks go back now, and it waits in front
        return length

    # --------------------------------------------------------------------------------------------------- results
    def update(self, scheduled: ScheduledStep, tokens: np.ndarray) -> StepOutput:
        """Take a step's sampled ids (int32 [rows]); steps return in order."""
        self.register_filled_blocks()
        t = self.slots
        self._returned = scheduled.step
        for seq, computed in scheduled.prefills:
            if seq.slot >= 0:
                self.kv.release_outside_window(seq, computed)
        if any(self.config.windows):
            self._no_room_for = None  # windows give blocks back without an end
        rows = (scheduled.samples & t.alive[scheduled.slots]).nonzero()[0]
        slots, tokens = scheduled.slots[rows], tokens[rows]
        t.token_ids[slots, t.num_tokens[slots]] = tokens
        t.num_tokens[slots] += 1
        self.counters.generation_tokens += len(rows)
        out = StepOutput(t.owner[slots], t.key[slots], tokens, rows, t.wants_logprobs[slots])
        self._report_started(slots, out)
        # named before any of them ends and gives back its slot
        ended = [(self._sequence(slots[i]), int(slots[i]), int(tokens[i]), stop) for i, stop in self._find_ended(slots, tokens)]
        self._complete_blocks(slots)
        for seq, slot, token, by_stop_id in ended:
            self._peak.observe(int(t.num_tokens[slot]) - len(seq.prompt))
            reason = Finished(seq.key, "stop", token) if by_stop_id else Finished(seq.key, "length")
            out.finished.append((seq.owner, reason))
            self._end(seq)
        self._let_go()
        return out

    def _report_started(self, slots: np.ndarray, out: StepOutput) -> None:
        for i in self.slots.is_first[slots].nonzero()[0]:
            seq = self._sequence(slots[i])
            self.slots.is_first[seq.slot] = False
            queue_s = max(seq.first_scheduled - seq.arrival_time, 0.0)
            out.started.append((seq.owner, Started(seq.key, max(seq.num_cached_tokens, 0), queue_s)))

    def _find_ended(self, slots: np.ndarray, tokens: np.ndarray) -> list[tuple[int, bool]]:
        """(index, whether a stop id ended it) of the rows that end with this token."""
        t = self.slots
        stops = self._eos[np.minimum(tokens, len(self._eos) - 1)] & t.checks_eos[slots]
        for i in t.checks_ids[slots].nonzero()[0]:
            stops[i] |= int(tokens[i]) in self._sequence(slots[i]).stop_ids
        ends = stops | (t.num_tokens[slots] >= t.final_len[slots])
        return [(int(i), bool(stops[i])) for i in ends.nonzero()[0]]

    def _complete_blocks(self, slots: np.ndarray) -> None:
        """Rows that have just filled a block: for `register_filled_blocks`; give back what the window has left behind."""
        computed = self.slots.num_tokens[slots] - 1  # of the steps that have returned
        ends = (computed % self.config.block_size == 0).nonzero()[0]
        filled = [(self._sequence(slots[i]), int(computed[i])) for i in ends]
        self._filled += filled
        if any(self.config.windows):
            self.register_filled_blocks()  # what is given back should be findable
            for seq, num_computed in filled:
                self.kv.release_outside_window(seq, num_computed)

    def register_filled_blocks(self) -> None:
        """Make the blocks that decode rows have filled findable. Whatever depends on that does it first; call it when there is
        time: hashing was a third of the time to a large batch's next plan, which does not need it."""
        filled, self._filled = self._filled, []
        for seq, num_computed in filled:
            if seq.use_cache:
                self.kv.hash_known(seq, self.slots.known(seq)[:num_computed])
                self.kv.register(seq, num_computed // self.config.block_size)

    # --------------------------------------------------------------------------------- leaving: end and preemption
    def _end(self, seq: Sequence) -> None:
        """The sequence is over, for whatever reason; its blocks follow when no step in flight uses them."""
        live = self._sequences[(seq.owner, seq.request_id)]
        live.remove(seq)
        if not live:
            del self._sequences[(seq.owner, seq.request_id)]
        before, seq.state = seq.state, State.FINISHED
        if before is State.WAITING:
            self.waiting.remove(seq)
        elif before is not State.DRAINING:
            self._leave(seq, before)
        if seq.slot >= 0:
            self.slots.alive[seq.slot] = False

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence out; it waits again, at the front, once its last step in flight has returned."""
        self.counters.preemptions += 1
        self._preempted = True
        before, seq.state = seq.state, State.DRAINING
        self._leave(seq, before)

    def _leave(self, seq: Sequence, before: State) -> None:
        if before is State.DECODE:
            self._decode = self._decode[self._decode != seq.slot]
        else:
            self._prefilling.remove(seq)
        self.slots.running[seq.slot] = False
        self.kv.remove_pending(seq)
        if self.slots.last_step[seq.slot] > self._returned:
            self._leaving.append(seq)
        else:
            self._give_back(seq)

    def _let_go(self) -> None:
        """A step has returned: sequences whose last one it was give back what they held."""
        leaving, self._leaving = self._leaving, []
        for seq in leaving:
            if self.slots.last_step[seq.slot] > self._returned:
                self._leaving.append(seq)
            else:
                self._give_back(seq)

    def _give_back(self, seq: Sequence) -> None:
        self.register_filled_blocks()
        again = seq.state is State.DRAINING
        if again:
            seq.tokens = self.slots.known(seq).copy()
        self.kv.free(seq)
        self.slots.give_back(seq)
        self._no_room_for = None
        if seq.processor_row >= 0:
            self._processor_rows.append(seq.processor_row)
            seq.processor_row = -1
        if again:
            seq.state, seq.num_computed = State.WAITING, 0
            self.waiting.push_front(seq)

    def reset(self) -> list[Sequence]:
        """The workers are gone: nothing in flight returns and the KV cache is lost.

        Ends and returns every sequence that was running; waiting ones stay."""
        gone = [s for s in self.slots.sequences if s is not None and s.state is not State.FINISHED]
        self._returned = self._step
        for seq in gone:
            self._end(seq)
        self._let_go()
        self.kv.pool.forget_all()
        self._sent_decode = None
        return gone

    # ----------------------------------------------------------------------------------------------------- small
    def _sequence(self, slot: int) -> Sequence:
        seq = self.slots.sequences[slot]
        assert seq is not None, f"slot {slot} is empty"
        return seq

    def _running(self) -> Iterable[Sequence]:
        return (s for s in self.slots.sequences if s is not None and s.state in (State.PREFILL, State.DECODE))

    def _alone(self, seq: Sequence) -> bool:
        return not self._leaving and all(s is seq for s in self._running())

    def _coming(self) -> int:
        """Blocks that come back when the steps in flight return; shared ones are counted as if they did."""
        return sum(len(b) - r for s in self._leaving for b, r in zip(s.blocks, s.num_released, strict=True))

    def _draining(self) -> bool:
        return any(s.state is State.DRAINING for s in self._leaving)

    def check(self) -> None:
        """Assert that nothing is leaked or shared wrongly."""
        t = self.slots
        held = [s for s in t.sequences if s is not None]
        assert len(held) + len(t.free) == self.config.max_num_seqs and len(set(t.free)) == len(t.free)
        assert all(t.sequences[s.slot] is s for s in held)
        self.kv.check(held)
        rows = sum(s.processor_row >= 0 for s in held)
        assert rows + len(self._processor_rows) == self.config.num_processor_rows
        decode = {s.slot for s in held if s.state is State.DECODE}
        assert set(self._decode.tolist()) <= decode and len(set(self._decode.tolist())) == len(self._decode)
        assert {id(s) for s in self._prefilling} == {id(s) for s in held if s.state is State.PREFILL}
        assert {id(s) for s in self._leaving} == {id(s) for s in held if s.state in (State.DRAINING, State.FINISHED)}
        assert all(s.state is State.WAITING for s in self.waiting)
