"""AskedChild: a process that answers one question after the other, and is killed when an answer is late.

It processes input that may take much time or memory, or crash its process: the trial of grammars (enginecore/grammar/trial.py),
and chat templates (frontend/text/request_templates.py). The child's side is a loop of framing.py's `receive` and `send`.

Time is the child's CPU time, so that a busy machine makes no question too hard. A child that was killed or stopped by a signal
from elsewhere, or that gets no CPU, has judged nothing: another one is asked once more. A child that ends is not trusted to
have ended by itself either: only if a second one crashes at the same question, the question is at fault.
"""

import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from quire.ipc.process.children import KILL_WAIT_S, Child, prespawn
from quire.ipc.process.framing import is_readable, receive, send
from quire.ipc.process.stopped import StoppedFor
from quire.ipc.process.usage import cpu_seconds

log = logging.getLogger("quire")

START_TIMEOUT_S = 30.0  # until its first message, with its imports, on a busy machine
STOPPED_LIMIT_S = 1.0  # how long a signal may have stopped it
WALL_LEAST_S, WALL_FACTOR = 10.0, 4.0  # seconds that pass at most, at least so many for each second of CPU time
_LOOK_S = 0.25
# Signals by which a process ends because of what it does. Others come from elsewhere, like the kernel's when memory runs out.
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP))


class ChildLost(OSError):
    """Two processes in a row were killed, stopped or starved by something else: the question may be good."""


class _Start(NamedTuple):
    config: Callable[[int], msgspec.Struct]
    first: bytes
    said: bytes


class AskedChild:
    """At most one child at a time, which runs one module. Not thread-safe."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        """environment: of the child; None: this process's."""
        self._module = module
        self._environment = environment
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._started: _Start | None = None

    @property
    def is_there(self) -> bool:
        """Whether the child was started and has not ended since its last answer."""
        return self._socket is not None and not is_readable(self._socket, 0.0)

    def start(self, config: Callable[[int], msgspec.Struct], first: bytes = b"") -> bytes:
        """Start a child in place of an earlier one; returns its first message. Empty: it did not start, and there is none.

        config: makes its configuration from the number of its socket's descriptor. first: a message to send it at once, if any.
        One that ends before it says anything is started once more. Raises OSError if no process can be started.
        """
        said = self._start(config, first) or self._start(config, first)
        self._started = _Start(config, first, said)
        return said

    def _start(self, config: Callable[[int], msgspec.Struct], first: bytes) -> bytes:
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._child = prespawn(self._module, environment=self._environment)
            self._child.configure(config(theirs.fileno()), [theirs.fileno()])
        self._socket.settimeout(START_TIMEOUT_S)
        said = b""
        with suppress(OSError):
            if first:
                send(self._socket, first)
            said = receive(self._socket) if self._wait(START_TIMEOUT_S) else b""
        if not said:
            self.close()
        return said

    def ask(self, question: bytes, timeout_s: float, wall_s: float | None = None) -> bytes | None:
        """The answer. None if it takes more than timeout_s of CPU time, empty if the child ends instead, twice; the child is
        gone then. wall_s: None also once so many seconds have passed, for a question that waits for others, like a download;
        if a second child is asked, it has as many. Raises ChildLost if neither can be told, OSError if no process can be
        started."""
        answer = self._ask(question, timeout_s, wall_s)
        if not isinstance(answer, ChildLost) and answer != b"":
            return answer
        log.warning("%s; another one is asked", answer or f"a process of {self._module} ended while it answered")
        start = self._started
        if start is None or self.start(start.config, start.first) != start.said:
            raise ChildLost(f"a process of {self._module} does not start again")
        answer = self._ask(question, timeout_s, wall_s)
        if isinstance(answer, ChildLost):
            raise answer
        return answer

    def _ask(self, question: bytes, timeout_s: float, most_s: float | None) -> bytes | ChildLost | None:
        assert self._socket is not None and self._child is not None
        answer: bytes | None = b""
        most_cpu_s, is_late = cpu_seconds(self._child.pid) + timeout_s, False
        wall_s = max(WALL_LEAST_S, WALL_FACTOR * timeout_s) if most_s is None else most_s
        began = time.monotonic()
        self._socket.settimeout(wall_s)
        with suppress(OSError):
            send(self._socket, question)
            if self._wait(wall_s, most_cpu_s):
                answer = receive(self._socket)
            else:
                is_late = True
        if answer:
            return answer
        has_passed = most_s is not None and time.monotonic() - began >= most_s
        if is_late and (has_passed or cpu_seconds(self._child.pid) >= most_cpu_s):
            self.close()
            return None
        code = None if is_late else self._child.wait(KILL_WAIT_S)
        self.close()
        if code is None or (code <= 0 and -code not in _CRASHES):
            return ChildLost(f"a process of {self._module} {'got no time' if is_late else 'was killed'} while it answered")
        return b""

    def _wait(self, seconds: float, most_cpu_s: float = float("inf")) -> bool:
        """Wait for an answer, or for the end of the child. False after so long, or once the child has used so much CPU time, or
        if it was stopped."""
        assert self._socket is not None and self._child is not None
        deadline, stopped_for = time.monotonic() + seconds, StoppedFor()
        while not is_readable(self._socket, min(_LOOK_S, most_cpu_s)):
            if cpu_seconds(self._child.pid) >= most_cpu_s or time.monotonic() >= deadline:
                return False
            if stopped_for.seconds(self._child.is_stopped()) >= STOPPED_LIMIT_S:
                return False
        return True

    def close(self) -> None:
        """End the child now, if there is one."""
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.terminate(0.0)
        self._socket = self._child = None
