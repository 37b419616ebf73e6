"""CORS: which web pages' scripts may read our answers (https://fetch.spec.whatwg.org/#http-cors-protocol).

Nothing here lets anyone in: a browser asks before it lets a page see an answer, or send JSON or a key, and this is what it is
told. Everyone else ignores it. Cookies are not known here: credentials are for a proxy before the server that knows some, and
are never allowed unless asked for; keys are a header like others.
"""

import re
from collections.abc import Iterable, Mapping

from quire.frontend.http.protocol.exchange import Request

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]*")
_METHODS = ("GET", "HEAD", "POST", "DELETE")


class Cors:
    """allowed_origins: like "https://example.org"; "*" is all of them, none is no page at all.

    allowed_methods, allowed_headers: what pages may send; "*" is what there is, and whatever they ask for. allow_credentials:
    cookies, too.
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
        if b"*" in self._origins and not self._credentials:  # with credentials, browsers want the very origin
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
        """Whether a request with these headers comes from no page, or from one of an allowed origin: for what a browser sends
        without asking first, as it does forms."""
        origin = request.get(b"origin")
        return origin is None or b"*" in self._origins or origin in self._origins


EVERYONE = Cors()


def is_preflight(request: Request) -> bool:
    """A browser's question whether a page may send something. It carries no key: browsers send none with it."""
    return request.method == "OPTIONS" and b"origin" in request.headers and b"access-control-request-method" in request.headers
