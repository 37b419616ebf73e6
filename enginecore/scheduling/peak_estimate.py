"""PeakEstimate: admission by look-ahead at the peak of memory, so that preemption stays rare.

Sequences end one after the other; between two ends everybody grows. With sequences sorted by what is left to them, the need at
the i-th end is what the survivors hold by then, and the peak is the largest of these (the idea is LightLLM's past-future
scheduler, Gong et al. 2025). How long a sequence will get is known when it ignores the end-of-sequence id; otherwise it
is guessed from those that ended lately. A wrong guess costs a preemption, never correctness. Admission (admission.py) makes
one Projection a step of what runs, and adds to it whom it admits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

FIRST_GUESS = 256  # output tokens, before anything has ended
MARGIN = 1.3  # of the running mean
LEAST_LEFT = 64  # tokens that are guessed to come, however long a sequence is already


class PeakEstimate:
    def __init__(self) -> None:
        self._mean_output = float(FIRST_GUESS)

    def observe(self, num_output_tokens: int) -> None:
        """A sequence has ended with so many output tokens."""
        self._mean_output += 0.05 * (num_output_tokens - self._mean_output)

    def final_len(self, length: int, prompt_len: int, final_len: int, ends_by_length: bool) -> int:
        """Guess of a sequence's tokens at its end, given that it has `length` now."""
        if ends_by_length:
            return final_len
        return min(final_len, max(prompt_len + int(MARGIN * self._mean_output), length + LEAST_LEFT))

    def final_lens(self, length: np.ndarray, prompt_len: np.ndarray, final_len: np.ndarray, known: np.ndarray) -> np.ndarray:
        """`final_len` of many: arrays [sequences], and so is the result. known: whether length ends them."""
        guess = np.maximum(prompt_len + int(MARGIN * self._mean_output), length + LEAST_LEFT)
        return np.where(known, final_len, np.minimum(final_len, guess))


class Projection:
    """How many blocks some sequences will need at their peak. One more costs a sum where all fit to their ends, otherwise a
    few numpy calls: the sequences are sorted once, and the next ones inserted."""

    def __init__(self, used: np.ndarray, final: np.ndarray, blocks_of: Callable[[Any], Any], most: int):
        """Sequences of `used` tokens each that grow to `final` (int arrays [sequences]). blocks_of: tokens to blocks.

        most: how many sequences there may be, with those that are added."""
        self._blocks_of = blocks_of
        self._used, self._final, self._most = used, final, most
        self._num = len(used)
        self.num_held = int(np.sum(blocks_of(used)))
        self._num_at_end = int(np.sum(blocks_of(final)))
        self._added: list[tuple[int, int]] = []  # before the first that needed `_rows`
        self._rows: np.ndarray | None = None  # [3, most]: minus what is left, blocks held, blocks a token; longest left first

    @property
    def is_short(self) -> bool:
        """Whether once they did not all fit to their ends, and had to be sorted."""
        return self._rows is not None

    def add_if_it_fits(self, used: int, final: int, total: int) -> bool:
        """Whether they and one more of `used` tokens that grows to `final` stay within `total` blocks; then it is added."""
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
        # when the i-th longest ends, all that are at least as long have grown by what was left to it
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
