"""WindowCounters: how many drafts were verified, and how many accepted. The scheduler counts each step with windows as it takes
the step's result; a heartbeat carries the totals (stats.py).
"""

import numpy as np

from quire.ipc.messages.stats import SpeculationStats
from quire.ipc.speculative_config import MAX_SPECULATIVE_TOKENS


class WindowCounters:
    """num_places: the most drafts of a row, as the configuration says; 0 without speculation."""

    def __init__(self, num_places: int = 0) -> None:
        self._num_places = num_places
        self._drafted = np.zeros(MAX_SPECULATIVE_TOKENS + 1, np.int64)  # [n]: rows with n drafts
        self._accepted = np.zeros_like(self._drafted)  # [n]: rows with the first n drafts accepted, and no more

    def observe(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Count one step. drafted: int [rows], drafts of each row that were verified, 0 to 15; accepted: int [rows], how many
        of them were accepted. Rows without drafts may be among them."""
        self._drafted += np.bincount(drafted, minlength=len(self._drafted))
        self._accepted += np.bincount(accepted, minlength=len(self._accepted))

    def so_far(self) -> SpeculationStats | None:
        """None without speculation."""
        if not self._num_places:
            return None
        numbers = np.arange(len(self._drafted))
        at_least = self._accepted[::-1].cumsum()[::-1]  # [n]: rows with n accepted drafts or more
        return SpeculationStats(
            num_drafts=int(self._drafted[1:].sum()),
            draft_tokens=int(self._drafted @ numbers),
            accepted_by_place=at_least[1 : self._num_places + 1].tolist(),
        )
