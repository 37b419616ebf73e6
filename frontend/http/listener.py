"""Listening sockets, TCP or unix, bound before anything slow happens; and `Listener`, which serves one, with or without TLS.

The launching process binds (bind, bind_unix), so that an address in use is reported at once, and passes the socket on. New
connections use the newest certificate: when it changes, a new `asyncio` server is made on the same socket, so that open
connections and those that wait to be accepted are not disturbed.
"""

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import ssl
from contextlib import suppress
from typing import Any

from quire.frontend.http.protocol.connection import Connection
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.tls import TlsFiles, make_context
from quire.ipc.links.paths import MAX_SOCKET_PATH, claim_socket_path

log = logging.getLogger("quire.http")

_BACKLOG = 2048
REFRESH_S = 2.0  # between checks of the files for --enable-ssl-refresh


class FrontendError(Exception):
    """The frontend cannot start; the text is for the user."""


def bind(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """`count` TCP sockets bound to the same host and port (0: any free one), not listening yet, so that no client is left
    waiting while a model loads. Raises FrontendError, which says what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]  # fmt: skip
    except (OSError, UnicodeError) as error:
        raise FrontendError(f"--host {host}: {error}") from None
    sockets: list[socket.socket] = []
    try:
        # Bind once without SO_REUSEPORT first: with it, another server of the same user would share the port with us unnoticed.
        probe = _bound(socket.socket(family, kind, protocol), address, shared=False)
        if count == 1:
            return [probe]
        address = probe.getsockname()
        probe.close()
        for _ in range(count):
            sockets.append(_bound(socket.socket(family, kind, protocol), address, shared=True))
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise _cannot_listen(f"{host}:{port}", error) from None
    return sockets


def is_loopback(host: str) -> bool:
    """Whether a server that listens at this host is reached from its own machine alone."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def bind_unix(path: str, mode: int, count: int = 1) -> list[socket.socket]:
    """`count` duplicates of one unix socket at `path`. It listens already, by which other processes see that it is in use. A
    file left by a dead process is replaced. Raises FrontendError."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise FrontendError(f"--uds {path}: a socket's path may be at most {MAX_SOCKET_PATH} bytes long")
    path = os.path.abspath(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with claim_socket_path(path):
            before = os.umask(0o777 & ~mode)
            try:
                sock.bind(path)
            finally:
                os.umask(before)
            sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise FrontendError(f"--uds {path}: {error.strerror}") from None
    return [sock, *(sock.dup() for _ in range(count - 1))]


class UnixPath:
    """The file of our unix socket; `remove` leaves a file alone that another process has put in its place."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._inode = os.lstat(self._path).st_ino

    def remove(self) -> None:
        with suppress(OSError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def _bound(sock: socket.socket, address: object, shared: bool) -> socket.socket:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)  # type: ignore[arg-type]
    except OSError:
        sock.close()
        raise
    return sock


def _cannot_listen(where: str, error: OSError) -> FrontendError:
    if error.errno == errno.EADDRINUSE:
        host, _, port = where.rpartition(":")
        return FrontendError(f"port {port} of {host} is in use; choose another with --port")
    return FrontendError(f"cannot listen at {where}: {error.strerror}")


class Listener:
    """One process's listening socket, from `open` to `close`."""

    def __init__(self, sock: socket.socket, server: ServerState, tls: TlsFiles | None = None) -> None:
        """Raises FrontendError for files that cannot be used."""
        self._socket = sock
        self._server = server
        self._tls = tls
        self._stamp = tls.stamp() if tls is not None else None
        self._context: ssl.SSLContext | None = None
        self._listening: asyncio.Server | None = None
        self._refresher: asyncio.Task[None] | None = None
        try:
            self._context = make_context(tls) if tls is not None else None
        except ValueError as error:
            raise FrontendError(str(error)) from None

    async def open(self) -> None:
        """Listen. Raises FrontendError."""
        loop = asyncio.get_running_loop()
        host, port = (*self._socket.getsockname()[:2], "")[:2]
        try:
            self._listening = await self._listen()
        except OSError as error:  # another process bound the same address and listened first
            raise _cannot_listen(f"{host}:{port}", error) from None
        if self._tls is not None:
            loop.set_exception_handler(_quiet_about_handshakes)
            if self._tls.refresh:
                self._refresher = loop.create_task(self._keep_fresh())

    async def _listen(self) -> asyncio.Server:
        loop, sock = asyncio.get_running_loop(), self._socket.dup()
        create: Any = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        try:
            return await create(lambda: Connection(self._server), sock=sock, backlog=_BACKLOG, **self._options())
        except OSError:
            sock.close()
            raise

    def _options(self) -> dict[str, Any]:
        if self._context is None:
            return {}
        return {"ssl": self._context, "ssl_handshake_timeout": self._server.limits.head_timeout_s}

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self.refresh()

    async def refresh(self) -> bool:
        """Load certificates that have changed, if they can be used; returns whether new ones are in use."""
        if self._tls is None:
            return False
        stamp = self._tls.stamp()
        if stamp == self._stamp or self._listening is None:
            return False
        self._stamp = stamp
        try:
            self._context = make_context(self._tls)
        except ValueError as error:
            log.error("the certificate has changed and cannot be used; the former one stays: %s", error)
            return False
        try:
            before, self._listening = self._listening, await self._listen()
        except OSError as error:
            log.error("the certificate has changed and cannot be taken up yet: %s", error.strerror)
            self._stamp = None  # the next look tries again
            return False
        before.close()
        log.info("new connections get the certificate as it is now in %s", self._tls.certfile)
        return True

    def close(self) -> None:
        """Stop listening; connections stay open. May be called again."""
        if self._refresher is not None:
            self._refresher.cancel()
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._socket.close()


def _quiet_about_handshakes(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log failed handshakes without a traceback: the client speaks no TLS, or has no valid certificate."""
    if isinstance(context.get("exception"), ssl.SSLError | ConnectionError | TimeoutError):
        log.debug("a connection failed: %s", context["exception"])
    else:
        loop.default_exception_handler(context)
