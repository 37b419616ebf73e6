"""PeakEstimate: estimates the peak of memory that sequences will need, so that admission keeps preemption rare.

Sequences end one after the other; between two ends all others grow. With sequences sorted by the tokens left to them, the need
at the i-th end is what the survivors hold by then, and the peak is the largest of these (the idea is LightLLM's past-future
scheduler, Gong et al. 2025). The final length of a sequence is known if it ignores the end-of-sequence id; otherwise it is
guessed from sequences that ended lately. A wrong guess costs a preemption, never correctness. Admission (admission.py) makes
one Projection of the running sequences a step, and adds those that it admits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

FIRST_GUESS = 256  # output tokens, before anything has ended
MARGIN = 1.3  # of the running mean
LEAST_LEFT = 64  # tokens that a sequence is expected to grow by at least, however long it is already


class PeakEstimate:
    def __init__(self) -> None:
        self.mean_output = float(FIRST_GUESS)  # running mean of the output tokens of sequences that ended

    def observe(self, num_output_tokens: int) -> None:
        """A sequence has ended with so many output tokens."""
        self.mean_output += 0.05 * (num_output_tokens - self.mean_output)

    def final_len(self, length: int, prompt_len: int, final_len: int, ends_by_length: bool) -> int:
        """The estimated number of a sequence's tokens at its end, if it has `length` now."""
        if ends_by_length:
            return final_len
        return min(final_len, max(prompt_len + int(MARGIN * self.mean_output), length + LEAST_LEFT))

    def final_lens(self, length: np.ndarray, prompt_len: np.ndarray, final_len: np.ndarray, known: np.ndarray) -> np.ndarray:
        """`final_len` of many: arrays [sequences], and so is the result. known: whether only length ends them."""
        guess = np.maximum(prompt_len + int(MARGIN * self.mean_output), length + LEAST_LEFT)
        return np.where(known, final_len, np.minimum(final_len, guess))


class Projection:
    """How many blocks some sequences will need at their peak. Adding one costs a sum while all fit to their ends, otherwise a
    few numpy calls: the sequences are sorted once, and later ones are inserted."""

    def __init__(self, used: np.ndarray, final: np.ndarray, blocks_of: Callable[[Any], Any], most: int):
        """used, final: tokens of each sequence now and at its end (int arrays [sequences]). blocks_of: blocks for tokens.

        most: how many sequences there may be, including those that are added."""
        self._blocks_of = blocks_of
        self._used, self._final, self._most = used, final, most
        self._num = len(used)
        self.num_held = int(np.sum(blocks_of(used)))
        self._num_at_end = int(np.sum(blocks_of(final)))
        self._added: list[tuple[int, int]] = []  # sequences added before `_rows` was needed
        self._rows: np.ndarray | None = None  # [3, most]: minus tokens left, blocks held, blocks a token; most left first

    @property
    def is_short(self) -> bool:
        """Whether at some point not all fitted to their ends, so that they were sorted."""
        return self._rows is not None

    def add_if_it_fits(self, used: int, final: int, total: int) -> bool:
        """Add a sequence of `used` tokens that grows to `final`, and return True, if all stay within `total` blocks."""
        held, at_end = int(self._blocks_of(used)), int(self._blocks_of(final))
        if self._num_at_end + at_end > total or self._rows is not None:
            rows = self._sorted()
            at = self._insert(rows, used, final)
            if self._num_at_end + at_end > total and self._peak(rows) > total:
                rows[:, at : self._num - 1] = rows[:, at + 1 : self._num]
                self._num -= 1
                return False
        else:
            self._added.append((used, final))
        self.num_held += held
        self._num_at_end += at_end
        return True

    def _peak(self, rows: np.ndarray) -> float:
        minus_left, held, per_token = rows[:, : self._num]
        # when the sequence with the i-th most tokens left ends, all before it have grown by as many tokens
        return float((np.cumsum(held) - minus_left * np.cumsum(per_token)).max())

    def _sorted(self) -> np.ndarray:
        if self._rows is None:
            left, held = np.maximum(self._final - self._used, 0), self._blocks_of(self._used)
            per_token = (self._blocks_of(self._final) - held) / np.maximum(left, 1)
            self._rows = np.zeros((3, self._most))
            self._rows[:, : self._num] = np.stack([-left, held, per_token])[:, np.argsort(-left, kind="stable")]
            for used, final in self._added:
                self._insert(self._rows, used, final)
        return self._rows

    def _insert(self, rows: np.ndarray, used: int, final: int) -> int:
        left, held = max(final - used, 0), int(self._blocks_of(used))
        at = int(np.searchsorted(rows[0, : self._num], -left, side="right"))
        rows[:, at + 1 : self._num + 1] = rows[:, at : self._num]
        rows[:, at] = -left, held, (int(self._blocks_of(final)) - held) / max(left, 1)
        self._num += 1
        return at
