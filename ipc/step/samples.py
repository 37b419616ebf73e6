"""Samples: the tokens of a step's results that count, with the row and the place that each came from.

A step without windows has one sample a row. With windows a row has as many as the device accepted, in the order of their
positions. Made by the result ring, read by the scheduler and the others that take a step's results.
"""

from typing import NamedTuple

import numpy as np

from quire.ipc.step.sections import REJECTED, UNUSED


class Samples(NamedTuple):
    """n samples, in row order; those of one row lie together."""

    tokens: np.ndarray  # int32 [n]
    rows: np.ndarray  # int32 [n]: the row of each
    places: np.ndarray  # int32 [n]: index among the step's result words, where its log-probabilities are
    drafted: np.ndarray  # int32 [rows]: drafts of each row that were verified

    @classmethod
    def one_a_row(cls, tokens: np.ndarray) -> "Samples":
        """A step without windows: tokens int32 [rows]."""
        rows = np.arange(len(tokens), dtype=np.int32)
        return cls(tokens, rows, rows, np.zeros_like(rows))

    @classmethod
    def of_windows(cls, words: np.ndarray, first_sample: np.ndarray) -> "Samples":
        """words: int32 [samples], REJECTED where a place was not reached; first_sample: int32 [rows]."""
        places = (words > REJECTED).nonzero()[0].astype(np.int32)
        rows = np.searchsorted(first_sample, places, "right").astype(np.int32) - 1
        drafted = np.diff(first_sample, append=np.int32((words != UNUSED).sum())) - 1
        return cls(words[places], rows, places, drafted)

    def only(self, at: np.ndarray) -> "Samples":
        """The samples of these indices, int [n]."""
        return Samples(self.tokens[at], self.rows[at], self.places[at], self.drafted)

    def of_rows(self, rows: np.ndarray) -> list[list[int]]:
        """The tokens of each of these rows, int [n]."""
        tokens, begins, ends = self.tokens.tolist(), np.searchsorted(self.rows, rows), np.searchsorted(self.rows, rows, "right")
        return [tokens[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
