"""ResultRing: sampled tokens from the output rank to the core, written by the GPU itself inside its graph or by a CPU worker.

The memory is a memfd passed by descriptor. Every word is a uint64 {step in the high 32 bits, value in the low 32}: it validates
itself, so the GPU needs neither a fence nor a counter, and the core only checks whether all words of a step have arrived.

    page 0   magic, max_rows, num_logprobs, depth, words_per_step, generation of workers, max_samples | sleeping flag   (int64)
    data     depth entries of words_per_step; step s is entry (s & 0x7fffffff) % depth
    entry    the tokens of N samples, the index of each row's first sample [R], the draft before each sample [N], and then for
             each sample the words of sections.logprob_record(L), floats as their bits; N = max_samples, R = max_rows,
             L = num_logprobs; a sample has all of its L alternatives or none at all. If max_samples is 0, then N = R, and there
             are no indices and no drafts

A step without windows has one sample a row. A step with windows writes as many words as its plan has room for: a row's samples
are those from its first one to the next row's; those that count come first, then words of REJECTED. Words at the end that are
no row's are UNUSED. Drafts are written only if grammar masks depend on them, and before all others (drafts.py).

A GPU cannot ring a doorbell. The core raises its flag while it sleeps in its poll; a thread of the worker then rings.
"""

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.ipc.step.drafts import StepDrafts
from quire.ipc.step.plan_ring import RingCorrupt, adopt, drain_doorbell, make_doorbell, make_fence, make_shared_memory
from quire.ipc.step.samples import Samples
from quire.ipc.step.sections import STEP_MASK, USUAL_LOGPROBS, draft_words, first_logprob_word, logprob_record, result_words

_MAGIC = 0x544C_5345_5245_4951
_PAGE = 4096
_Q_MAGIC, _Q_MAX_ROWS, _Q_NUM_LOGPROBS, _Q_DEPTH, _Q_WORDS_PER_STEP, _Q_GENERATION, _Q_MAX_SAMPLES = range(7)
_Q_SLEEPING = 8


class RowLogprobs(NamedTuple):
    """Logprobs of k samples of a step, each with m alternatives. When read, m is num_logprobs; when written, it may be less."""

    rows: np.ndarray  # int [k], indices of samples of the step: of rows if there are no windows
    logprobs: np.ndarray  # float32 [k], of the sampled tokens
    ranks: np.ndarray  # int32 [k], 1 = the most likely
    top_ids: np.ndarray  # int32 [k, m], most likely first; if m is less than num_logprobs, the rest is -1
    top_logprobs: np.ndarray  # float32 [k, m]


def result_depth(num_stages: int) -> int:
    """Steps that the result ring holds: twice those in flight, and at least 8. A power of two."""
    return max(8, 4 << (num_stages - 1).bit_length())


class ResultRing:
    """Both ends: the core creates the ring and reads; the output rank attaches and writes. One thread each."""

    def __init__(self, fd: int, doorbell: int) -> None:
        self._fd, self._doorbell = fd, doorbell
        memory = memoryview(mmap.mmap(fd, 0))
        self._q = memory[:_PAGE].cast("q")
        self.max_rows: int = self._q[_Q_MAX_ROWS]
        self.max_samples: int = self._q[_Q_MAX_SAMPLES]  # 0: as many as rows
        self.num_logprobs: int = self._q[_Q_NUM_LOGPROBS]
        self.depth: int = self._q[_Q_DEPTH]
        self.words_per_step: int = self._q[_Q_WORDS_PER_STEP]
        self._record = logprob_record(self.num_logprobs)
        self.buffer = memory[_PAGE : _PAGE + 8 * self.depth * self.words_per_step]  # page aligned, writable
        self._fence = make_fence()
        words = np.frombuffer(self.buffer, np.uint64).reshape(self.depth, self.words_per_step)
        halves = words.view(np.int32).reshape(self.depth, self.words_per_step, 2)
        num_tokens = self.max_samples or self.max_rows
        grid = (self.depth, num_tokens, self._record.width)
        self._halves = memory[_PAGE:].cast("i")
        self._token_words = words[:, :num_tokens]
        self._token_tags = [halves[slot, :num_tokens, 1] for slot in range(self.depth)]
        self._token_values = [halves[slot, :num_tokens, 0] for slot in range(self.depth)]
        first = first_logprob_word(self.max_rows, self.max_samples)
        firsts, drafts = slice(num_tokens, num_tokens + self.max_rows), draft_words(self.max_rows, self.max_samples)
        self._first_words, self._first_halves, self._draft_words = words[:, firsts], halves[:, firsts], words[:, drafts]
        self._logprob_grid = words[:, first:].reshape(grid)
        self._logprob_tags = halves[:, first:, 1].reshape(grid)
        self._logprob_values = halves[:, first:, 0].reshape(grid)

    @classmethod
    def create(cls, max_rows: int, num_logprobs: int = USUAL_LOGPROBS, depth: int = 8, max_samples: int = 0) -> "ResultRing":
        """A ring for steps of up to max_rows rows. depth: the number of steps that it remembers, a power of two. max_samples:
        of a step with windows; 0: there are none."""
        if max_rows < 1 or num_logprobs < 0 or depth < 2 or depth & (depth - 1) or 0 < max_samples < max_rows:
            raise ValueError(
                f"no result ring of {max_rows} rows, {num_logprobs} logprobs, depth {depth} and {max_samples} samples"
            )
        words_per_step = result_words(max_rows, num_logprobs, max_samples)
        fd = make_shared_memory("quire-result", _PAGE + -(-depth * words_per_step * 8 // _PAGE) * _PAGE)
        with mmap.mmap(fd, _PAGE) as page, memoryview(page) as raw, raw.cast("q") as q:
            q[_Q_MAX_ROWS], q[_Q_NUM_LOGPROBS] = max_rows, num_logprobs
            q[_Q_DEPTH], q[_Q_WORDS_PER_STEP], q[_Q_MAX_SAMPLES] = depth, words_per_step, max_samples
            q[_Q_MAGIC] = _MAGIC
        ring = cls(fd, make_doorbell())
        # zeros would look like results of step 0, which occurs after the number wraps
        np.frombuffer(ring.buffer, np.int64).fill(-1)
        return ring

    @classmethod
    def attach(cls, fds: list[int]) -> "ResultRing":
        """The ring of the other end's `fds()`. Raises RingCorrupt if the descriptors are not a result ring's."""
        adopt(fds, 2, "result ring")
        size = os.fstat(fds[0]).st_size
        if size < 2 * _PAGE:
            raise RingCorrupt("this is no result ring")
        with mmap.mmap(fds[0], _PAGE, prot=mmap.PROT_READ) as page, memoryview(page) as raw, raw.cast("q") as q:
            magic, rows, logprobs, depth, words = q[_Q_MAGIC], *q[_Q_MAX_ROWS : _Q_WORDS_PER_STEP + 1]
            samples = q[_Q_MAX_SAMPLES]
        sane = rows > 0 and logprobs >= 0 and depth > 1 and samples >= 0 and words == result_words(rows, logprobs, samples)
        if magic != _MAGIC or not sane or size < _PAGE + 8 * depth * words:
            raise RingCorrupt("this is no result ring")
        return cls(*fds)

    def fds(self) -> list[int]:
        """Descriptors for `attach` in the child: pass them on with Child.configure or Popen(pass_fds=...)."""
        return [self._fd, self._doorbell]

    @property
    def generation(self) -> int:
        """The generation of workers that writes here; the writer sets it when it is ready to write."""
        return self._q[_Q_GENERATION]

    @generation.setter
    def generation(self, value: int) -> None:
        self._q[_Q_GENERATION] = value

    # ---------------------------------------------------------------------------------------------- the core's side
    def ready(
        self, step: int, num_rows: int, draft_tokens: int = 0, logprob_rows: Sequence[int] | np.ndarray | None = None
    ) -> bool:
        """Whether tokens of rows [0, num_rows) and logprobs of `logprob_rows` of this step have arrived; draft_tokens:
        of the plan."""
        if num_rows == 0:
            return True
        step &= STEP_MASK
        slot, num_tokens = step % self.depth, num_rows + draft_tokens
        # One word first: a spinning core mostly gets False, and this takes 0.1 us instead of 1 us for the whole column.
        if self._halves[2 * (slot * self.words_per_step + num_tokens - 1) + 1] != step:
            return False
        if not (self._token_tags[slot][:num_tokens] == step).all():
            return False
        if draft_tokens and not (self._first_halves[slot, :num_rows, 1] == step).all():
            return False
        if logprob_rows is None or len(logprob_rows) == 0:
            return True
        if draft_tokens:
            samples = self.samples(step, num_rows, draft_tokens)
            logprob_rows = samples.places[np.isin(samples.rows, logprob_rows)]
        return bool((self._logprob_tags[slot][logprob_rows] == step).all())

    def samples(self, step: int, num_rows: int, draft_tokens: int = 0) -> Samples:
        """The samples of a ready step that count; copies."""
        slot = (step & STEP_MASK) % self.depth
        words = self._token_values[slot][: num_rows + draft_tokens]
        if not draft_tokens:
            return Samples.one_a_row(words.copy())
        return Samples.of_windows(words, self._first_halves[slot, :num_rows, 0])

    def drafts(self, step: int, num_rows: int, draft_tokens: int) -> StepDrafts:
        """The drafts of a step, which may not have come yet. draft_tokens, and a mask_window above 1: of its plan."""
        return StepDrafts(self._draft_words[(step & STEP_MASK) % self.depth, : num_rows + draft_tokens], step)

    def logprobs(self, step: int, rows: np.ndarray) -> RowLogprobs:
        """Logprobs of some samples (int [k]: their places) of a ready step; copies."""
        columns = self._logprob_values[(step & STEP_MASK) % self.depth, rows]
        floats, at, top = columns.view(np.float32), self._record.at, self.num_logprobs
        ids, values = at["top_ids"], at["top_logprobs"]
        own, ranks = floats[:, at["logprob"]], columns[:, at["rank"]]
        return RowLogprobs(rows, own, ranks, columns[:, ids : ids + top], floats[:, values : values + top])

    def fileno(self) -> int:
        """The doorbell's descriptor, for a poller; it rings only while armed."""
        return self._doorbell

    def arm(
        self, step: int, num_rows: int, draft_tokens: int = 0, logprob_rows: Sequence[int] | np.ndarray | None = None
    ) -> bool:
        """Ask for the doorbell, before sleeping in poll. False, and not armed, if this step's results have arrived already."""
        self._q[_Q_SLEEPING] = 1
        self._fence()
        if not self.ready(step, num_rows, draft_tokens, logprob_rows):
            return True
        self._q[_Q_SLEEPING] = 0
        return False

    def disarm(self) -> None:
        """Lower the flag. The doorbell may have rung already: call `drain_doorbell` when poll reports it."""
        self._q[_Q_SLEEPING] = 0

    def drain_doorbell(self) -> None:
        drain_doorbell(self._doorbell)

    # ------------------------------------------------------------------------------------------ the output rank's side
    def write(
        self,
        step: int,
        tokens: np.ndarray,
        logprobs: RowLogprobs | None = None,
        first_sample: np.ndarray | None = None,
    ) -> None:
        """Store a step's results and ring the doorbell. tokens: int32 [samples], in row order; first_sample: int32 [rows], of a
        step with windows.

        For a worker without a GPU. Raises ValueError for more samples or logprobs than the ring has.
        """
        if len(tokens) > len(self._token_words[0]):
            raise ValueError(f"{len(tokens)} tokens do not fit a ring of {self.max_rows} rows")
        step &= STEP_MASK
        slot, tag = step % self.depth, np.uint64(step << 32)
        if logprobs is not None and len(logprobs.rows):
            self._logprob_grid[slot][logprobs.rows] = self._logprob_columns(logprobs) | tag
        if first_sample is not None:
            self._first_words[slot, : len(first_sample)] = np.asarray(first_sample, np.int32).view(np.uint32) | tag
        self._token_words[slot, : len(tokens)] = np.ascontiguousarray(tokens, np.int32).view(np.uint32) | tag
        self.ring_doorbell()

    def _logprob_columns(self, logprobs: RowLogprobs) -> np.ndarray:
        given = logprobs.top_ids.shape[1]
        if given > self.num_logprobs:
            raise ValueError(f"{given} logprobs a row do not fit a ring of {self.num_logprobs}")
        columns = np.empty((len(logprobs.rows), self._record.width), np.int32)
        floats, at, top = columns.view(np.float32), self._record.at, self.num_logprobs
        floats[:, at["logprob"]], columns[:, at["rank"]] = logprobs.logprobs, logprobs.ranks
        ids, values = at["top_ids"], at["top_logprobs"]
        columns[:, ids : ids + given], columns[:, ids + given : ids + top] = logprobs.top_ids, -1
        floats[:, values : values + given], floats[:, values + given : values + top] = logprobs.top_logprobs, -np.inf
        return columns.view(np.uint32).astype(np.uint64)

    def ring_doorbell(self) -> None:
        """Wake the core if it sleeps. Call this after the results are visible in memory."""
        self._fence()
        if self._q[_Q_SLEEPING]:
            os.eventfd_write(self._doorbell, 1)

    def close(self) -> None:
        """Release descriptors and memory; views of `buffer` stay valid. May be called again; no other method may be."""
        if self._fd < 0:
            return
        os.close(self._fd)
        os.close(self._doorbell)
        self._fd = -1
        del self._q, self.buffer, self._halves, self._token_words, self._token_tags, self._token_values
        del (
            self._first_words,
            self._first_halves,
            self._draft_words,
            self._logprob_grid,
            self._logprob_tags,
            self._logprob_values,
        )  # unmaps, and closes the map's own descriptor
