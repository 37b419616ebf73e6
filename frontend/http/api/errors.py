"""Errors of the API: requests that cannot be right, and what the engine's client raises, as HTTP errors.

The one place where typed exceptions of the client become statuses; protocol/errors.py owns the class and its JSON. Texts name
the field and say what to do; they never hold a stack trace, a path or a prompt.
"""

import re

from quire.frontend.client.stream import EngineDown, EngineError, InvalidRequest, Overloaded, TooLong
from quire.frontend.http.protocol.errors import ApiError
from quire.ipc.sampling import SamplingParams

_FIELDS = frozenset((*SamplingParams.__struct_fields__, "priority", "cache_salt", "vllm_xargs"))
# What a grammar comes from begins the error about it, as a path: the field is its first name, of a tool the whole of it.
_GRAMMAR = re.compile(r"(response_format|guided_\w+|structured_outputs|tools(?:\[\d+\][\w.]*)?)[\w.]*( \(\w+\))?: ")


def invalid(message: str, param: str | None = None) -> ApiError:
    """A value that can never be right. Without `param`, the first field of the request that the text names."""
    if param is None and (place := _GRAMMAR.match(message)):
        param = place[1]
    if param is None:
        param = next((word for word in re.findall(r"\w+", message) if word in _FIELDS), None)
    return ApiError(400, _sentence(message), param=param, code="invalid_value")


def too_long(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, _sentence(message), param=param, code="context_length_exceeded")


def _sentence(message: str) -> str:
    """With a full stop, but for what ends with a picture of the place."""
    return message if message.endswith((".", "^")) else message + "."


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
