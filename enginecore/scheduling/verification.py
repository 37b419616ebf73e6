"""Verification: how many drafts a step has, and how deep they are made, so that most tokens a second are expected. No I/O.

    expected tokens     one a row, and the drafts that will be accepted (acceptance.py). The device gives a step's drafts to
                        the rows where they are accepted most likely, and so it is counted here
    expected seconds    of a step of as many tokens, and of a model that drafts so deep (step_times.py): so weights,
                        context, experts and drafters price themselves
    the choice          among as many drafts as make a step of each size, or as all rows have at each depth

A model makes the drafts of a step behind the step before. Where nothing is known of its times yet, some steps verify none:
behind no drafts, behind one of each row, and behind several. Where no number of drafts pays, only one step in TRY_EVERY
verifies some: one of each of TRY_ROWS rows. Where some number pays, one step in TRY_EVERY has none, or the next larger or
smaller number, since times change with the context. Owned by Windows.
"""

from typing import NamedTuple

import numpy as np

from quire.enginecore.scheduling.acceptance import Acceptance
from quire.enginecore.scheduling.sequence import Slots
from quire.enginecore.scheduling.step_times import SIZES, StepTimes, index_of

TRY_EVERY = 64  # steps
TRY_ROWS = 8
CHOOSE_EVERY = 4  # steps: a choice takes 200 us
FIRST_STEPS, FIRST_DEPTH = 40, 7  # at most, to learn the times of a model that drafts
FIRST_DRAFTS = 32  # until so many were verified, some are
LEAST_GAIN = 0.02  # of tokens a second, for drafts to be verified where none were
LEAST_GAIN_READ = 0.05  # the same, if a model must first read, for many steps, what it has not while it rested
MEMORY_ROWS, MEMORY_OF_TRIES = 128, 32  # what is learnt is of as many rows; few are tried, so they count for more
CHANGE_GAIN = 0.005  # for another number of them
NEAR = 0.002  # a smaller number that is so near to the best one is as good


class Drafts(NamedTuple):
    """How many drafts a step verifies."""

    tokens: int = 0  # of all rows
    depth: int = 0  # at most, of one row


class Verification:
    """made_ahead: for how many steps before a try a model must make drafts; 0: drafts take no time."""

    def __init__(self, times: StepTimes, slots: Slots, made_ahead: int = 0) -> None:
        self._times, self._made_ahead = times, made_ahead
        self._acceptance = Acceptance(slots, made_ahead > 0)
        self._steps = self._first_steps = 0
        self._chosen_for = (0, 0, 0)  # rows, most drafts of a row, and of all
        self._chosen = Drafts()
        self.tries = False  # the step that was last asked for has drafts of TRY_ROWS rows only
        self.depth_behind = 0  # of the drafts that a model makes behind that step

    def drafts(self, rows: np.ndarray, most: int, room: int) -> Drafts:
        """The drafts of the next step, which has these slots' decode rows. most: of one row. room: of all."""
        self._steps += 1
        self.tries, self.depth_behind = False, 0
        room = min(room, len(rows) * most)
        if room <= 0:
            return Drafts()
        if (depth := self._unknown(len(rows), most)) is not None:
            self.depth_behind = depth
            return Drafts()
        about = len(rows), most, room
        if self._chosen_for != about or self._steps % CHOOSE_EVERY == 0:
            self._chosen_for, self._chosen = about, self._choose(rows, most, room)
        self.depth_behind = self._behind(about)
        return self._drafts(about)

    def _drafts(self, about: tuple[int, int, int]) -> Drafts:
        turn, is_other = divmod(self._steps, TRY_EVERY)
        if is_other:
            return self._chosen
        if not self.pays:
            self.tries = True
            return Drafts(min(about[0], TRY_ROWS), 1)
        return (Drafts(), self._other(about, 1), self._other(about, -1))[turn % 3]

    def _behind(self, about: tuple[int, int, int]) -> int:
        """How deep a model drafts behind the step that is asked for: not at all behind one that tries no drafts, so that steps
        without drafts before them are met, too."""
        before = -self._steps % TRY_EVERY  # steps before the next try
        if not self.pays:
            return int(0 < before <= self._made_ahead)
        if not before and self._steps // TRY_EVERY % 3 == 0:
            return 0
        return max(self._chosen.depth, self._other(about, 1).depth) if before == 1 else self._chosen.depth

    @property
    def pays(self) -> bool:
        """Whether steps have drafts that are no tries."""
        return self._chosen.tokens > 0

    def _unknown(self, num_rows: int, most: int) -> int | None:
        """How deep a model must draft behind the next step, so that its times become known; None: they are, or will not be."""
        if not self._made_ahead or self._first_steps >= FIRST_STEPS:
            return None
        depths = 1, min(most, FIRST_DEPTH)
        known = [self._times.knows_step(num_rows), *(self._times.knows_drafts(depth) for depth in depths)]
        if all(known):
            return None
        self._first_steps += 1
        return (0, *depths)[known.index(False)]

    def observe(self, slots: np.ndarray, windows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray, most: int) -> None:
        """A step with drafts has returned: see `Acceptance.observe`."""
        self._acceptance.observe(slots, windows, drafted, accepted, most, MEMORY_ROWS if self.pays else MEMORY_OF_TRIES)

    # ------------------------------------------------------------------------------------------------------ the choice
    def _other(self, about: tuple[int, int, int], change: int) -> Drafts:
        """The next larger or smaller number of drafts; a larger one may be deeper, too."""
        num_rows, most, room = about
        numbers = self._numbers(num_rows, room)
        at = int(np.searchsorted(numbers, self._chosen.tokens)) + change
        depths = depths_up_to(most)
        deeper = depths.index(self._chosen.depth) + max(change, 0)
        return Drafts(numbers[min(max(at, 0), len(numbers) - 1)], depths[min(deeper, len(depths) - 1)])

    def _numbers(self, num_rows: int, room: int) -> list[int]:
        """Numbers of drafts that make a step of each size."""
        sizes = SIZES[index_of(num_rows) : index_of(num_rows + room) + 1]
        return [min(size - num_rows, room) for size in sizes if size > num_rows]

    def _choose(self, rows: np.ndarray, most: int, room: int) -> Drafts:
        num_rows, depths = len(rows), depths_up_to(most)
        all_of_them = (min(num_rows * depth, room) for depth in depths)
        numbers = np.unique([*self._numbers(num_rows, room), *all_of_them])
        offered, right = self._acceptance.worth(rows, most)
        tokens = num_rows + np.stack([np.interp(numbers, offered[depth - 1], right[depth - 1]) for depth in depths])
        seconds = np.array([self._times.seconds(num_rows + int(number), True) for number in numbers])
        making = np.array(self._times.of_depths(depths, num_rows))
        rates = tokens / (seconds + making[:, None])
        best = rates.max()
        least = 0.0 if self.pays else LEAST_GAIN_READ if self._made_ahead > 1 else LEAST_GAIN
        if best < (1 + least) * num_rows / self._times.seconds(num_rows, False):
            return Drafts(min(num_rows, room), 1) if self._acceptance.num_reached < FIRST_DRAFTS else Drafts()
        number = int(np.searchsorted(numbers, self._chosen.tokens))
        is_there = number < len(numbers) and numbers[number] == self._chosen.tokens and self._chosen.depth in depths
        if is_there and rates[depths.index(self._chosen.depth), number] > (1 - CHANGE_GAIN) * best:
            return self._chosen
        depth, number = divmod(int((rates >= (1 - NEAR) * best).argmax()), len(numbers))
        return Drafts(int(numbers[number]), depths[depth])


def depths_up_to(most: int) -> list[int]:
    """Numbers of drafts of a row to choose among: few, since a model's passes of each are captured by themselves."""
    return sorted({most, *(size - 1 for size in SIZES if 1 < size <= most)})
