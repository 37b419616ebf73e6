"""Constraint: what restricts the next token of one sequence: a grammar's matcher, the reasoning before it, and how it may end.

It belongs to its sequence from preparation to the end, whatever slot the sequence runs in, so preemption does not touch it. The
core's loop records the tokens that were sampled; a thread of mask_threads.py advances the matcher and makes masks from it.
Reasoning, up to its last token, is only counted by the loop: the grammar never sees it.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import llguidance
import numpy as np

from quire.ipc.messages.frontend import ErrorCode
from quire.ipc.step.sections import INT32_MAX, MAX_WINDOW

MAX_BEFORE_REASONING = 4  # tokens, such as white space


class Bits(NamedTuple):
    """Token ids as bits of a mask."""

    words: np.ndarray  # int64 [n], distinct
    bits: np.ndarray  # uint32 [n]


def stop_bits(ids: SequenceOf[int]) -> Bits:
    by_word: dict[int, int] = {}
    for i in ids:
        by_word[i >> 5] = by_word.get(i >> 5, 0) | 1 << (i & 31)
    return Bits(np.asarray(list(by_word), np.int64), np.asarray(list(by_word.values()), np.uint32))


class Reasoning:
    """A model's reasoning before its answer. It ends with the token ids `ends`, which are forced after `budget` tokens.

    starts: ids that it begins with, after max_before other tokens at most; an output that begins otherwise has no reasoning.
    Without `starts` the prompt has begun it.
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
        self._matched = 0  # how many ids of `ends` the last tokens match

    @property
    def is_missing(self) -> bool:
        """Whether the output has begun without reasoning."""
        return not self.has_begun and len(self._before) >= len(self.starts) + self._max_before

    @property
    def opening(self) -> int | None:
        """The token that would begin the reasoning now, if the next token decides whether there is any."""
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

    def copy(self) -> "Reasoning":
        other = Reasoning(self.ends, self.budget, self.starts, self._max_before)
        other.num_tokens, other.has_begun, other.ended = self.num_tokens, self.has_begun, self.ended
        other._before, other._matched = list(self._before), self._matched
        return other

    def _shorter(self, matched: int) -> int:
        """Length of the longest prefix of `ends` that is a proper suffix of its first `matched` ids."""
        return next(n for n in range(matched - 1, -1, -1) if self.ends[:n] == self.ends[matched - n : matched])

    @property
    def forced(self) -> int | None:
        """The token that must come next, if the budget is spent."""
        is_spent = self.budget is not None and self.num_tokens >= self.budget
        return self.ends[self._matched] if is_spent and self.has_begun and not self.ended else None

    def ends_in(self, tokens: list[int]) -> bool:
        """Whether `ends` occurs in these tokens."""
        n = len(self.ends)
        return any(tokens[i : i + n] == self.ends for i in range(len(tokens) - n + 1))


class Constraint:
    """stops: ids that may end the output where the grammar may end. last_resort: ids that may end it if nothing else is left.

    lexer: a number, equal for matchers that share a lexer.
    """

    __slots__ = (
        "__weakref__", "allowed", "eos_token_ids", "last_resort", "lexer", "mask", "matcher", "num_works", "queue", "reasoning",
        "slow_for", "stops", "unconsumed",
    )  # fmt: skip

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        lexer: int,
        reasoning: Reasoning | None,
        stops: Bits,
        last_resort: Bits,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.matcher = matcher
        self.lexer = lexer
        self.reasoning = reasoning
        self.stops = stops
        self.last_resort = last_resort
        self.eos_token_ids = eos_token_ids
        self.unconsumed: list[int] = []  # tokens that the matcher was not given yet
        self.mask: np.ndarray | None = None  # int32 [words], for the next token, if it was made before its row was scheduled
        self.slow_for = 0  # it counts as slow for so many more masks; this and the next two belong to MaskThreads
        self.num_works = 0
        self.queue = 0
        self.allowed: np.ndarray | None = None  # uint32 [words], of the request's allowed_token_ids, made when first needed

    @property
    def is_slow(self) -> bool:
        """Whether one of its last masks took long, or was made in one call with one that did."""
        return self.slow_for > 0

    @property
    def max_window(self) -> int:
        """Most tokens of its next row with a mask: one if only the reasoning is bounded, or if its mask is made already."""
        return 1 if self.matcher is None or self.mask is not None else MAX_WINDOW

    @property
    def is_over(self) -> bool:
        """Whether it restricts nothing any more: there is no grammar, and the reasoning has ended."""
        return self.matcher is None and self.reasoning is None

    def mask_from(self, num_prompt_tokens: int) -> int:
        """The length from which its rows need masks: 0 with a grammar, because reasoning may end with any token."""
        if self.matcher is not None:
            return 0
        if self.reasoning is None or self.reasoning.budget is None:
            return INT32_MAX
        return min(num_prompt_tokens + self.reasoning.budget, INT32_MAX)

    def take(self, token: int) -> bool:
        """Record a token that the sequence was given; returns whether its matcher needs it."""
        self.reasoning, is_grammars = follow(self.reasoning, token)
        if self.matcher is None or not is_grammars:
            return False
        self.unconsumed.append(token)
        return True

    def take_all(self, tokens: list[int]) -> bool:
        """The same of several tokens."""
        needs = [self.take(token) for token in tokens]
        return any(needs)


def follow(reasoning: Reasoning | None, token: int) -> tuple[Reasoning | None, bool]:
    """The reasoning, which is changed, after a token; None if it is over. And whether the token is the grammar's."""
    if reasoning is None:
        return None, True
    reasoning.push(token)
    is_missing = reasoning.is_missing  # then this first token of the output is the grammar's
    return None if reasoning.ended or is_missing else reasoning, is_missing


class Failure(NamedTuple):
    """Why a sequence cannot go on. message: does not name the field that its grammar came from."""

    code: ErrorCode
    message: str


NOTHING_LEFT = Failure("invalid", "nothing that the output may go on with is left")  # by the request's other parameters


def restrict(mask: np.ndarray, allowed: np.ndarray | None, banned: SequenceOf[int]) -> bool:
    """Remove from a mask, uint32 [words], what the request's other parameters forbid; returns whether any token is left."""
    if allowed is not None:
        mask &= allowed
    for i in banned:
        mask[i >> 5] &= ~np.uint32(1 << (i & 31))
    return bool(mask.any())
