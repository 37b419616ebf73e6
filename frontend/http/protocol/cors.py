"""CORS: which web pages' scripts may read our answers (https://fetch.spec.whatwg.org/#http-cors-protocol).

This is no access control: a browser asks before it lets a page read an answer, or send JSON or a key, and the answers to that
are made here. Other clients ignore them. Quire uses no cookies: credentials are for a proxy in front of the server that uses
some, and are allowed only by a flag; API keys are a header like any other.
"""

import re
from collections.abc import Iterable, Mapping

from quire.frontend.http.protocol.exchange import Request

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]*")
_METHODS = ("GET", "HEAD", "POST", "DELETE")


class Cors:
    """allowed_origins: like "https://example.org"; "*" allows all, an empty list no page at all.

    allowed_methods, allowed_headers: what pages may send; "*" means all methods of the API, and any header that they ask for.
    allow_credentials: whether pages may send cookies.
    """

    def __init__(
        self,
        allowed_origins: Iterable[str] = ("*",),
        allowed_methods: Iterable[str] = ("*",),
        allowed_headers: Iterable[str] = ("*",),
        allow_credentials: bool = False,
    ) -> None:
        self._origins = frozenset(origin.encode() for origin in allowed_origins)
        methods = [method.upper() for method in allowed_methods]
        self._methods = ", ".join(_METHODS if "*" in methods else methods).encode()
        headers = list(allowed_headers)
        self._headers = None if "*" in headers else ", ".join(headers).encode()
        self._credentials = b"access-control-allow-credentials: true\r\n" if allow_credentials else b""

    def headers(self, request: Request) -> bytes:
        """Header lines for every answer to this request."""
        origin = request.headers.get(b"origin")
        if origin is None:
            return b""
        asks = self._answer_to_preflight(request) if is_preflight(request) else b""
        if b"*" in self._origins and not self._credentials:  # with credentials, browsers accept no "*"
            return b"access-control-allow-origin: *\r\n" + asks
        if b"*" not in self._origins and origin not in self._origins:
            return b"vary: origin\r\n" + asks
        return b"access-control-allow-origin: %b\r\n" % origin + self._credentials + b"vary: origin\r\n" + asks

    def _answer_to_preflight(self, request: Request) -> bytes:
        asked = request.headers.get(b"access-control-request-headers", b"")
        names = self._headers if self._headers is not None else asked if _HEADER_NAMES.fullmatch(asked) else b""
        allow = b"access-control-allow-headers: %b\r\n" % names if names else b""
        return b"access-control-allow-methods: %b\r\n" % self._methods + allow + b"access-control-max-age: 600\r\n"

    def allows(self, request: Mapping[bytes, bytes]) -> bool:
        """Whether a request with these headers comes from no page, or from a page of an allowed origin: for requests that a
        browser sends without a preflight, such as forms."""
        origin = request.get(b"origin")
        return origin is None or b"*" in self._origins or origin in self._origins


EVERYONE = Cors()


def is_preflight(request: Request) -> bool:
    """Whether a browser asks if a page may send a request. Such a question carries no API key."""
    return request.method == "OPTIONS" and b"origin" in request.headers and b"access-control-request-method" in request.headers
