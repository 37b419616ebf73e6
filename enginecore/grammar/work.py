"""Work: a task for a thread that makes masks, and its result; and what masks allow beside the grammar's own tokens. No I/O."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from quire.enginecore.grammar.bans import Bans
from quire.enginecore.grammar.matchers import NOTHING_LEFT, Constraint, Failure, Reasoning, restrict
from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.step.drafts import StepDrafts


@dataclass(slots=True)
class Window:
    """The facts on which the masks of a row with a window depend."""

    drafts: StepDrafts
    tokens: "Work"  # the task that gives the matcher the tokens before the drafts, in the same thread
    reasoning: Reasoning | None  # a copy
    bans: Bans | None


@dataclass(slots=True)
class Work:
    """A task for one sequence: tokens to give to its matcher, and the row of a step, if any, that waits for the next mask."""

    seq: Sequence
    constraint: Constraint
    tokens: list[int]
    step: int = 0
    row: int = -1  # -1: no row waits
    banned: list[int] | tuple[int, ...] = ()
    opening: int | None = None  # a token to allow beside those of the grammar: reasoning may begin with it
    has_ended: bool = False  # result: no token may follow
    failure: Failure | None = None  # result: why it has ended, if not because the grammar is complete
    window: Window | None = None  # masks are wanted for each place of the row's window; then there are no tokens

    @property
    def is_bound(self) -> bool:
        """Whether more than its grammar determines its mask."""
        return bool(self.banned) or self.opening is not None or self.constraint.allowed is not None

    @property
    def is_quick(self) -> bool:
        """Whether it takes no longer than llguidance does: it is in the fast lane, and does not wait for drafts."""
        return not self.constraint.queue and self.window is None

    def fail(self, failure: Failure) -> None:
        self.has_ended, self.failure = True, self.failure or failure


@dataclass(slots=True)
class Done:
    """Results of all of `works`: those that have ended, and masks, int32 [n, words], of n others."""

    works: list[Work]
    ended: list[Work]  # grammar complete, or failed
    masked: list[Work]
    masks: np.ndarray
    slow: list[Work]  # those of `works` that count as slow now
    places: list[int] = field(default_factory=list)  # in its row's window of each mask; empty if all are the first

    def first_masks(self) -> list[tuple[Work, np.ndarray | None]]:
        """Works that have not ended, each with the mask of its row's first place; None: any token."""
        places = self.places or [0] * len(self.masked)
        firsts = [(w, mask) for w, mask, place in zip(self.masked, self.masks, places, strict=True) if not place]
        found = {id(work) for work, _ in firsts}
        return [*firsts, *((w, None) for w in self.works if w.window is not None and not w.has_ended and id(w) not in found)]

    def without_masks(self) -> list[Work]:
        """Works with windows of which every place may be any token, or of which it does not matter any more."""
        if all(work.window is None for work in self.works):
            return []
        masked = {id(work) for work in self.masked}
        return [w for w in self.works if w.window is not None and not w.has_ended and id(w) not in masked]


def look_at(work: Work) -> None:
    """Note whether its matcher has ended or failed. Without any token it has not ended: an end token must come first."""
    matcher = work.constraint.matcher
    if matcher is None or work.has_ended:
        return
    if matcher.is_error():
        reason = matcher.get_error().replace("<non-verbose/>", "").strip()
        work.fail(Failure("invalid", f"the output cannot go on by its grammar: {reason}"))
    elif work.tokens and matcher.is_stopped():
        work.has_ended = True


def complete_mask(work: Work, mask: np.ndarray, may_end: bool) -> None:
    """Allow the model's end tokens in a mask where the grammar may end, and remove what the request forbids."""
    if not complete(work.constraint, mask, may_end, work.opening, work.banned):
        work.fail(NOTHING_LEFT)


def complete(c: Constraint, mask: np.ndarray, may_end: bool, opening: int | None, banned: SequenceOf[int]) -> bool:
    """The same for a mask, uint32 [words], of any place; returns whether any token is left."""
    if opening is not None:
        mask[opening >> 5] |= np.uint32(1 << (opening & 31))
    if may_end:
        mask[c.stops.words] |= c.stops.bits
        if not len(c.stops.words) and not mask.any():
            mask[c.last_resort.words] |= c.last_resort.bits
    return restrict(mask, c.allowed, banned)
