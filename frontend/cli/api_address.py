"""A server's address for `quire chat`, `complete` and `models`: http, https or unix, and errors of TLS in words for the user.

It opens connections and says what is wrong with them; api_client.py sends requests over them. Standard library only.
"""

import http.client
import os
import socket
import ssl
from urllib.parse import urlsplit

from quire.ipc.process.command import as_started

CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 3.0
_OTHER_NAME = 62  # X509_V_ERR_HOSTNAME_MISMATCH; 63 and 64 are those of an e-mail and of an IP address
_TIMES = {9: "is not valid yet", 10: "has expired"}


class ChatError(Exception):
    """A request has failed; the text is for the user."""


class NotReadyError(ChatError):
    """No connection, or a 5xx answer: the server, or one behind a proxy, may be starting."""


class NoServerError(NotReadyError):
    """No connection."""


class StrangerError(ChatError):
    """The program that answers is no OpenAI-compatible server."""


class Address:
    """url: http://HOST:PORT, https://HOST:PORT or unix:PATH, with or without /v1. cacert: a PEM file of certificates that are
    trusted beside the system's.

    Raises ChatError for a bad URL or file.
    """

    def __init__(self, url: str, cacert: str | None = None) -> None:
        self.url, self.prefix = url, ""
        self._unix = url.removeprefix("unix:").removeprefix("//") if url.startswith("unix:") else None
        self._host, self._port, self._secure = "localhost", None, False
        if self._unix is None:
            try:
                parts = urlsplit(url if "://" in url else f"http://{url}")
                self._port = parts.port
            except ValueError as error:
                raise ChatError(f"{url}: this is not an URL ({error})") from None
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ChatError(f"{url}: an URL like http://127.0.0.1:8000 is needed")
            self._host, self._secure = parts.hostname, parts.scheme == "https"
            self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._context = _context(cacert) if self._secure else None
        if cacert is not None and not self._secure:
            raise ChatError(f"--cacert is for https, and {url} is not; write https:// if the server speaks TLS")

    @property
    def is_local(self) -> bool:
        """Whether it is a port of this machine without TLS, where a server of the user's own could be."""
        return self._unix is None and not self._secure and self._host in ("127.0.0.1", "localhost", "::1")

    def connect(self) -> http.client.HTTPConnection:
        """Raises NoServerError if there is no connection, ChatError if TLS fails."""
        connection: http.client.HTTPConnection
        if self._unix is not None:
            connection = _UnixConnection(self._unix)
        elif self._context is not None:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S, context=self._context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise ChatError(self._distrust(error)) from None
        except ssl.SSLError as error:
            connection.close()
            raise ChatError(self._no_tls(error)) from None
        except (ConnectionResetError, BrokenPipeError, TimeoutError) as error:
            connection.close()
            if self._secure and self._accepts():
                raise ChatError(self._no_tls(error)) from None
            raise self._nobody(error) from None
        except OSError as error:
            connection.close()
            raise self._nobody(error) from None
        return connection

    def why_broken(self, error: Exception) -> str:
        """Why an exchange over http has failed before its end."""
        if self._unix is None and not self._secure and self._speaks_tls():
            return f"{self.url} speaks TLS: write {self._other('https')}"
        return f"{self.url} broke off: {error}"

    def is_for_tls(self, page: bytes) -> bool:
        """Whether the page of a 400 is a TLS server's answer to plain http, as nginx gives it."""
        return not self._secure and b"HTTPS port" in page

    def wants_https(self) -> str:
        return f"{self.url} speaks TLS: write {self._other('https')}"

    def _nobody(self, error: OSError) -> NoServerError:
        hint = f"start one with: {as_started('quire serve')}"
        return NoServerError(f"nobody answers at {self.url} ({error.strerror or error}); {hint}")

    def _distrust(self, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code >= _OTHER_NAME and error.verify_code <= _OTHER_NAME + 2:
            return f"{self.url}: the server's certificate is for another name than {self._host} ({error.verify_message})"
        if error.verify_code in _TIMES:
            return f"{self.url}: the server's certificate {_TIMES[error.verify_code]}"
        return (
            f"{self.url}: the server's certificate is not trusted here ({error.verify_message}); if it is yours, "
            "name its file, or that of the authority that signed it, with --cacert FILE"
        )

    def _no_tls(self, error: OSError) -> str:
        reason = str(getattr(error, "reason", None) or error.strerror or error).replace("_", " ").lower()
        return f"{self.url}: TLS fails ({reason}); if the server speaks plain http, write {self._other('http')}"

    def _other(self, scheme: str) -> str:
        return f"{scheme}://{self.url.partition('://')[2] or self.url}"

    def _accepts(self) -> bool:
        try:
            socket.create_connection((self._host, self._port or 443), _PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def _speaks_tls(self) -> bool:
        """Whether a TLS handshake works, whatever the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with socket.create_connection((self._host, self._port or 80), _PROBE_TIMEOUT_S) as plain:
                context.wrap_socket(plain).close()
        except (OSError, ValueError):
            return False
        return True


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _context(cacert: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if cacert is not None:
        path = os.path.expanduser(cacert)
        try:
            context.load_verify_locations(path)
        except ssl.SSLError:
            raise ChatError(f"--cacert {cacert}: there is no certificate in PEM in it") from None
        except OSError as error:
            raise ChatError(f"--cacert {cacert}: {error.strerror}") from None
    return context
