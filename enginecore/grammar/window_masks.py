"""WindowMaker: the masks of rows with windows, one for each place, in a thread of mask_threads.py.

The thread waits for the drafts, which the workers write as soon as they begin the step. llguidance then makes the masks of a
row's places in one call, in which a copy of its matcher takes the drafts: the matcher itself knows nothing of them, and an
error that they cause is not its own. Behind a draft that the grammar forbids no masks are made, and none are needed. Zeros are
left there, and a mask of zeros ends the window (places.py).
"""

import threading
import time
from collections.abc import Callable

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from quire.enginecore.grammar.matchers import NOTHING_LEFT, Bits, restrict, stop_bits
from quire.enginecore.grammar.places import Kind, Place, places_of
from quire.enginecore.grammar.vocabulary import Vocabulary
from quire.enginecore.grammar.work import Window, Work, complete, look_at
from quire.enginecore.scheduling.sequence import SequenceState

SHORT_SLEEP_S, LONG_SLEEP_S = 2e-5, 1e-3  # between two looks at the drafts: the short one SHORT_LOOKS times
SHORT_LOOKS = 50
_FINISHED = SequenceState.FINISHED


class WindowMaker:
    def __init__(
        self,
        executor: llguidance.LLExecutor,
        vocabulary: Vocabulary,
        trim: Callable[[np.ndarray], None],
        closing: threading.Event,
    ) -> None:
        """trim: leaves only tokens in masks, int32 [n, words]. closing: is set when the thread is to end."""
        self._executor, self._vocabulary, self._trim, self._closing = executor, vocabulary, trim, closing
        self._end_column, self._end_bit = divmod(vocabulary.end_id, 32)

    def await_drafts(self, work: Work) -> bool:
        """Wait for the drafts of this work's step; whether its masks are wanted then."""
        window, looks = _window(work), 0
        while not window.drafts.have_come():
            if window.drafts.is_given_up or self._closing.is_set():
                return False
            time.sleep(SHORT_SLEEP_S if looks < SHORT_LOOKS else LONG_SLEEP_S)
            looks += 1
        return work.seq.state is not _FINISHED and not window.tokens.has_ended

    def make(self, works: list[Work], memory: Callable[[int, int], np.ndarray]) -> tuple[list[Work], list[int], np.ndarray]:
        """(work of each mask, its place in the row's window, masks int32 [n, words]).

        A row of which all places may be any token has no mask; a work may have failed."""
        plans = [self._plan(work) for work in works]
        masked = [work for work, (places, _) in zip(works, plans, strict=True) for _ in places]
        numbers = [place.number for places, _ in plans for place in places]
        masks = memory(len(masked), self._vocabulary.num_words)
        masks[...] = 0
        begins = np.cumsum([0, *(len(places) for places, _ in plans)]).tolist()
        self._fill(works, plans, begins, masks)
        may_end = (masks[:, self._end_column] >> self._end_bit & 1).astype(bool)
        self._trim(masks)
        for work, (places, _), begin in zip(works, plans, begins, strict=False):
            for row, place in enumerate(places, begin):
                if place.kind is Kind.FORCED or may_end[row] or _is_bound(work, place):
                    self._complete(work, place, masks[row : row + 1], bool(may_end[row]))
        return masked, numbers, masks

    def _plan(self, work: Work) -> tuple[list[Place], list[int]]:
        window = _window(work)
        drafts = window.drafts.of_row(work.row)
        return places_of(window.reasoning, drafts, work.constraint.eos_token_ids, self._vocabulary.end_id)

    def _fill(
        self, works: list[Work], plans: list[tuple[list[Place], list[int]]], begins: list[int], masks: np.ndarray
    ) -> None:
        alone, with_drafts = [], []
        by_lexer = sorted(zip(works, plans, begins, strict=False), key=lambda row: row[0].constraint.lexer)
        for work, (places, taken), begin in by_lexer:  # copies of one matcher share it, and wait for one another
            first = next((i for i, place in enumerate(places, begin) if place.kind is Kind.GRAMMAR), None)
            matcher = work.constraint.matcher
            if first is None or matcher is None:
                continue
            if taken:
                with_drafts.append((matcher.deep_copy(), first, taken))
            else:
                alone.append((matcher, first))
        if with_drafts:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, with_drafts, masks)
        if alone:
            fill_next_token_bitmask_par(self._executor, alone, masks)

    def _complete(self, work: Work, place: Place, mask: np.ndarray, may_end: bool) -> None:
        """Apply what else is allowed and forbidden at a place; mask: int32 [1, words]."""
        words, window = mask[0].view(np.uint32), _window(work)
        banned = window.bans.behind(window.drafts.of_row(work.row)[: place.number]) if window.bans is not None else []
        only_ends = may_end and not mask.any()
        if only_ends and place.number:
            return  # the grammar has ended here, or has failed, or may only end: the row's next step will see which
        if only_ends:
            self._look_at(work, mask)
        if work.has_ended:
            return
        if place.kind is Kind.FORCED:
            token: Bits = stop_bits([place.token or 0])
            words[token.words] = token.bits
            is_left = restrict(words, work.constraint.allowed, banned)
        else:
            is_left = complete(work.constraint, words, may_end, place.token, banned)
        if not is_left and not place.number:
            work.fail(NOTHING_LEFT)

    def _look_at(self, work: Work, mask: np.ndarray) -> None:
        """Whether the matcher itself, which has taken no drafts, has failed."""
        matcher = work.constraint.matcher
        if matcher is not None:
            fill_next_token_bitmask_par(self._executor, [(matcher, 0)], mask)
            self._trim(mask)
        look_at(work)


def _window(work: Work) -> Window:
    assert work.window is not None
    return work.window


def _is_bound(work: Work, place: Place) -> bool:
    bound = work.constraint.allowed is not None or _window(work).bans is not None or place.token is not None
    return bound and place.kind is Kind.GRAMMAR
