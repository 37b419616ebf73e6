"""Outgoing: a frontend's messages to the core, from its event loop: sent at once, or held for a turn and sent as one."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from quire.ipc.links.sockets import readable, writable
from quire.ipc.messages.frontend import MAX_TOGETHER, TOGETHER_BYTES


class Outgoing:
    """The sending side of one DEALER, on the running event loop.

    on_readable is called, later, if there is something to receive: a ZeroMQ socket's descriptor is edge-triggered, and sending
    may have consumed an edge. on_failure is called if held messages cannot be sent, which ends the connection.
    """

    def __init__(self, socket: zmq.Socket, on_readable: Callable[[], None], on_failure: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, self._on_readable, self._on_failure = socket, on_readable, on_failure
        self._held: list[bytes] | None = None  # None: nothing is held back
        self._held_bytes = 0

    def send(self, encoded: bytes) -> bool:
        """Queue one message; False if the queue is full."""
        if self._held is None:
            return self._send([encoded])
        if len(self._held) == MAX_TOGETHER or self._held_bytes + len(encoded) > TOGETHER_BYTES:
            self._send_held()
        if not self._held and not self._has_room():
            return False
        self._held.append(encoded)
        self._held_bytes += len(encoded)
        return True

    def send_frames(self, frames: list[bytes | memoryview]) -> bool:
        """Queue one message of several frames, after those that are held; False if the queue is full."""
        self._send_held()
        return self._send(frames)

    @property
    def is_holding(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """Hold messages until the end of the loop's next turn."""
        if self._held is None:
            self._held = []
            # the next turn runs the callbacks of this one, and the inner call_soon; the turn after that releases
            self._loop.call_soon(self._loop.call_soon, self._release)

    def _release(self) -> None:
        self._send_held()
        self._held = None

    def _send_held(self) -> None:
        held, self._held, self._held_bytes = self._held, None if self._held is None else [], 0
        if held and not self._socket.closed and not self._send(held):  # there was room for the first, so there is for all
            self._on_failure("the engine does not take what was sent")

    def _has_room(self) -> bool:
        if self._socket.closed:
            return False
        has_room = writable(self._socket)
        self._look()
        return has_room

    def _send(self, frames: list[Any]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            sent = True
        except zmq.Again:
            sent = False
        self._look()
        return sent

    def _look(self) -> None:
        """Schedule a read: sending, or asking for room, may have consumed the descriptor's edge for new messages."""
        if readable(self._socket):
            self._loop.call_soon(self._on_readable)
