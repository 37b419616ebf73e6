"""Beam search as arithmetic: which continuations of a prompt are the most likely, given candidates for each next token.

The rules are vLLM's. For each running beam, the 2 x width most likely next tokens are considered: an ending token completes the
beam, the others compete for the `width` beams of the next step. A beam's score is its log-probability divided by its length
(with the prompt, without an ending token) to the power of length_penalty. The result is the best `width` of the completed beams
and, at the end, the running ones. No I/O: beam_search.py asks an engine for the candidates.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from quire.ipc.messages.frontend import TokenLogprobs


class Rows(NamedTuple):
    """Log-probabilities of a beam's tokens, last to first: beams share the rows of their common prefix."""

    last: TokenLogprobs
    before: "Rows | None"


class Beam(NamedTuple):
    """A continuation. ids: int32, prompt and output, including the token that ended it. cum_logprob: of the output.

    score: of a completed beam. rows: None if they are not kept.
    """

    ids: np.ndarray
    cum_logprob: float = 0.0
    score: float = 0.0
    ended: bool = False  # by an ending token
    rows: Rows | None = None

    def logprobs(self) -> list[TokenLogprobs]:
        """Rows of its output tokens, first to last."""
        found, rows = [], self.rows
        while rows is not None:
            found.append(rows.last)
            rows = rows.before
        return found[::-1]


class Beams:
    """The search for one prompt. Until `done`: get candidates for each beam in `running`, and `advance`. Then take `best`."""

    def __init__(
        self,
        prompt_ids: np.ndarray,
        *,
        width: int,
        max_tokens: int,
        end_ids: Collection[int],
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        num_logprobs: int | None = None,
    ) -> None:
        """end_ids: tokens that complete a beam. early_stopping: stop at `width` completed beams; otherwise when no running beam
        can score higher. num_logprobs: candidates to keep per token; None: keep none, nor its own log-probability."""
        self.running = [Beam(prompt_ids)]
        self.completed: list[Beam] = []  # the best so far, best first
        self._num_prompt_tokens = len(prompt_ids)
        self._width = width
        self._max_tokens = max_tokens
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_logprobs = num_logprobs
        self.length = 0  # output tokens of each running beam

    @property
    def done(self) -> bool:
        if not self.running or self.length == self._max_tokens:
            return True
        if len(self.completed) < self._width:
            return False
        return self._early_stopping or self._best_possible() <= self.completed[-1].score

    def best(self) -> list[Beam]:
        """At most `width`, best first."""
        running = [beam._replace(score=self._score(beam.cum_logprob, self.length)) for beam in self.running]
        return self._best([*self.completed, *running])

    def advance(self, candidates: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """candidates: for each running beam (ids [2 x width], log-probabilities), most likely first; -inf means impossible."""
        ids = np.stack([row[0] for row in candidates])
        logprobs = np.stack([row[1] for row in candidates])
        totals = logprobs.astype(np.float64) + np.array([[beam.cum_logprob] for beam in self.running])
        ends, possible = np.isin(ids, self._end_ids), np.isfinite(totals)

        def extended(i: int, at: int, ended: bool) -> Beam:
            beam, total = self.running[i], float(totals[i, at])
            score = self._score(total, self.length) if ended else 0.0  # the ending token does not count
            return Beam(np.append(beam.ids, ids[i, at]), total, score, ended, self._rows(beam, candidates[i], at))

        completed = [extended(i, at, True) for i, at in np.argwhere(ends & possible).tolist()]
        goes_on = np.where(~ends & possible, totals, -np.inf)
        # stable: ties go to the better beam, then to the likelier token
        order = np.argsort(-goes_on, axis=None, kind="stable")[: min(self._width, int(np.isfinite(goes_on).sum()))]
        places = zip(*(axis.tolist() for axis in np.unravel_index(order, goes_on.shape)), strict=True)
        self.running = [extended(i, at, False) for i, at in places]
        self.completed = self._best([*self.completed, *completed])
        self.length += 1

    def _rows(self, beam: Beam, candidates: tuple[np.ndarray, np.ndarray], at: int) -> Rows | None:
        if self._num_logprobs is None:
            return None
        ids, logprobs = (column[: self._num_logprobs] for column in candidates)
        return Rows(TokenLogprobs(float(candidates[1][at]), at + 1, ids.tobytes(), logprobs.tobytes()), beam.rows)

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / (self._num_prompt_tokens + num_tokens) ** self._length_penalty

    def _best_possible(self) -> float:
        """The highest score that a running beam can reach: log-probabilities only fall; the kindest length is first or last."""
        kindest = self._max_tokens if self._length_penalty > 0 else self.length
        return self._score(max(beam.cum_logprob for beam in self.running), kindest)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -beam.score)[: self._width]
