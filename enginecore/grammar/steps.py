"""GrammarSteps: requests the masks of each step, sends them to the workers, and ends sequences when their grammars end.

    plan N+1 is sent with its mask rows while step N runs      `expect` requests masks that do not depend on N
    the tokens of N arrive                                     `take` requests masks that need nothing but these tokens
    the scheduler has taken the tokens of N                    `advance` requests the others; each is sent when it is made
    rows of N+1 have windows                                   their masks wait for drafts, in a thread; nothing else does
    a mask takes longer than INLINE_S                          `turn` takes it in a later turn of the loop
    a mask takes longer than MASKS_LATE_S                      its sequence is deferred (deferred.py), the step drops its row
    a token reaches max_tokens and may complete the grammar    the finish reason is reported when known, within AMBIGUOUS_S

If a row no longer needs its mask, the workers are told at once that it gets none: nothing waits. Owned by the core's loop.
"""

import time
from collections.abc import Iterable

import numpy as np

from quire.enginecore.grammar.bans import Bans, bans_of
from quire.enginecore.grammar.compiler import GrammarCompiler
from quire.enginecore.grammar.deferred import DeferredSequences
from quire.enginecore.grammar.masks import StepMasks
from quire.enginecore.grammar.matchers import NOTHING_LEFT, Constraint, Failure, restrict, stop_bits
from quire.enginecore.grammar.waiting import Waiting
from quire.enginecore.grammar.without_token import TOO_LATE, nothing_left
from quire.enginecore.grammar.work import Window, Work
from quire.enginecore.owners import Owners
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence, SequenceState
from quire.enginecore.scheduling.step import ScheduledStep, StepOutput
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.frontend import Finished, FinishReason, StepOutputs
from quire.ipc.messages.workers import CaptureMaskedSamplingGraphs
from quire.ipc.step.drafts import StepDrafts
from quire.ipc.step.masks import mask_names, mask_words
from quire.ipc.step.samples import Samples
from quire.ipc.step.sections import INT32_MAX, SAMPLING_PROCESSORS

AHEAD = 0  # stands for the step of a mask that is made before its row is scheduled
INLINE_S = 4e-3  # how long the loop waits for masks before it does other things: normally they take a fraction of it
AMBIGUOUS_S = 2.0  # if the grammar's answer takes longer, the reported finish reason is the length


class GrammarSteps:
    """waiting: the rows of steps in flight that wait for masks. grammars: None if the engine supports none."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: WorkerGroup,
        owners: Owners,
        waiting: StepMasks,
        grammars: GrammarCompiler | None,
        epoch: int,
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._owners = owners
        self._waiting = waiting
        self._threads = grammars.mask_threads if grammars is not None else None
        if self._threads is not None:
            self._threads.memory = workers.mask_memory
        self._epoch = epoch
        self._steps: dict[int, Waiting] = {}  # in flight, with mask rows
        self._deferred = DeferredSequences(scheduler)
        self._ambiguous: dict[int, tuple[Sequence, float]] = {}  # ended by length, perhaps by grammar; by id(), with deadlines
        self._now = 0.0  # of the last turn
        self._oldest = 0  # the oldest step in flight, at the last turn
        self._notified = 0  # the generation of workers that knows that masks will come
        self._num_words = mask_words(scheduler.config.vocab_size)

    def pollables(self) -> Iterable[int]:
        """Descriptors that the core's poller must watch."""
        return () if self._threads is None else (self._threads.fileno(),)

    # -------------------------------------------------------------------------------------------------- the core's calls
    def expect(self, scheduled: ScheduledStep, now: float) -> None:
        """The plan of a step with mask rows was just sent: request the masks that can be made already."""
        rows, slots = scheduled.mask_rows, scheduled.slots[scheduled.mask_rows]
        self._waiting.expect(scheduled.step, rows, now)
        has_window = scheduled.has_window(rows)
        is_bound = has_window | (self._scheduler.slots.sampling_kind[slots] & SAMPLING_PROCESSORS != 0)
        columns = zip(rows.tolist(), slots.tolist(), is_bound.tolist(), strict=True)
        works = [None if is_bound else self._plain_work(scheduled.step, row, slot) for row, slot, is_bound in columns]
        is_plain = np.asarray([work is not None for work in works], bool)
        drafts = self._workers.result_ring.drafts(*scheduled.size) if has_window.any() else None
        self._steps[scheduled.step] = Waiting(scheduled, rows, slots, works, is_plain, drafts, has_window)
        self._submit(self._ask())
        self._deferred.defer_slow(scheduled, rows)

    def take(self, scheduled: ScheduledStep, samples: Samples) -> list[Sequence]:
        """A step has returned, and the scheduler takes its tokens next. Returns the sequences with tokens for their matchers.

        Left out are sequences with a row in the next step that needs only their grammar: these masks are requested here.
        """
        self._steps.pop(scheduled.step, None)
        t = self._scheduler.slots
        if not t.num_constrained:
            return []
        slots, news = scheduled.slots, []
        is_news = scheduled.samples & t.alive[slots] & t.constrained[slots]
        is_news &= np.bincount(samples.rows, minlength=len(slots)) > 0
        for waiting in self._steps.values():
            is_news[self._ask_early(waiting, slots, is_news, samples)] = False
        rows = is_news.nonzero()[0]
        for slot, tokens in zip(slots[rows].tolist(), samples.of_rows(rows), strict=True):
            seq = t.sequence(slot)
            if seq.constraint.take_all(tokens):
                news.append(seq)
            elif seq.constraint.is_over:
                seq.mask_from = t.mask_from[slot] = INT32_MAX
        return news

    def advance(self, news: list[Sequence], out: StepOutput) -> bool:
        """The scheduler has taken the tokens. Adds sequences that their grammar ended to `out`, if known within INLINE_S.

        Returns whether any matcher was given tokens."""
        is_awaited = self._threads is not None and self._threads.num_quick > 0
        if not news and not is_awaited and not self._waiting:
            return False
        works = self._ask()
        by_length = {f.key for _, f in out.finished if f.reason == "length"} if news else ()
        for seq in news:
            if seq.constraint.unconsumed and (seq.state is not SequenceState.FINISHED or seq.key in by_length):
                works.append(self._work_ahead(seq) if seq.is_deferred else self._work(seq))
                if seq.state is SequenceState.FINISHED:
                    self._ambiguous[id(seq)] = seq, time.monotonic() + AMBIGUOUS_S
        self._submit(works)
        deadline = time.monotonic() + INLINE_S
        while self._threads is not None and self._threads.num_quick and (left := deadline - time.monotonic()) > 0:
            self._apply(left, out)
        if self._ambiguous:
            unsure = {(seq.owner, seq.key) for seq, _ in self._ambiguous.values()}
            out.finished = [(owner, f) for owner, f in out.finished if (owner, f.key) not in unsure]
        return bool(news) or is_awaited

    def turn(self, now: float) -> None:
        """Take results, and give up masks that are overdue or not needed. now: seconds of a clock that never goes back."""
        self._now = now
        if self._scheduler.slots.num_constrained and self._notified != self._workers.generation and self._workers.is_ready:
            self._notified = self._workers.generation
            self._workers.send_control(CaptureMaskedSamplingGraphs, lambda _: None)
        if self._threads is not None and self._threads.num_outstanding:
            self._apply(0.0, None)
        if self._ambiguous:
            for seq in [seq for seq, deadline in self._ambiguous.values() if deadline < time.monotonic()]:
                self._report_ambiguous_finish(seq, "length", None)
        if self._waiting:
            for step, waiting in self._steps.items():
                if step > self._oldest or waiting.lacks_drafts:
                    self._waiting.postpone(step, now)  # its masks could not be made while the step before it ran
            self._give_up_dead()
            for step, late in self._waiting.late(now):
                if len(rows := self._deferred.defer_late(self._steps[step].scheduled, late, now)):
                    self._waiting.send(step, rows)
                    self._workers.send_no_masks(step, rows)
            for step, rows in self._waiting.overdue(now):
                self._workers.send_no_masks(step, rows)
        self._oldest = self._scheduler.oldest_step
        if not self._steps:
            self._deferred.forget_ended()
        if self._deferred:
            for seq in self._deferred.overdue(now):
                self._fail(seq, Failure("engine_error", TOO_LATE))

    def clear(self) -> None:
        """Forget the steps in flight: they are lost. Their masks are asked for again when their rows are scheduled again."""
        self._waiting.clear()
        for waiting in self._steps.values():
            if waiting.drafts is not None:
                waiting.drafts.is_given_up = True
        self._steps.clear()
        self._deferred.release_all()

    # --------------------------------------------------------------------------------------------------------- requests
    def _plain_work(self, step: int, row: int, slot: int) -> Work | None:
        """The Work to submit when this row's tokens are known; None if its mask depends on more than its grammar."""
        seq = self._scheduler.slots.sequence(slot)
        c: Constraint | None = seq.constraint
        if c is None or c.matcher is None or c.reasoning is not None or c.mask is not None:
            return None
        return Work(seq, c, [], step, row)

    def _ask_early(self, waiting: Waiting, slots: np.ndarray, has_token: np.ndarray, samples: Samples) -> np.ndarray:
        """Request a step's masks that need only the tokens of the step before; slots: those of its rows.

        Matchers advance while the scheduler takes the tokens. Returns the step before's rows that were submitted.
        """
        t = self._scheduler.slots
        row_of = np.full(len(t.alive), -1, np.int32)
        row_of[slots] = np.arange(len(slots), dtype=np.int32)
        before = row_of[waiting.slots]
        is_early = waiting.is_plain & (before >= 0) & (t.sched_tokens[waiting.slots] - t.num_tokens[waiting.slots] == 2)
        is_early &= has_token[before]
        if not is_early.any():
            return before[:0]
        before = before[is_early]
        works = [work for work, early in zip(waiting.works, is_early.tolist(), strict=True) if early and work is not None]
        for work, tokens in zip(works, samples.of_rows(before), strict=True):
            c = work.constraint
            work.tokens, c.unconsumed = c.unconsumed, work.tokens
            work.tokens += tokens
        assert self._threads is not None
        self._threads.submit(works)
        self._threads.let_begin()
        waiting.keep(~is_early)
        return before

    def _ask(self) -> list[Work]:
        """Works for masks that can be made now, since all tokens before them are known. Answers rows that need no matcher."""
        works: list[Work] = []
        for step, waiting in self._steps.items():
            can_be_made = self._can_be_made(waiting.slots)
            if step > self._scheduler.oldest_step:
                can_be_made &= ~waiting.has_window  # a thread that waits for drafts should not wait for a whole step
            if not can_be_made.any():
                continue
            due, alive = self._waiting.due(step), self._scheduler.slots.alive[waiting.slots]
            arrays = waiting.rows, waiting.slots, can_be_made, alive, waiting.has_window
            columns = zip(*(c.tolist() for c in arrays), waiting.works, strict=True)
            for row, slot, can_be, is_alive, has_window, work in columns:
                if not can_be or row not in due:
                    continue
                if work is None or not is_alive:
                    works += self._ask_for(step, row, slot, waiting.drafts if has_window else None)
                else:
                    c = work.constraint
                    work.tokens, c.unconsumed = c.unconsumed, work.tokens
                    works.append(work)
            waiting.keep(~can_be_made)
        return works

    def _can_be_made(self, slots: np.ndarray) -> np.ndarray:
        """Whether all tokens before the last scheduled one are known, or the sequence has ended meanwhile; bool [n]."""
        t = self._scheduler.slots
        return (t.sched_tokens[slots] - t.num_tokens[slots] == 1) | ~t.alive[slots]

    def _give_up_dead(self) -> None:
        """Tell the workers that rows of sequences that have ended meanwhile get no masks."""
        alive = self._scheduler.slots.alive
        for step, waiting in self._steps.items():
            mask_rows = waiting.scheduled.mask_rows
            is_dead = ~alive[waiting.scheduled.slots[mask_rows]]
            if is_dead.any():
                for row in self._waiting.due(step).intersection(mask_rows[is_dead].tolist()):
                    self._send_none(step, row)

    def _ask_for(self, step: int, row: int, slot: int, drafts: StepDrafts | None) -> list[Work]:
        """The Work for one row's mask, or none if the row was answered at once. drafts: the step's, if the row has a window."""
        if not self._scheduler.slots.alive[slot]:
            self._send_none(step, row)
            return []
        seq = self._scheduler.slots.sequence(slot)
        c: Constraint | None = seq.constraint
        if c is None:
            return []
        if c.mask is not None:
            mask, c.mask = c.mask, None
            self._scheduler.slots.mask_window[slot] = seq.mask_window
            self._send(step, [row], mask[None])
            return []
        if drafts is not None:
            reasoning = c.reasoning.copy() if c.reasoning is not None else None
            tokens = self._work(seq)
            return [tokens, Work(seq, c, [], step, row, window=Window(drafts, tokens, reasoning, self._bans(seq)))]
        opening = c.reasoning.opening if c.reasoning is not None else None
        if c.matcher is not None and (c.reasoning is None or opening is not None):
            work = self._work(seq)
            work.step, work.row, work.banned, work.opening = step, row, self._banned(seq), opening
            return [work]
        forced = c.reasoning.forced if c.reasoning is not None else None
        if forced is None:
            self._send_any_token(step, row)
        else:
            self._force(seq, c, forced, step, row)
        return []

    def _work(self, seq: Sequence) -> Work:
        c: Constraint = seq.constraint
        tokens, c.unconsumed = c.unconsumed, []
        return Work(seq, c, tokens)

    def _work_ahead(self, seq: Sequence) -> Work:
        """The Work for the mask of a deferred sequence's next row."""
        work = self._work(seq)
        work.step, work.row, work.banned = AHEAD, 0, self._banned(seq)
        self._deferred.has_asked(work, self._now)
        return work

    def _force(self, seq: Sequence, c: Constraint, token: int, step: int, row: int) -> None:
        """Send a mask that allows one token."""
        mask = np.zeros(self._num_words, np.uint32)
        word, bit = stop_bits([token])
        mask[word] = bit
        banned = self._banned(seq)
        if not restrict(mask, c.allowed, banned):
            self._fail(seq, NOTHING_LEFT)
            self._send_none(step, row)
        else:
            self._send(step, [row], mask.view(np.int32)[None])

    def _banned(self, seq: Sequence) -> list[int]:
        """Ids that the request's other parameters forbid next; sets the constraint's `allowed`."""
        bans = self._bans(seq)
        return bans.behind([]) if bans is not None else []

    def _bans(self, seq: Sequence) -> Bans | None:
        return bans_of(seq, self._scheduler.slots.known(seq) if seq.slot >= 0 else seq.known, self._num_words)

    def _submit(self, works: list[Work]) -> None:
        if works:
            assert self._threads is not None
            self._threads.submit(works)

    # ---------------------------------------------------------------------------------------------------------- results
    def _apply(self, timeout_s: float, out: StepOutput | None) -> None:
        """Take results. out: the output of the step that they follow, if it is not published yet."""
        assert self._threads is not None
        for done in self._threads.take(timeout_s):
            self._deferred.are_slow(done.slow)
            for work in done.ended:
                if work.failure is not None:
                    self._fail(work.seq, work.failure)
                else:
                    self._complete(work.seq, out)
            if self._ambiguous:
                for work in done.works:
                    self._report_ambiguous_finish(work.seq, "length", out)
            if self._deferred:
                for work, mask in done.first_masks():
                    if work.seq.is_deferred and work.row not in self._waiting.due(work.step):
                        self._deferred.take(work, mask)
            steps = {work.step for work in done.masked}
            for step in steps:
                at = [i for i, work in enumerate(done.masked) if work.step == step] if len(steps) > 1 else slice(None)
                places = np.asarray(done.places, np.int32)[at] if done.places else None
                self._send(step, [work.row for work in done.masked if work.step == step], done.masks[at], places)
            for work in done.without_masks():
                self._send_any_token(work.step, work.row)
        if self._waiting:
            self._give_up_dead()

    def _complete(self, seq: Sequence, out: StepOutput | None) -> None:
        """The output has completed its grammar: end the sequence."""
        if seq.state is SequenceState.FINISHED:
            return self._report_ambiguous_finish(seq, "stop", out)
        self._scheduler.complete(seq)
        return self._report_finish(seq, "stop", out)

    def _report_ambiguous_finish(self, seq: Sequence, reason: FinishReason, out: StepOutput | None) -> None:
        """Report the finish reason of a sequence that reached max_tokens with a token that may also complete its grammar."""
        if self._ambiguous.pop(id(seq), None) is not None:
            if out is not None:
                out.finished = [(owner, f) for owner, f in out.finished if (owner, f.key) != (seq.owner, seq.key)]
            self._report_finish(seq, reason, out)

    def _report_finish(self, seq: Sequence, reason: FinishReason, out: StepOutput | None) -> None:
        end = Finished(seq.key, reason)
        if out is not None and seq.owner in out.owners:  # else the step sends no message there
            out.finished.append((seq.owner, end))
        else:
            self._owners.send(seq.owner, StepOutputs(self._epoch, 0, b"", b"", [end]))

    def _fail(self, seq: Sequence, failure: Failure) -> None:
        """End a request with an error, unless it has ended."""
        if seq.state is not SequenceState.FINISHED and self._scheduler.abort(seq.owner, seq.request_id):
            wanted = seq.task.sampling.grammar
            field = "thinking_token_budget" if wanted is None else wanted.name
            message = nothing_left(seq.task.sampling) if failure is NOTHING_LEFT else failure.message
            self._owners.refuse(seq.owner, seq.request_id, failure.code, f"{field}: {message}")

    def _send(self, step: int, rows: list[int], masks: np.ndarray, places: np.ndarray | None = None) -> None:
        """Send the masks of those rows that still wait. places: int32 [n], in the rows' windows; None: the first ones."""
        due = self._waiting.due(step)
        if not due.issuperset(rows):
            at = [i for i, row in enumerate(rows) if row in due]
            rows, masks, places = [rows[i] for i in at], masks[at], places[at] if places is not None else None
        if rows:
            named = np.asarray(rows, np.int32)
            self._waiting.send(step, named)
            windows = self._steps[step].scheduled.window > 1
            if windows:
                named = mask_names(named, places if places is not None else np.zeros_like(named))
            self._workers.send_masks(step, named, masks, windows)

    def _send_any_token(self, step: int, row: int) -> None:
        if self._waiting.send(step, _one(row)):
            self._workers.send_any_token(step, _one(row))

    def _send_none(self, step: int, row: int) -> None:
        if self._waiting.send(step, _one(row)):
            self._workers.send_no_masks(step, _one(row))


def _one(row: int) -> np.ndarray:
    return np.asarray([row], np.int32)
