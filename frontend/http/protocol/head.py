"""Checks of a request's head, made before its body is read: rules that llhttp does not enforce, and sizes."""

import re

from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request

BAD_REQUEST = "The request is not valid HTTP/1.1."


_ORIGIN = re.compile(rb"https?://[^/?#@]+(?=[/?]|$)", re.IGNORECASE)


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """(path, query), raw. Servers must also accept the absolute form, with scheme and host (RFC 9112, 3.2.2)."""
    if not target.startswith(b"/") and (origin := _ORIGIN.match(target)):
        target = target[origin.end() :]
        target = target if target.startswith(b"/") else b"/" + target
    path, _, query = target.partition(b"?")
    return path, query


def check_head(request: Request) -> ApiError | None:
    """Check what llhttp does not; returns an error or None. Sets expects_continue."""
    headers = request.headers
    if request.version not in ("1.0", "1.1"):
        return ApiError(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here.", code="bad_request")
    if request.method == "CONNECT":
        return ApiError(405, "This is no proxy.", code="bad_request", allow=("GET", "POST"))
    if request.version == "1.1" and b"host" not in headers:
        return ApiError(400, "The header host is missing.", code="bad_request")
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        if request.version == "1.0" or b"content-length" in headers:
            return ApiError(400, BAD_REQUEST, code="bad_request")
        if coding.lower() != b"chunked":
            return ApiError(501, "Only the transfer coding chunked is understood.", code="bad_request")
    expect = headers.get(b"expect")
    if expect is not None and request.version == "1.1":
        if expect.lower() != b"100-continue":
            return ApiError(417, "The header expect may only be 100-continue.", code="bad_request")
        request.expects_continue = has_body(request)
    return None


def has_body(request: Request) -> bool:
    return b"transfer-encoding" in request.headers or request.headers.get(b"content-length", b"0").strip(b"0") != b""


def check_length(request: Request) -> ApiError | None:
    length = request.headers.get(b"content-length")
    return body_too_large(request.max_body) if length is not None and int(length) > request.max_body else None


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request's body may be at most {limit} bytes long.", code="body_too_large")


def head_too_large() -> ApiError:
    return ApiError(431, "The request's header fields are too large.", code="header_too_large")
