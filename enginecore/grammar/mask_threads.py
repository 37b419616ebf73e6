"""MaskThreads: threads that advance grammar matchers and make masks from them, beside the core's loop, without the GIL.

The fast lane's thread serves a step in two calls of llguidance, which runs them on threads of its own. A row takes ten
microseconds there, less than several Python threads would need to share the GIL. Sequences in a slow call are moved to a
slow-lane thread, one row per call, until they are fast again. So a slow grammar is found, and no longer delays the masks of
others; if one of its tokens takes too long, its request ends. Meanwhile its sequence gets one token at a time, scheduled when
the mask is ready (deferred.py). The core's loop is woken by an eventfd, or waits briefly for results itself. Masks of windows
wait for their step's drafts here, so that the loop need not (window_masks.py).
"""

import operator
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par

from quire.enginecore.grammar.limits import MAX_WAIT_S
from quire.enginecore.grammar.matchers import Failure
from quire.enginecore.grammar.vocabulary import Vocabulary
from quire.enginecore.grammar.window_masks import WindowMaker
from quire.enginecore.grammar.work import Done, Work, complete_mask, look_at
from quire.enginecore.scheduling.sequence import SequenceState

MAX_THREADS = 12
PIECE = 64  # sequences in one call, for each thread
PARTS, MIN_PART = 2, 16  # most calls for a step's masks, least masks of a call: the first are sent while the next are made
LONG_S = 7e-4  # if the last masks took longer, the next are made in one call, which keeps its threads equally busy
SLOW_S = 0.02  # a call that takes longer is slow: its sequences go to slow lanes, which show the grammar at fault
SLOW_FOR = 64  # after a slow call for one sequence alone, so many of its next masks are expected to be slow, too
YIELD_S = 2e-4  # the longest wait for the fast lane to begin: it may be in a long call
CLOSE_S = 10.0  # for threads to end: in a slow lane one sequence takes a second at most, or its request ends
_FINISHED = SequenceState.FINISHED
_lexer = operator.attrgetter("constraint.lexer")
TOO_SLOW = Failure("invalid", f"its grammar took more than {MAX_WAIT_S:g} s for one token")


def mask_threads(num_cores: int) -> int:
    """How many llguidance threads to use: the loop, the fast lane's thread, a worker and a frontend need a core each."""
    return min(max(num_cores - 4, 1), MAX_THREADS)


class MaskThreads:
    def __init__(self, num_threads: int, vocabulary: Callable[[], Vocabulary]) -> None:
        """num_threads: threads of llguidance for one call; also the most slow lanes. vocabulary: called for the first work."""
        self._num_threads = num_threads
        self._get_vocabulary = vocabulary
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._queues: dict[int, queue.SimpleQueue[list[Work] | None]] = {}  # 0: of the fast lane; others: of slow lanes
        self._begun = threading.Lock()  # locked from the submission of works until the fast lane has begun a call
        self._may_begin = False  # works were submitted to the fast lane since the last `let_begin`
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # counts results
        self.memory = _new_memory  # makes arrays for masks, int32 [n, words]: GrammarSteps sets one that workers can read
        self.num_outstanding = 0  # works that were submitted and not taken back
        self.num_quick = 0  # those of them in the fast lane

    def fileno(self) -> int:
        """For a poller: readable when `take` may have something."""
        return self._fd

    def submit(self, works: list[Work]) -> None:
        """Give works to their threads: the fast lane's, or the slow lane's of their lexer."""
        quick: list[Work] = []
        by_queue: dict[int, list[Work]] = defaultdict(list)
        for work in works:
            c = work.constraint
            if not c.num_works:  # a matcher is used by one thread at a time
                c.queue = 1 + c.lexer % self._num_threads if c.slow_for else 0
            c.num_works += 1
            (by_queue[c.queue] if c.queue else quick).append(work)
        if quick:
            by_queue[0] = quick
            if num_quick := sum(work.is_quick for work in quick):
                self.num_quick += num_quick
                self._begun.acquire(blocking=False)
                self._may_begin = True
        for number, some in by_queue.items():
            if number not in self._queues:
                self._start(number)
            self._queues[number].put(some)
        self.num_outstanding += len(works)

    def let_begin(self) -> None:
        """Give up the GIL until the fast lane calls llguidance; else it gets it only when this thread waits for results."""
        if self._may_begin:
            self._may_begin = False
            self._begun.acquire(timeout=YIELD_S)

    def take(self, timeout_s: float = 0.0) -> list[Done]:
        """Results that are ready; waits up to timeout_s for the first one."""
        found: list[Done] = []
        with suppress(queue.Empty):
            if timeout_s > 0:
                found.append(self._done.get(timeout=timeout_s))
            while True:
                found.append(self._done.get_nowait())
        for done in found:
            os.eventfd_read(self._fd)
            self.num_outstanding -= len(done.works)
            for work in done.works:
                self.num_quick -= work.is_quick
                work.constraint.num_works -= 1
        return found

    def close(self) -> None:
        """Wait for the threads to finish what they are doing: llguidance crashes if the interpreter ends during a call.

        The descriptor stays open, because a thread that takes too long may still write to it.
        """
        self._closing.set()
        for works in self._queues.values():
            works.put(None)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._queues, self._threads = {}, []

    def _start(self, number: int) -> None:
        """Start the thread of a queue, when the first work for it comes."""
        works: queue.SimpleQueue[list[Work] | None] = queue.SimpleQueue()
        self._queues[number] = works
        piece, num_threads = (PIECE * self._num_threads, self._num_threads) if number == 0 else (1, 1)
        maker = _Maker(self._get_vocabulary(), works, self._hand_over, self._closing, piece, num_threads)
        if number == 0:  # not for slow lanes: memory is reused in order, and their masks would hold up all that was taken later
            maker.begun, maker.memory = self._begun, self.memory
        self._threads.append(threading.Thread(target=maker.run, name=f"quire-masks-{number}", daemon=True))
        self._threads[-1].start()

    def _hand_over(self, done: Done) -> None:
        os.eventfd_write(self._fd, 1)  # before `put`: `take` reads one count for each result
        self._done.put(done)


class _Clock:
    """Measures laps, in seconds; time in which the process did not run does not count."""

    def __init__(self) -> None:
        self._at, self._cpu = time.monotonic(), time.process_time()

    def lap(self) -> float:
        at, cpu = time.monotonic(), time.process_time()
        seconds = min(at - self._at, cpu - self._cpu)
        self._at, self._cpu = at, cpu
        return seconds


class _Maker:
    """One thread: it does `piece` works at a time, in num_threads threads of llguidance."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        works: "queue.SimpleQueue[list[Work] | None]",
        hand_over: Callable[[Done], None],
        closing: threading.Event,
        piece: int,
        num_threads: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._works = works
        self._hand_over = hand_over
        self._closing = closing
        self._piece = piece
        self.begun: threading.Lock | None = None
        self.memory = _new_memory
        self._executor = llguidance.LLExecutor(num_threads)
        # consume_token_par releases the GIL only for two or more matchers: this one is added, and always accepts its end token
        self._ended = llguidance.LLMatcher(vocabulary.tokenizer, 'start: ""', log_level=0)
        self._ended.consume_token(vocabulary.end_id)
        self._making_s = 0.0  # of the last works' masks
        partial = np.flatnonzero(vocabulary.known != -1)  # words in which some ids are not tokens: mostly the last ones
        is_range = len(partial) and partial[-1] - partial[0] + 1 == len(partial)
        self._partial = slice(partial[0], partial[-1] + 1) if is_range else partial
        self._known = vocabulary.known[partial]
        self._windows = WindowMaker(self._executor, vocabulary, self._trim, closing)

    def run(self) -> None:
        while (works := self._works.get()) is not None:
            by_kind = (
                (self._do_plain, [w for w in works if w.window is None]),
                (self._do_windows, [w for w in works if w.window]),
            )
            for do, some in by_kind:  # those with windows last: they wait
                for first in range(0, len(some), self._piece):
                    if not self._closing.is_set():
                        do(some[first : first + self._piece])

    def _do_windows(self, works: list[Work]) -> None:
        """The masks of rows with windows, once their step has begun and their drafts are known."""
        live = [w for w in works if self._windows.await_drafts(w)]
        clock = _Clock()
        masked, places, masks = self._windows.make(live, self.memory)
        seconds = clock.lap() / (1 + max(places, default=0))  # a mask, so that a long window does not count as slow
        self._end_part(works, masked, masks, seconds, places)

    def _do_plain(self, works: list[Work]) -> None:
        """Advance all matchers. Hand over the works that get no mask, then the masks in parts, each when it is made."""
        clock = _Clock()
        live = [w for w in works if w.row < 0 or w.seq.state is not _FINISHED]  # the others were aborted meanwhile
        masked = [w for w in live if w.row >= 0]
        self._consume(sorted(live, key=_lexer))
        seconds = clock.lap()
        size = max(-(-len(masked) // PARTS), MIN_PART) if self._making_s < LONG_S else len(works)
        self._making_s = 0.0
        maskless = works if not masked else [] if len(masked) == len(works) else _without(works, masked)
        if maskless:
            self._end_part(maskless, [], np.empty((0, self._vocabulary.num_words), np.int32), seconds)
        for first in range(0, len(masked), size):
            part = masked[first : first + size]
            masks = self.memory(len(part), self._vocabulary.num_words)
            matchers = [(part[i].constraint.matcher, i) for i in _by_lexer(part)]
            self._tell_begun()
            # immediately after the last call: llguidance's threads have not gone to sleep yet
            fill_next_token_bitmask_par(self._executor, matchers, masks)  # type: ignore[arg-type]
            self._finish(part, masks)
            making_s = clock.lap()
            self._making_s += making_s
            self._end_part(part, part, masks, seconds + making_s)

    def _end_part(
        self, works: list[Work], masked: list[Work], masks: np.ndarray, seconds: float, places: list[int] | None = None
    ) -> None:
        is_slow, is_alone = seconds > SLOW_S, self._piece == 1
        slow = works if is_slow else [work for work in works if work.constraint.slow_for]
        for work in slow:
            c = work.constraint
            c.slow_for = (SLOW_FOR if is_alone else 1) if is_slow else max(c.slow_for - 1, 0)
        slow = [work for work in slow if work.constraint.slow_for]
        if is_alone and seconds > MAX_WAIT_S:
            works[0].fail(TOO_SLOW)
        ended = [w for w in works if w.has_ended]
        if ended:
            kept = [i for i, w in enumerate(masked) if not w.has_ended]
            masked, masks = [masked[i] for i in kept], masks[kept]
            places = [places[i] for i in kept] if places else places
        self._hand_over(Done(works, ended, masked, masks, slow, places or []))

    def _consume(self, works: list[Work]) -> None:
        """Give the matchers their tokens. Whether one has ended is seen here, unless its mask will show it (`_finish`)."""
        for turn in range(max((len(w.tokens) for w in works), default=0)):
            given, pairs = [], []
            for work in works:
                if turn >= len(work.tokens) or work.has_ended:
                    continue
                if (token := work.tokens[turn]) in work.constraint.eos_token_ids:
                    work.has_ended = True  # with ignore_eos an end token is only sampled if nothing else was left
                else:
                    given.append(work)
                    pairs.append((work.constraint.matcher, token))
            if given:
                pairs.append((self._ended, self._vocabulary.end_id))
                self._tell_begun()
                taken = self._executor.consume_token_par(pairs)  # type: ignore[arg-type]
                for work, is_taken in zip(given, taken, strict=False):
                    if not is_taken or work.row < 0 or turn + 1 < len(work.tokens):
                        look_at(work)

    def _trim(self, masks: np.ndarray) -> None:
        """Leave only ids that are tokens."""
        masks[:, self._partial] &= self._known

    def _tell_begun(self) -> None:
        if self.begun is not None and self.begun.locked():  # no other thread releases it
            self.begun.release()

    def _finish(self, works: list[Work], masks: np.ndarray) -> None:
        """Note which works have ended with their last token, and complete the masks of the others."""
        column, bit = divmod(self._vocabulary.end_id, 32)
        may_end = set((masks[:, column] >> bit & 1).nonzero()[0].tolist())
        self._trim(masks)
        for i in may_end:  # a matcher that has ended, or failed, allows nothing but the end
            look_at(works[i])
        for i in may_end.union(i for i, work in enumerate(works) if work.is_bound):
            if not works[i].has_ended:
                complete_mask(works[i], masks[i].view(np.uint32), i in may_end)


def _new_memory(n: int, width: int) -> np.ndarray:
    return np.empty((n, width), np.int32)


def _by_lexer(works: list[Work]) -> list[int]:
    """An order with copies of one matcher side by side: they wait for their lexer, and neighbors mostly share a thread."""
    lexers = [work.constraint.lexer for work in works]
    return sorted(range(len(works)), key=lexers.__getitem__)


def _without(works: list[Work], others: list[Work]) -> list[Work]:
    ids = {id(work) for work in others}
    return [work for work in works if id(work) not in ids]
