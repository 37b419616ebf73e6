"""PeakEstimate: admission by look-ahead at the peak of memory, so that preemption stays rare.

Sequences end one after the other; between two ends everybody grows. With sequences sorted by what is left to them, the need at
the i-th end is what the survivors hold by then, and the peak is the largest of these (the idea is LightLLM's past-future
scheduler, Gong et al. 2025). How long a sequence will get is known when it ignores the end-of-sequence id; otherwise it
is guessed from those that ended lately. A wrong guess costs a preemption, never correctness.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

FIRST_GUESS = 256  # output tokens, before anything has ended
MARGIN = 1.3  # of the running mean


class PeakEstimate:
    def __init__(self) -> None:
        self._mean_output = float(FIRST_GUESS)

    def observe(self, num_output_tokens: int) -> None:
        """A sequence has ended with so many output tokens."""
        self._mean_output += 0.05 * (num_output_tokens - self._mean_output)

    def final_len(self, length: Any, prompt_len: Any, final_len: Any, ends_by_length: Any) -> Any:
        """Guess of sequences' tokens at their end, given that they have `length` now; scalars or arrays alike."""
        guess = np.maximum(prompt_len + int(MARGIN * self._mean_output), length + 64)
        return np.where(ends_by_length, final_len, np.minimum(final_len, guess))

    @staticmethod
    def fits(used: np.ndarray, final: np.ndarray, blocks_of: Callable[[np.ndarray], np.ndarray], total: int) -> bool:
        """Whether sequences of `used` tokens each, growing to `final`, stay within `total` blocks."""
        at_end = blocks_of(final)
        if at_end.sum() <= total:
            return True
        left = np.maximum(final - used, 0)
        order = np.argsort(-left)
        left, held = left[order], blocks_of(used)[order]
        per_token = (at_end[order] - held) / np.maximum(left, 1)
        # when the i-th longest ends, all that are at least as long have grown by what was left to it
        need = np.cumsum(held) + left * np.cumsum(per_token)
        return float(need.max()) <= total
