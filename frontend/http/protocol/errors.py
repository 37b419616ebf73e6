"""Every error a client can see: one exception class, OpenAI's JSON shape, fixed texts.

`ApiError` is raised by routes and by the protocol alike and becomes `{"error": {"message", "type", "param", "code"}}`. The
texts say what to do; they never contain a stack trace, a path or a prompt. Exceptions of the engine's client are turned into
ApiErrors in api/errors.py: the engine is not known here.
"""

from collections.abc import Iterable

import msgspec

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An HTTP error answer. `retry_after_s` and `allow` become the headers of those names. should_retry: False where clients
    would send a request again by themselves and must not; OpenAI's and Anthropic's obey the header x-should-retry."""

    event = b"data: %b\n\n"  # how a stream that fails sends the body

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: Iterable[str] = (),
        should_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = tuple(allow)
        self.should_retry = should_retry

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(ErrorBody(self.message, self.type, self.param, self.code)))

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        headers: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.allow:
            headers.append((b"allow", ", ".join(self.allow).encode()))
        if not self.should_retry:
            headers.append((b"x-should-retry", b"false"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return tuple(headers)


def internal_error() -> ApiError:
    """The answer for a bug of ours; the details are in the server's log."""
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down", retry_after_s=5)
