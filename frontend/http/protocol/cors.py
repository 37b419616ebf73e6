"""CORS: which web pages' scripts may read our answers (https://fetch.spec.whatwg.org/#http-cors-protocol).

Nothing here lets anyone in: a browser asks before it lets a page see an answer, or send JSON or a key, and this is what it is
told. Everyone else ignores it. Cookies are not known here, so credentials are never allowed; keys are a header like others.
"""

import re
from collections.abc import Iterable, Mapping

from quire.frontend.http.protocol.exchange import Headers, Request

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]*")


class Cors:
    """allowed_origins: like "https://example.org"; "*" is all of them, none is no page at all."""

    def __init__(self, allowed_origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in allowed_origins)

    def headers(self, request: Mapping[bytes, bytes]) -> bytes:
        """Header lines for every answer to a request with these headers."""
        origin = request.get(b"origin")
        if origin is None:
            return b""
        if b"*" in self._origins:
            return b"access-control-allow-origin: *\r\n"
        allow = b"access-control-allow-origin: %b\r\n" % origin if origin in self._origins else b""
        return allow + b"vary: origin\r\n"

    def lets_in(self, request: Mapping[bytes, bytes]) -> bool:
        """Whether a request with these headers comes from no page, or from one of an allowed origin: for what a browser sends
        without asking first, as it does forms."""
        origin = request.get(b"origin")
        return origin is None or b"*" in self._origins or origin in self._origins


def is_preflight(request: Request) -> bool:
    """A browser's question whether a page may send something. It carries no key: browsers send none with it."""
    return request.method == "OPTIONS" and b"origin" in request.headers and b"access-control-request-method" in request.headers


def preflight_headers(request: Mapping[bytes, bytes]) -> Headers:
    """What a page of an allowed origin may send: any header."""
    asked = request.get(b"access-control-request-headers", b"")
    names = ((b"access-control-allow-headers", asked),) if asked and _HEADER_NAMES.fullmatch(asked) else ()
    return ((b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"), *names, (b"access-control-max-age", b"600"))
