"""Constraint: what bounds the next token of one sequence: its grammar's matcher, its thinking before that, and how it may end.

It belongs to the sequence, from preparation to its end, in whatever slot that runs, so that preemption does not touch it. The
core's loop notes the tokens that were taken; a thread of mask_threads.py rolls the matcher forward and makes masks of it.
Thinking, until its last token, is counted by the loop alone: no grammar looks at it.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import llguidance
import numpy as np

from quire.ipc.messages.frontend import ErrorCode
from quire.ipc.step.sections import INT32_MAX

MAX_BEFORE_THINKING = 4  # tokens: white space


class Bits(NamedTuple):
    """Token ids as bits of a mask."""

    words: np.ndarray  # int64 [n], distinct
    bits: np.ndarray  # uint32 [n]


def stop_bits(ids: SequenceOf[int]) -> Bits:
    by_word: dict[int, int] = {}
    for i in ids:
        by_word[i >> 5] = by_word.get(i >> 5, 0) | 1 << (i & 31)
    return Bits(np.asarray(list(by_word), np.int64), np.asarray(list(by_word.values()), np.uint32))


class Thinking:
    """What a reasoning model writes before `ends`, a list of token ids; budget: after so many tokens these are forced.

    starts: ids without which at its beginning, or behind as many tokens as max_before, an output has no thought; none: it has
    begun with the prompt.
    """

    __slots__ = ("_before", "_matched", "_max_before", "budget", "ended", "ends", "has_begun", "num_tokens", "starts")

    def __init__(self, ends: list[int], budget: int | None, starts: SequenceOf[int] = (), max_before: int = 0) -> None:
        self.ends = ends
        self.starts = list(starts)
        self.budget = budget
        self.num_tokens = 0
        self.has_begun = not starts
        self.ended = False
        self._max_before = max_before
        self._before: list[int] = []
        self._matched = 0  # so many of `ends` are the last tokens

    @property
    def is_missing(self) -> bool:
        """Whether the output has begun otherwise."""
        return not self.has_begun and len(self._before) >= len(self.starts) + self._max_before

    @property
    def opening(self) -> int | None:
        """The token that a thought would begin with now, where the next token decides whether there is one."""
        return self.starts[0] if not self.has_begun and not self._max_before else None

    def push(self, token: int) -> None:
        if not self.has_begun:
            self._before.append(token)
            self.has_begun = self._before[-len(self.starts) :] == self.starts
            return
        self.num_tokens += 1
        while self._matched and self.ends[self._matched] != token:
            self._matched = self._shorter(self._matched)
        self._matched += self.ends[self._matched] == token
        self.ended = self._matched == len(self.ends)

    def _shorter(self, matched: int) -> int:
        """The longest beginning of `ends` that ends its first `matched` tokens, and is shorter."""
        return next(n for n in range(matched - 1, -1, -1) if self.ends[:n] == self.ends[matched - n : matched])

    @property
    def forced(self) -> int | None:
        """What the next token must be, if the budget is spent."""
        is_spent = self.budget is not None and self.num_tokens >= self.budget
        return self.ends[self._matched] if is_spent and self.has_begun and not self.ended else None

    def ends_in(self, tokens: list[int]) -> bool:
        """Whether these tokens hold the end."""
        n = len(self.ends)
        return any(tokens[i : i + n] == self.ends for i in range(len(tokens) - n + 1))


class Constraint:
    """stops: ids that may end the output where the grammar may end. last_resort: the same where nothing else is left.

    lexer: a number that those share whose matchers share a lexer.
    """

    __slots__ = (
        "__weakref__", "allowed", "eos_token_ids", "last_resort", "lexer", "mask", "matcher", "num_works", "queue", "slow_for",
        "stops", "thinking", "unconsumed",
    )  # fmt: skip

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        lexer: int,
        thinking: Thinking | None,
        stops: Bits,
        last_resort: Bits,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.matcher = matcher
        self.lexer = lexer
        self.thinking = thinking
        self.stops = stops
        self.last_resort = last_resort
        self.eos_token_ids = eos_token_ids
        self.unconsumed: list[int] = []  # tokens that the matcher was not given yet
        self.mask: np.ndarray | None = None  # int32 [words], for the next token, if it was made ahead
        self.slow_for = 0  # so many masks, unless one of them is slow, too; this and the next two belong to MaskThreads
        self.num_works = 0
        self.queue = 0
        self.allowed: np.ndarray | None = None  # uint32 [words], of the request's allowed_token_ids, once they were looked at

    @property
    def is_slow(self) -> bool:
        """Whether a mask of it took long, or was made together with one that did."""
        return self.slow_for > 0

    def mask_from(self, num_prompt_tokens: int) -> int:
        """The length from which its rows need masks: a grammar's from the start, for thinking may end with any token."""
        if self.matcher is not None:
            return 0
        if self.thinking is None or self.thinking.budget is None:
            return INT32_MAX
        return min(num_prompt_tokens + self.thinking.budget, INT32_MAX)

    def take(self, token: int) -> bool:
        """A token of the sequence was taken; returns whether its matcher has to hear of it."""
        if self.thinking is not None:
            self.thinking.push(token)
            is_missing = self.thinking.is_missing  # and what was to be its first token is the grammar's
            if self.thinking.ended or is_missing:
                self.thinking = None
            if not is_missing:
                return False
        if self.matcher is not None:
            self.unconsumed.append(token)
        return self.matcher is not None


class Failure(NamedTuple):
    """Why a sequence cannot go on. message: without the field that its grammar came from."""

    code: ErrorCode
    message: str


NOTHING_LEFT = Failure("invalid", "nothing that the output may go on with is left")  # by the request's other parameters


def restrict(mask: np.ndarray, allowed: np.ndarray | None, banned: SequenceOf[int]) -> bool:
    """Take out of a mask, uint32 [words], what the request's other parameters forbid; returns whether anything is left."""
    if allowed is not None:
        mask &= allowed
    for i in banned:
        mask[i >> 5] &= ~np.uint32(1 << (i & 31))
    return bool(mask.any())
