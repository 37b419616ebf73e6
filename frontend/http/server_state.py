"""State shared by all connections of one frontend process: limits, the application served, the open connections, the clock.

Listening sockets are in listener.py, HTTP in connection.py. One sweep a second enforces every deadline of every connection,
which costs less than a timer for each request and lets a test move the clock by hand.
"""

import asyncio
import math
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Protocol

import msgspec

from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one frontend process; times in seconds. Raises ValueError for one that is not positive."""

    max_connections: int = 8192
    num_reserved: int = 64  # more connections, for open routes alone, while all others have requests
    max_head_bytes: int = 32 << 10
    max_target_bytes: int = 8 << 10
    max_headers: int = 100
    max_body_bytes: int = 8 << 20  # 1 M token ids; 3 M empty lists, which take a second to parse and block the loop
    max_held_bytes: int = 1 << 30  # bodies of all connections that no handler has taken yet
    max_pipelined: int = 16
    head_timeout_s: float = 20.0
    body_timeout_s: float = 120.0
    keep_alive_timeout_s: float = 75.0
    write_timeout_s: float = 120.0  # a client that reads nothing for this long is taken to be gone

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0")


class Application(Protocol):
    """The application that the protocol serves."""

    def admit(self, request: Request) -> ApiError | None:
        """Called when the head is complete, before any byte of the body is kept: refuse, or set route and max_body."""

    async def handle(self, request: Request, response: Response) -> None:
        """Answer a complete request. Cancelled when the client has gone, or when the server's grace period is over."""


class Peer(Protocol):
    """A connection, as the process sees it."""

    @property
    def held_bytes(self) -> int: ...
    def check_deadlines(self, now: float) -> None: ...
    def make_room(self) -> None: ...
    def close_if_idle(self) -> None: ...
    def cancel(self) -> None: ...
    def abort(self) -> None: ...


class ServerState:
    """The shared state; `held_bytes` is the size of request bodies that no handler has taken yet."""

    def __init__(self, app: Application, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.app = app
        self.limits = limits or Limits()
        self.clock = clock
        self.connections: set[Peer] = set()
        self._resting: dict[Peer, None] = {}  # without a request, or with half a head: the one that has rested longest first
        self.held_bytes = 0
        self._held_by: dict[str, int] = {}  # the same by owner, without requests that have no key
        self.closing = False
        self.date = date_header()
        self._all_closed: asyncio.Event | None = None

    def may_hold(self, owner: str, num_bytes: int) -> bool:
        """Whether there is room for so much more of a body. An API key has a quarter of the whole; without one, all share."""
        most = self.limits.max_held_bytes
        if self.held_bytes + num_bytes > most:
            return False
        return not owner or self._held_by.get(owner, 0) + num_bytes <= most // 4

    def hold(self, owner: str, num_bytes: int) -> None:
        """Count bytes that are held; negative: they are not any more."""
        self.held_bytes += num_bytes
        if owner:
            self._held_by[owner] = self._held_by.get(owner, 0) + num_bytes
            if not self._held_by[owner]:
                del self._held_by[owner]

    def sweep(self) -> None:
        """Enforce every deadline; called once a second."""
        self.date = date_header()
        now = self.clock()
        for connection in list(self.connections):
            connection.check_deadlines(now)

    async def shut_down(self, grace_s: float) -> None:
        """Close idle connections, let answers in progress end within `grace_s`, then cancel them. Does not stop listening."""
        self.closing = True
        self._all_closed = asyncio.Event()
        for connection in list(self.connections):
            connection.close_if_idle()
        if not await self._closed_within(grace_s):
            for connection in list(self.connections):
                connection.cancel()
            if not await self._closed_within(2.0):  # last errors are on their way out
                for connection in list(self.connections):
                    connection.abort()
                await self._closed_within(2.0)

    async def _closed_within(self, seconds: float) -> bool:
        assert self._all_closed is not None
        if self.connections:
            try:
                async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                    await self._all_closed.wait()
            except TimeoutError:
                return False
        return True

    # ------------------------------------------------------------------------------------------ how many there may be
    def add(self, connection: "Peer") -> bool:
        """A new connection. If there are too many, the one that has rested longest is closed for it. Returns whether there is
        room: without any, not even among those that are reserved for open routes, the new one cannot be served."""
        most = self.limits.max_connections + (self.limits.num_reserved if self.is_full else 0)
        self.connections.add(connection)
        if len(self.connections) > most and self._resting:
            rested_longest = next(iter(self._resting))
            self._resting.pop(rested_longest)
            self.connections.discard(rested_longest)
            rested_longest.make_room()
        self._resting[connection] = None
        return len(self.connections) <= most

    def rests(self, connection: "Peer") -> None:
        """It has no request now, and has been answered."""
        if connection in self.connections:
            self._resting[connection] = None

    def works(self, connection: "Peer") -> bool:
        """It has sent the head of a request. Returns whether it is among those that may use all routes."""
        self._resting.pop(connection, None)
        return len(self.connections) - len(self._resting) <= self.limits.max_connections

    @property
    def is_full(self) -> bool:
        """Whether only open routes can be used by one more connection with a request."""
        return len(self.connections) - len(self._resting) >= self.limits.max_connections

    def forget(self, connection: "Peer") -> None:
        self._resting.pop(connection, None)
        self.connections.discard(connection)
        if self._all_closed is not None and not self.connections:
            self._all_closed.set()

    def check(self) -> None:
        """Assert that held_bytes is the sum over the connections."""
        held = sum(connection.held_bytes for connection in self.connections)
        assert held == self.held_bytes >= sum(self._held_by.values()) >= 0, (held, self.held_bytes)
        assert self._resting.keys() <= self.connections


def date_header() -> bytes:
    return f"date: {formatdate(usegmt=True)}\r\n".encode()
