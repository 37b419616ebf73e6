"""The server that `quire chat MODEL` starts for itself when none answers: `quire serve` on a private unix socket.

It is a child of the chat (chat_child.py, ipc/process/children.py), so it ends with the chat in any case, also when the chat is
killed. What it logs comes through a pipe: its last line is the progress while it starts, and its last lines explain a failure.
"""

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Self, TextIO

import msgspec

from quire.frontend.cli.api_address import ChatError
from quire.ipc.process.children import Child, how_it_ended, spawn

_MODULE = "quire.frontend.cli.chat_child"
_READY = b"Quire serves "
STOP_S = 10.0  # until a server that was told to end is killed
_LOOK_S = 0.2
_SAY_S = 10.0  # between lines of progress where there is no terminal
_KEPT_LINES = 12
_WIDTH = 100


class OwnServerConfig(msgspec.Struct, frozen=True):
    """words: the command line of `quire serve`. log_fd: the pipe that takes its output."""

    words: list[str]
    log_fd: int


class OwnServer:
    """A running server of one's own. url: its address, once `wait_until_ready` has returned."""

    def __init__(self, model: str, flags: Sequence[str] = (), *, err: TextIO | None = None) -> None:
        """flags: of `quire serve`, behind the model."""
        self._model, self._err = model, err or sys.stderr
        self.url = ""
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        try:
            self._child: Child = spawn(_MODULE, OwnServerConfig([model, *flags], writes), [writes])
        except BaseException:  # Ctrl-C, too, leaves no pipe open
            os.close(reads)
            raise
        finally:
            os.close(writes)
        self._reads = reads
        self._rest = b""
        self._lines = deque[str](maxlen=_KEPT_LINES)
        self._reader: threading.Thread | None = None

    def wait_until_ready(self) -> None:
        """Show progress until the model is served. Raises ChatError with the server's own words if it cannot start."""
        progress = _Progress(self._model, self._err)
        try:
            while not self.url:
                if not self._read(_LOOK_S) and not self.url:
                    raise ChatError(self._why_ended())
                progress.show(self._lines[-1] if self._lines else "")
        finally:
            progress.end()
        self._reader = threading.Thread(target=self._read_on, name="quire-chat-log", daemon=True)
        self._reader.start()

    def why_gone(self) -> str | None:
        """Why the server is not there any more; None while it runs."""
        return None if self._child.poll() is None else self._why_ended()

    def stop(self) -> None:
        """End the server. May be called again."""
        if self._reads < 0:
            return
        self._child.terminate(STOP_S)
        if self._reader is not None:
            self._reader.join()  # the pipe has ended with the server and its children
        os.close(self._reads)
        self._reads = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self, timeout_s: float | None) -> bool:
        """Take what has come in timeout_s; False at the end of the output, with which the server has ended."""
        poll = select.poll()
        poll.register(self._reads, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            return True
        data = os.read(self._reads, 1 << 16)
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in filter(bytes.strip, lines):
            self._lines.append(line.decode(errors="replace").strip())
            if _READY in line:
                self.url = line.decode(errors="replace").rpartition(" at ")[2].strip().rstrip('"}')
        return bool(data)

    def _read_on(self) -> None:
        with suppress(OSError):
            while self._read(None):
                pass

    def _why_ended(self) -> str:
        code = self._child.wait(STOP_S)
        told = [line for line in self._lines if line.startswith("quire serve:")] or list(self._lines)
        said = "".join(f"\n  {line}" for line in told)
        return f"the server for {self._model} has ended ({how_it_ended(code)})" + (f"; it said:{said}" if said else "")


class _Progress:
    """How far the start is: one line that is written anew in a terminal, a line every ten seconds elsewhere."""

    def __init__(self, model: str, err: TextIO) -> None:
        self._model, self._err = model, err
        self._begin = self._said = time.monotonic()
        self._is_terminal = err.isatty()
        if not self._is_terminal:
            self._write(f"quire chat: starting a server for {model}\n")

    def show(self, line: str) -> None:
        now = time.monotonic()
        text = f"starting a server for {self._model}, {now - self._begin:.0f} s"
        if self._is_terminal:
            self._write(f"\r\033[K{f'{text}: {line}' if line else text}"[: _WIDTH + 4])
        elif now - self._said >= _SAY_S:
            self._said = now
            self._write(f"quire chat: {text}: {line}\n" if line else f"quire chat: {text}\n")

    def end(self) -> None:
        if self._is_terminal:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        with suppress(OSError):
            self._err.write(text)
            self._err.flush()
