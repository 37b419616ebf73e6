"""LimitedLog: log lines that a peer can cause at any rate, limited so that they do not fill a disk.

LINES of them may come at once, then one every LINE_S; a line says how many were left out before it. At most 2 MB a day.
"""

import logging
import time
from collections.abc import Callable

LINES = 10
LINE_S = 10.0


class LimitedLog:
    """The limit for one source of lines. clock: returns seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._left, self._since = float(LINES), clock()
        self._num_left_out = 0

    def warning(self, text: str, *values: object) -> None:
        """Log as Logger.warning does, if the limit allows it. Each value is cut at 200 characters, line breaks are escaped."""
        now = self._clock()
        self._left = min(float(LINES), self._left + (now - self._since) / LINE_S)
        self._since = now
        if self._left < 1.0:
            self._num_left_out += 1
            return
        self._left -= 1.0
        before = f" ({self._num_left_out} such lines were left out before)" if self._num_left_out else ""
        self._num_left_out = 0
        self._log.warning(text + "%s", *(ascii(str(value))[1:-1][:200] for value in values), before)
