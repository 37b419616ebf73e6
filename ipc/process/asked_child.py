"""AskedChild: a process that answers one question after the other, and is killed when an answer is late.

For what may keep busy, swell or crash whoever reads it: the trial of grammars (enginecore/grammar/trial.py), chat templates
that requests bring (frontend/text/request_templates.py). The child's side is a loop of framing.py's `receive` and `send`.
"""

import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from quire.ipc.process.children import Child, prespawn
from quire.ipc.process.framing import is_readable, receive, send

START_TIMEOUT_S = 30.0  # for its modules, and what it does before its first word; on a busy machine


class AskedChild:
    """At most one child at a time, of one module. Not for several threads at once."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: Child | None = None
        self._socket: socket.socket | None = None

    @property
    def is_there(self) -> bool:
        """Whether it was started and has not ended since its last answer."""
        return self._socket is not None and not is_readable(self._socket, 0.0)

    def start(self, config: Callable[[int], msgspec.Struct], first: bytes = b"") -> bytes:
        """Start it, instead of one that there may be: the first thing it says; empty if it does not start, and is none then.

        config: its configuration, by the number of its socket's descriptor. first: what it is sent at once, if anything.
        Raises OSError if no process can be had.
        """
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._child = prespawn(self._module)
            self._child.configure(config(theirs.fileno()), [theirs.fileno()])
        self._socket.settimeout(START_TIMEOUT_S)
        said = b""
        with suppress(OSError):
            if first:
                send(self._socket, first)
            said = receive(self._socket)
        if not said:
            self.close()
        return said

    def ask(self, question: bytes, timeout_s: float) -> bytes | None:
        """The answer; None if it began later than timeout_s, empty if the child ended over it: then there is none any more."""
        assert self._socket is not None
        answer: bytes | None = b""
        with suppress(OSError):
            send(self._socket, question)
            answer = receive(self._socket) if is_readable(self._socket, timeout_s) else None
        if not answer:
            self.close()
        return answer

    def close(self) -> None:
        """End it now, if it is there."""
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.terminate(0.0)
        self._socket = self._child = None
