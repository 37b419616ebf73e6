"""--access-log: a line for each HTTP request: the client's address, method and path, the answer's status, and the time it took.

The event loop only appends an entry (a microsecond); a thread writes entries a fraction of a second later. Query strings are
left out, because they may contain secrets. `flush` writes the remaining entries when the server ends.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

from quire.frontend.http.protocol.exchange import Request

logger = logging.getLogger("quire.access")

_DELAY_S = 0.25
_MOST = 1 << 16  # entries that wait to be written: the reader of stderr may be slow


class _Entry(NamedTuple):
    peer: object
    method: str
    path: bytes
    status: int
    seconds: float


class AccessLog:
    """without: paths that are not logged."""

    def __init__(self, without: Iterable[str] = ()) -> None:
        self._without = frozenset(path.encode() for path in without)
        self._entries: list[_Entry] = []
        self._dropped = 0
        self._is_due = False

    def add(self, request: Request, status: int, seconds: float = 0.0) -> None:
        """status 0: the client disconnected before there was an answer."""
        path = bytes(request.path)
        if path in self._without:
            return
        if len(self._entries) >= _MOST:
            self._dropped += 1
            return
        self._entries.append(_Entry(request.peer, request.method, path, status, seconds))
        if not self._is_due:
            self._is_due = True
            loop = asyncio.get_running_loop()
            loop.call_later(_DELAY_S, lambda: loop.run_in_executor(None, self.flush))

    def flush(self) -> None:
        self._is_due = False  # before the list is taken: an entry added from here on schedules another flush
        entries, self._entries = self._entries, []
        dropped, self._dropped = self._dropped, 0
        for peer, method, path, status, seconds in entries:
            shown = path.decode("ascii", "backslashreplace")
            logger.info('%s "%s %s" %s %.3f s', _address(peer), method, shown, status or "-", seconds)
        if dropped:
            logger.warning("%d more requests are not listed: they came faster than they could be written", dropped)


def _address(peer: object) -> str:
    match peer:
        case (str() as host, int() as port, *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "-"
