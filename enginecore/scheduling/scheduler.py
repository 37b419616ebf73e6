"""Scheduler: a pure state machine, from events (add, abort, step results) to plans and outputs. No I/O, no torch, no clock.

There is no prefill phase: every running sequence has tokens that are known and tokens that are computed, and a step's token
budget closes the gap, first for running sequences (decode rows, then prefills under way), then for waiting ones. Steps are
scheduled before the results of earlier ones are known, by counts alone; blocks and slots are given back only when the last step
that uses them has returned. Each stage of a sequence's life has a file: waiting.py, admission.py, prefill.py, decode.py,
leaving.py; here they make a step together. Called by the core's loop (core.py); tests call it with a list of events.
"""

import numpy as np

from quire.enginecore.scheduling.admission import Admission
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.decode import DecodeRows
from quire.enginecore.scheduling.leases import leases_of
from quire.enginecore.scheduling.leaving import RUNNING, Leaving, Lost
from quire.enginecore.scheduling.plan_builder import NO_WORDS, PlanBuilder
from quire.enginecore.scheduling.prefill import Prefills
from quire.enginecore.scheduling.prefill_budget import prefill_budget
from quire.enginecore.scheduling.sequence import Sequence, SequenceState, Slots
from quire.enginecore.scheduling.step import Counters, ScheduledStep, StepOutput, processed_rows
from quire.enginecore.scheduling.waiting import WaitingQueue
from quire.enginecore.scheduling.windows import Windows
from quire.ipc.messages.frontend import Finished, Started
from quire.ipc.step.plan import StepPlan
from quire.ipc.step.samples import Samples
from quire.ipc.step.sections import SAMPLING_CUSTOM


class Scheduler:
    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.slots = Slots(config.max_num_seqs, config.max_model_len)
        self.kv = config.kv_manager()
        self.leases = leases_of(config, self.slots, self.kv)
        self.waiting = WaitingQueue(config.policy, config.max_queue_s)
        self.counters = Counters()
        self._eos = np.zeros(max(config.vocab_size, 1), bool)
        self._eos[[i for i in config.eos_token_ids if i < config.vocab_size]] = True
        self._decode = DecodeRows(self.slots, self.kv, Windows(config, self.slots, self.counters), config.num_micro_batches)
        self._prefills = Prefills(self.slots, self.kv, config)
        self.items = self._prefills.items
        shared = self.slots, self.kv, self.leases, self.waiting, self._prefills, self._decode
        self._leaving = Leaving(*shared, self.counters)
        self._admission = Admission(config, *shared, self._leaving, self.counters)
        self._step = 0
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
        """End a request's sequences, in any state; returns how many there were."""
        live = list(self._sequences.get((owner, request_id), []))
        for seq in live:
            self._end(seq)
        return len(live)

    def finish(self, owner: int, key: int) -> None:
        """The frontend ended one sequence (a stop string)."""
        for seq in list(self._sequences.get((owner, key >> 8), [])):
            if seq.key == key:
                self._end(seq)

    def complete(self, seq: Sequence) -> None:
        """End a sequence because its grammar is complete with the tokens that are known."""
        length = int(self.slots.num_tokens[seq.slot]) if seq.slot >= 0 else len(seq.known)
        self._admission.peak.observe(length - len(seq.prompt))
        self._end(seq)

    def defer(self, seq: Sequence) -> None:
        """Keep a sequence that waits, or is of the step that was just scheduled, out of all later steps, until `release`."""
        seq.is_deferred = True
        if seq.state is SequenceState.DECODE:
            self._decode.remove(seq)
        elif seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
            self.waiting.push(seq)

    def drop_row(self, scheduled: ScheduledStep, row: int) -> None:
        """This row of the last scheduled step will have no token. Its sequence is deferred: if it still runs, it is preempted,
        and it starts again after `release`."""
        seq = self.slots.sequence(scheduled.slots[row])
        scheduled.samples[row] = False
        seq.is_deferred = True
        if seq.state in RUNNING:
            self._leaving.preempt(seq)

    def release(self, seq: Sequence) -> None:
        """A deferred sequence may be scheduled again."""
        seq.is_deferred = False
        if seq.state is SequenceState.DECODE:
            self._decode.add([seq])
        elif seq.state is SequenceState.WAITING:
            self.waiting.release(seq)

    def abort_owner(self, owner: int) -> int:
        """End all requests of a frontend."""
        return sum(self.abort(o, r) for o, r in list(self._sequences) if o == owner)

    def reset(self) -> list[Lost]:
        """The workers are gone, and with them the steps in flight and the KV cache. All that ran waits again; returns it."""
        lost = self._leaving.lose_all(self._step)
        self.kv.forget_all()
        self._decode.forget_sent()
        return lost

    def _end(self, seq: Sequence) -> None:
        live = self._sequences[(seq.owner, seq.request_id)]
        live.remove(seq)
        if not live:
            del self._sequences[(seq.owner, seq.request_id)]
        self._leaving.end(seq)

    # ----------------------------------------------------------------------------------------------------- state
    def has_request(self, owner: int, request_id: int) -> bool:
        return (owner, request_id) in self._sequences

    @property
    def num_running(self) -> int:
        return self.config.max_num_seqs - self.slots.free - len(self._leaving)

    @property
    def oldest_step(self) -> int:
        """The first step that has not returned: the one that the workers run, or the next one."""
        return self._leaving.returned + 1

    @property
    def num_decode_rows(self) -> int:
        return len(self._decode)

    @property
    def has_work(self) -> bool:
        return self.waiting.num_to_schedule > 0 or bool(self._prefills) or len(self._decode) > 0 or self._leaving.is_draining

    @property
    def has_requests(self) -> bool:
        """Whether any request is not answered yet."""
        return bool(self._sequences)

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._leaving

    # -------------------------------------------------------------------------------------------------- schedule
    def schedule(self, now: float = 0.0) -> tuple[StepPlan, ScheduledStep] | None:
        """The next step, or None if nothing can run before an earlier step returns or a request arrives.

        now: seconds since the Unix epoch; it stamps sequences that start, and by it waiting ones age.
        """
        self._admission.begin_step(now)
        build, micro_batches = PlanBuilder(self._step + 1, now), self._decode.micro_batches
        for micro_batch in micro_batches.turns(self._leaving.returned):
            decode, build.micro_batch = self._choose_rows(build), micro_batch
            if len(decode) or build.prefills:
                break
        else:
            return None
        self._step = build.step
        if micro_batches.are_several:
            micro_batches.begin(build.step)
        same = self._decode.are_as_sent(decode)
        rows, samples = decode, np.ones(len(decode), bool)
        if build.prefills:
            rows = np.concatenate([decode, np.asarray([s.slot for s, _ in build.prefills], np.int32)])
            samples = np.concatenate([samples, np.asarray(build.samples, bool)])
        mask_rows = NO_WORDS
        if self.slots.num_constrained:
            lengths = self.slots.sched_upper[rows]
            mask_rows = (samples & (lengths >= self.slots.mask_from[rows])).nonzero()[0].astype(np.int32)
        lengths = self._decode.advance(build, rows, samples, mask_rows)
        plan = build.finish(decode, same, self.slots.sampling_kind[rows[samples]], lengths, mask_rows)
        self._decode.add(self._prefills.take_computed(build))
        kinds = self.slots.sampling_kind[rows] if plan.sampling_kind & SAMPLING_CUSTOM else NO_WORDS
        processed = processed_rows(kinds, samples)
        beside = build.side_rows(len(decode)), processed, mask_rows, *build.drafts
        return plan, ScheduledStep(build.step, rows, samples, build.prefills, plan.num_tokens, *beside, has_runs=plan.has_runs)

    def _choose_rows(self, build: PlanBuilder) -> np.ndarray:
        """Put the step's prefill rows into `build`; returns the slots of its decode rows."""
        budget, make_room = self.config.max_num_batched_tokens, self._leaving.make_room
        decode = self._decode.schedule(build, self._for_decode(), make_room)
        if not self._prefills and not self.waiting.num_to_schedule and len(decode):
            return decode
        has_more = self._schedule_prefills(build, self._for_prefill(len(decode)))
        if not len(decode) and not build.prefills and not self._leaving.has_preempted:
            decode = self._decode.schedule(build, budget, make_room)  # no prefill used the budget reserved for it
        while not len(decode) and not build.prefills and self._leaving.returned == self._step:
            # nothing is in flight, so no result will cause another call
            if has_more:
                has_more = self._schedule_prefills(build, budget)
            elif len(self._decode.micro_batches.now.rows):
                decode = self._decode.schedule(build, budget, make_room)  # all rows taken before were preempted: others go on
            else:
                break
        return decode

    def _schedule_prefills(self, build: PlanBuilder, budget: int) -> bool:
        """Schedule chunks of prompts; returns whether more could have started, but for the limit on a step's work."""
        budget = self._prefills.schedule(build, budget, self._leaving.make_room)
        has_more = not self._decode.num_stalled and self._admission.admit(build, budget)
        self._prefills.register_written()
        return has_more

    def _for_decode(self) -> int:
        """Tokens that decode rows may take: not all if prompts wait to be computed. A budget of 1 is given to both in turn."""
        budget = self.config.max_num_batched_tokens
        if not self._prefills and not (self.waiting.num_to_schedule and self.slots.free):
            return budget
        return budget - max(budget // 8 or (1 if budget > 1 else self._step % 2), self._prefills.owed)

    def _for_prefill(self, num_decode: int) -> int:
        """Tokens that prefills may take beside num_decode tokens of decode rows."""
        left = self.config.max_num_batched_tokens - num_decode
        if not num_decode and (self.config.num_micro_batches == 1 or not len(self._decode)):
            return left
        under_way = self._prefills.num_tokens_left
        streams_waiting, tokens_waiting = self._admission.backlog(2 * left - under_way)
        num_new_streams, num_tokens = self._prefills.num_streams + streams_waiting, under_way + tokens_waiting
        if self.config.num_micro_batches > 1:  # decode rows of every micro-batch wait for the step
            num_decode = len(self._decode)
        streams, target = self._decode.num_streams, self.config.mixed_step_tokens
        return prefill_budget(num_decode, streams, num_new_streams, num_tokens, left, target, self._prefills.owed)

    # --------------------------------------------------------------------------------------------------- results
    def update(self, scheduled: ScheduledStep, samples: Samples, now: float) -> StepOutput:
        """Take a step's sampled tokens; steps return in order. now: seconds of a clock that never goes back."""
        self.register_filled_blocks()
        t = self.slots
        self._leaving.returned = scheduled.step
        for seq, computed in scheduled.prefills:
            seq.num_scored = max(seq.num_scored, min(computed, len(seq.prompt)))
            if seq.slot >= 0:
                self.kv.release_outside_window(seq.blocks, computed)
        if self.kv.frees_early:
            self.waiting.no_room_for = None  # windows give blocks back without an end
        taken = self._decode.take(scheduled, samples, self._eos)
        slots, (tokens, rows, places, drafted) = taken.slots, taken.samples
        self.counters.generation_tokens += len(tokens)
        of_rows = slots[taken.last]
        columns = t.owner[slots], t.key[slots], tokens, rows, t.wants_logprobs[slots], now - t.last_token_time[of_rows]
        out = StepOutput(*columns, places, drafted=drafted)
        t.last_token_time[of_rows] = now
        self._report_started(of_rows, out)
        ended = self._decode.find_ended(taken)  # before any of these sequences ends and gives back its slot
        self._decode.note_filled(taken)
        for seq, slot, token, by_stop_id in ended:
            self._admission.peak.observe(int(t.num_tokens[slot]) - len(seq.prompt))
            reason = Finished(seq.key, "stop", token) if by_stop_id else Finished(seq.key, "length")
            out.finished.append((seq.owner, reason))
            self._end(seq)
        for seq in scheduled.ended_with_prompt():
            self._end(seq)
        self._leaving.release_returned()
        return out

    def _report_started(self, slots: np.ndarray, out: StepOutput) -> None:
        for i in self.slots.is_first[slots].nonzero()[0]:
            seq = self.slots.sequence(slots[i])
            self.slots.is_first[seq.slot] = False
            queue_s = max(seq.first_scheduled - seq.arrival_time, 0.0)
            out.started.append((seq.owner, Started(seq.key, max(seq.num_cached_tokens, 0), queue_s, seq.seed - seq.child)))

    def register_filled_blocks(self) -> None:
        """Put the blocks that decode rows have filled into the prefix cache. Call it after a plan was sent."""
        self._decode.register_filled()

    def check(self) -> None:
        """Assert that no slot, block or sequence is leaked or wrongly shared."""
        held = self.slots.holders
        self.leases.check(held)
        for part in (self._decode, self._prefills, self._leaving):
            part.check(held)
        self.waiting.check()
        assert all(s.state is SequenceState.WAITING for s in self.waiting)
