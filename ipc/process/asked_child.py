"""AskedChild: a process that answers one question after the other, and is killed when an answer is late.

It processes input that may take much time or memory, or crash its process: the trial of grammars (enginecore/grammar/trial.py),
and chat templates of requests (frontend/text/request_templates.py). The child's side is a loop of framing.py's `receive` and
`send`.
"""

import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from quire.ipc.process.children import Child, prespawn
from quire.ipc.process.framing import is_readable, receive, send

START_TIMEOUT_S = 30.0  # until its first message, with its imports, on a busy machine


class AskedChild:
    """At most one child at a time, which runs one module. Not thread-safe."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: Child | None = None
        self._socket: socket.socket | None = None

    @property
    def is_there(self) -> bool:
        """Whether the child was started and has not ended since its last answer."""
        return self._socket is not None and not is_readable(self._socket, 0.0)

    def start(self, config: Callable[[int], msgspec.Struct], first: bytes = b"") -> bytes:
        """Start a child in place of an earlier one; returns its first message. Empty: it did not start, and there is none.

        config: makes its configuration from the number of its socket's descriptor. first: a message to send it at once, if any.
        Raises OSError if no process can be started.
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
        """The answer. None if it did not begin within timeout_s, empty if the child ended instead; the child is then gone."""
        assert self._socket is not None
        answer: bytes | None = b""
        with suppress(OSError):
            send(self._socket, question)
            answer = receive(self._socket) if is_readable(self._socket, timeout_s) else None
        if not answer:
            self.close()
        return answer

    def close(self) -> None:
        """End the child now, if there is one."""
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.terminate(0.0)
        self._socket = self._child = None
