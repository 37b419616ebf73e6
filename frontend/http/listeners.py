"""Listeners: the sockets that one frontend process serves: its own, and those of frontends that are down, lent by the launcher.

Used by server.py; the launcher decides who serves which socket (cli/frontends.py).
"""

import logging
import socket

from quire.frontend.http.listener import FrontendError, Listener
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.tls import TlsFiles

log = logging.getLogger("quire.http")


class Listeners:
    """From `open` to `close`. Methods are called in the event loop."""

    def __init__(self, sock: socket.socket, server: ServerState, tls: TlsFiles | None = None) -> None:
        """Raises FrontendError for files that cannot be used."""
        self._server, self._tls = server, tls
        self._own = Listener(sock, server, tls)
        self._lent: dict[str, Listener] = {}
        self._is_closed = False

    async def open(self) -> None:
        """Listen. Raises FrontendError."""
        await self._own.open()

    async def adopt(self, name: str, sock: socket.socket) -> None:
        """Serve another frontend's socket, with the connections in its queue, until `release`."""
        self.release(name)
        if self._is_closed:
            return sock.close()
        try:
            listener = self._lent[name] = Listener(sock, self._server, self._tls)
            await listener.open()
        except FrontendError as error:
            log.error("connections of another frontend wait for it: %s", error)
            self.release(name)
            sock.close()

    def release(self, name: str) -> None:
        """Leave a socket to its frontend again; connections that were accepted stay here."""
        if (listener := self._lent.pop(name, None)) is not None:
            listener.close()

    async def refresh(self) -> None:
        """Load certificates that have changed, if they can be used."""
        for listener in (self._own, *self._lent.values()):
            await listener.refresh()

    def close(self) -> None:
        """Stop listening; connections stay open. May be called again."""
        self._is_closed = True
        self._own.close()
        for name in list(self._lent):
            self.release(name)
