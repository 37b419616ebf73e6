"""Fetch one file by HTTP, with everything bounded: hosts, addresses, bytes, time, and how many at once.

One GET on a connection of its own, to an address that was checked (addresses.py): no redirects, proxies, cookies or encodings.
TLS checks the certificate by the name. httptools parses the answer.
"""

import asyncio
import socket
import ssl
from contextlib import suppress

import httptools

from quire.frontend.media.addresses import Url, is_allowed, parse
from quire.frontend.media.errors import MediaBusy, MediaError
from quire.frontend.media.options import Domain
from quire.ipc.media import FETCH_S, MAX_FETCHES, MAX_FETCHES_OF_KEY

_MAX_HEAD = 32 << 10
_PIECE = 64 << 10
_GONE = "the address could not be fetched"


class Fetcher:
    """domains: hosts that may be fetched from. seconds: for one file. most_of_key: how many at once. For one event loop."""

    def __init__(self, domains: tuple[Domain, ...], seconds: float = FETCH_S, most_of_key: int = MAX_FETCHES_OF_KEY) -> None:
        self._domains = domains
        self._seconds, self._most_of_key = seconds, most_of_key
        self._running: dict[str, int] = {}  # by owner
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, owner: str, max_bytes: int) -> bytes:
        """The file. Raises MediaError; MediaBusy if too many are being fetched."""
        where = parse(url, self._domains)
        mine = self._running.get(owner, 0)
        if sum(self._running.values()) >= MAX_FETCHES or mine >= self._most_of_key:
            raise MediaBusy("too many media are being fetched")
        self._running[owner] = mine + 1
        try:
            async with asyncio.timeout(self._seconds):
                return await self._fetch(where, max_bytes)
        except TimeoutError:
            raise MediaError(f"{_GONE} within {self._seconds:g} s", code="media_late") from None
        except (OSError, EOFError, ssl.SSLError, httptools.HttpParserError):
            raise MediaError(_GONE, code="media_not_fetched") from None
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]

    async def _fetch(self, where: Url, max_bytes: int) -> bytes:
        address = await self._resolve(where)
        tls = self._tls_context() if where.is_tls else None
        reader, writer = await asyncio.open_connection(
            address, where.port, ssl=tls, server_hostname=where.host if tls else None, limit=_PIECE
        )
        try:
            writer.write(
                f"GET {where.target} HTTP/1.1\r\nHost: {where.authority}\r\nAccept: image/*\r\nAccept-Encoding: identity\r\n"
                "User-Agent: quire\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            return await _read(reader, max_bytes)
        finally:
            writer.close()
            with suppress(OSError, ssl.SSLError):
                writer.transport.abort()

    async def _resolve(self, where: Url) -> str:
        """One address of the host; all that it has must be allowed."""
        found = await asyncio.get_running_loop().getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        if not addresses or not all(is_allowed(each, where.domain) for each in addresses):
            raise MediaError("the host's address is not a public one", code="media_not_allowed")
        return addresses[0]

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _Answer:
    """An answer, as httptools tells of it."""

    def __init__(self, max_bytes: int) -> None:
        self.body = bytearray()
        self.is_complete = False
        self.is_open_ended = True  # neither a length nor chunks: the end of the connection ends the body
        self.parser = httptools.HttpResponseParser(self)
        self._max_bytes = max_bytes
        self.error: MediaError | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self.is_open_ended = False
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            self.error = MediaError("the address answers with an encoded body, which is not taken", code="media_not_fetched")
        if name == b"content-length" and value.strip().isdigit() and int(value) > self._max_bytes:
            self.error = _too_large(self._max_bytes)

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status != 200:
            self.error = MediaError(f"the address answers with status {status}, not 200", code="media_not_fetched")

    def on_body(self, body: bytes) -> None:
        if len(self.body) + len(body) > self._max_bytes:
            self.error = _too_large(self._max_bytes)
        elif self.error is None:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def _too_large(most: int) -> MediaError:
    return MediaError(f"the address has more than the {most} bytes that are taken", code="media_too_large")


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    answer, head = _Answer(max_bytes), 0
    while not answer.is_complete:
        piece = await reader.read(_PIECE)
        if not piece:
            break
        head += len(piece)
        answer.parser.feed_data(piece)
        if answer.error is not None:
            raise answer.error
        if not answer.body and head > _MAX_HEAD + _PIECE:
            raise EOFError
    if not answer.is_complete and not (answer.is_open_ended and answer.body):
        raise EOFError
    return bytes(answer.body)
