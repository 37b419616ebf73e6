"""Every error a client can see: one exception class, OpenAI's JSON shape, fixed texts.

`ApiError` is raised by routes and by the protocol alike and becomes `{"error": {"message", "type", "param", "code"}}`. The
texts name the field and say what to do; they never hold a stack trace, a path or a prompt. `from_exception` is the one place
where the typed exceptions of the client and of SamplingParams become HTTP statuses.
"""

import re
from collections.abc import Iterable

import msgspec

from quire.frontend.client.async_client import EngineDown, EngineError, InvalidRequest, Overloaded, TooLong
from quire.ipc.sampling import SamplingParams

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An HTTP error answer. `retry_after_s` and `allow` become the headers of those names."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = tuple(allow)

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
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return tuple(headers)


def internal_error() -> ApiError:
    """What a client sees of a bug of ours; the details are in the server's log."""
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down", retry_after_s=5)


_FIELDS = frozenset((*SamplingParams.__struct_fields__, "priority", "cache_salt"))


def invalid(message: str, param: str | None = None) -> ApiError:
    """A value that can never be right. Without `param`, the first field of the request that the text names."""
    if param is None:
        param = next((word for word in re.findall(r"\w+", message) if word in _FIELDS), None)
    return ApiError(400, message if message.endswith(".") else message + ".", param=param, code="invalid_value")


def too_long(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message if message.endswith(".") else message + ".", param=param, code="context_length_exceeded")


def from_exception(error: Exception, prompt_field: str | None = None) -> ApiError | None:
    """The HTTP error for what a route may meet; None for a bug of ours. prompt_field: where this route takes its prompt."""
    match error:
        case ApiError():
            return error
        case TooLong():
            return too_long(str(error), prompt_field)
        case InvalidRequest():
            return invalid(str(error), prompt_field if str(error).startswith("the prompt ") else None)
        case Overloaded():
            return ApiError(503, "The engine's queue is full; try again later.", code="overloaded", retry_after_s=1)
        case EngineDown():
            return ApiError(503, "The engine is not available; try again later.", code="engine_down", retry_after_s=2)
        case EngineError():
            return ApiError(500, "The engine failed while it ran this request.", code="engine_error")
    return None
