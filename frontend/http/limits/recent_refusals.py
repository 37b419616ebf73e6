"""RecentRefusals: which keys' requests the engine has just refused, so that the next ones are refused without asking it.

Under a load of many times what an engine can take, most of a frontend's work would be requests that are refused: rendered,
tokenized, sent and answered. For HOLD_S after a refusal a key gets the same answer at once. That is too short for the queue to
run dry. app.py notes refusals, api/terms.py asks before a prompt is made.
"""

import time
from collections.abc import Callable

from quire.frontend.http.protocol.errors import ApiError

HOLD_S = 0.1
MOST_KEYS = 4096


class RecentRefusals:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_owner: dict[str, tuple[float, ApiError]] = {}  # owner -> until when, and the answer

    def note(self, owner: str, error: ApiError) -> None:
        """The engine has refused a request of this key."""
        if len(self._by_owner) >= MOST_KEYS:
            self._by_owner.clear()
        self._by_owner[owner] = self._clock() + HOLD_S, error

    def check(self, owner: str) -> None:
        """Raises the error of a refusal a moment ago."""
        until, error = self._by_owner.get(owner, (0.0, None))
        if error is None:
            return
        if self._clock() < until:  # a new one, as one that is raised keeps its frames
            raise ApiError(error.status, error.message, code=error.code, retry_after_s=error.retry_after_s)
        del self._by_owner[owner]
