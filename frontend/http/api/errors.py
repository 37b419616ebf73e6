"""Errors of the API: invalid requests, and exceptions of the engine's client, as HTTP errors.

Only here do the client's exceptions become statuses; protocol/errors.py owns the class and its JSON. Texts name the field and
say what to do; they never contain a stack trace, a path or a prompt.
"""

import re

from quire.frontend.client.stream import (
    DeadlineExceeded,
    EngineDown,
    EngineError,
    InvalidRequest,
    MediaFailed,
    NotFound,
    Overloaded,
    RateLimited,
    TooLong,
)
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.media.errors import MediaBusy, MediaError
from quire.ipc.pooling import PoolingParams
from quire.ipc.sampling import SamplingParams

_FIELDS = frozenset(
    (*SamplingParams.__struct_fields__, *PoolingParams.__struct_fields__, "priority", "cache_salt", "vllm_xargs", "instruction")
    + ("weights_for_different_modes",)
)
# An error about a grammar begins with the path of its source in the body. The field is the path's first name, or, for a tool,
# the whole path.
_GRAMMAR = re.compile(r"(response_format|guided_\w+|structured_outputs|tools(?:\[\d+\][\w.]*)?)[\w.]*( \(\w+\))?: ")


def invalid(message: str, param: str | None = None) -> ApiError:
    """The error for an invalid value. param: its field; if None, the first field that the text names."""
    if param is None and (place := _GRAMMAR.match(message)):
        param = place[1]
    if param is None:
        param = next((word for word in re.findall(r"\w+", message) if word in _FIELDS), None)
    return ApiError(400, _sentence(message), param=param, code="invalid_value")


def too_long(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, _sentence(message), param=param, code="context_length_exceeded")


def _sentence(message: str) -> str:
    """The text with a full stop, unless it ends with a caret that points at the place."""
    return message if message.endswith((".", "^")) else message + "."


def _capital(message: str) -> str:
    return message[:1].upper() + message[1:]


def from_exception(error: BaseException, prompt_field: str | None = None) -> ApiError | None:
    """The HTTP error for an exception that a route may raise; None for a bug. prompt_field: the route's field of the prompt."""
    match error:
        case ApiError():
            return error
        case TooLong():
            return too_long(str(error), prompt_field)
        case MediaError():
            text = f"{error.param}: {error}" if error.param else _capital(str(error))
            return ApiError(400, _sentence(text), param=error.param or prompt_field, code=error.code)
        case MediaBusy():
            return ApiError(503, _sentence(_capital(str(error))), code="overloaded", retry_after_s=error.retry_after_s)
        case NotFound():
            return ApiError(404, _sentence(str(error)), param="model", code="model_not_found")
        case InvalidRequest():
            return invalid(str(error), prompt_field if str(error).startswith("the prompt ") else None)
        case Overloaded():
            after_s = error.retry_after_s or 1
            return ApiError(503, "The engine's queue is full; try again later.", code="overloaded", retry_after_s=after_s)
        case RateLimited():
            after_s = error.retry_after_s or 1
            return ApiError(429, _sentence(_capital(str(error))), code="rate_limit_exceeded", retry_after_s=after_s)
        case DeadlineExceeded():
            return ApiError(504, _sentence(_capital(str(error))), code="deadline_exceeded", should_retry=False)
        case EngineDown():
            after_s = error.retry_after_s or 2
            return ApiError(503, "The engine is not available; try again later.", code="engine_down", retry_after_s=after_s)
        case MediaFailed():
            return ApiError(500, _sentence(_capital(str(error))), code="media_failed")
        case EngineError():
            return ApiError(500, "The engine failed while it ran this request.", code="engine_error")
    return None
